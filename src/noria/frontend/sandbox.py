"""Jinja's sandbox with limits on time and on the size of what a template makes.

The sandbox alone keeps a template from attributes and calls that are unsafe; it does not keep it from running for ever
or from filling the memory. Limits are checked where Jinja lets code step in: at every access, call and operator, and
at the turns of loops. What remains (`~` and filters that double a long text again and again) ends at the time limit.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes, pass_environment
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT = 16 << 20  # characters
MAX_SECONDS = 10.0
MAX_LOOP = 1_000_000  # turns of loops over ranges
MAX_BITS = 4096  # of a number
MAX_WIDTH = 9999  # of padding
MAX_VALUE = MAX_OUTPUT  # characters or elements of an intermediate value
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDTH = re.compile(r"\d{5,}")
_NESTED = re.compile(r":[^{}]*\{")  # a width that is itself an argument of `format`
_TURNS = "_turns"  # the filter through which all loops go
_SOME = 256  # turns of a loop between two looks at the clock
_PADDING_FILTERS = frozenset({"center", "indent", "batch", "slice", "wordwrap"})


class TooMuch(Exception):
    """A template went over a limit."""


class _Limits(threading.local):
    deadline = float("inf")
    turns = 0


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates are compiled and run in. Threads may render at the same time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._limits = _Limits()
        self.globals["range"] = self._range
        for name in _PADDING_FILTERS:
            self.filters[name] = _padding(self.filters[name])
        self.filters["format"] = _format(self.filters["format"])
        self.filters["sum"] = _sum(self.filters["sum"])
        self.filters[_TURNS] = self._counted

    @contextmanager
    def limits(self) -> Iterator[None]:
        """Starts the clock for what this thread renders within."""
        self._limits.deadline = time.monotonic() + MAX_SECONDS
        self._limits.turns = 0
        try:
            yield
        finally:
            self._limits.deadline = float("inf")

    def check(self) -> None:
        if time.monotonic() > self._limits.deadline:
            raise TooMuch(f"it ran longer than {MAX_SECONDS:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            how: dict[str, Any] = {"lineno": loop.lineno, "environment": self}
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, **how)
        return tree

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values; loops in loops, with nothing inside, would not be seen otherwise."""
        for turn, value in enumerate(values):
            if turn % _SOME == 0:
                self.check()
            yield value

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check()
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps `format`
        if isinstance(owner := getattr(method, "__self__", None), str):
            _check_text_method(owner, getattr(method, "__name__", ""), (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check()
        if operator == "*" and _product(left, right) > MAX_VALUE:
            raise TooMuch(f"a value of more than {MAX_VALUE} elements")
        if operator == "**" and _power_bits(left, right) > MAX_BITS:
            raise TooMuch(f"a number of more than {MAX_BITS} bits")
        if operator == "+" and _joined(left, right) > MAX_VALUE:
            raise TooMuch(f"a value of more than {MAX_VALUE} elements")
        if operator == "%" and isinstance(left, str) and (_WIDTH.search(left) or "*" in left):
            raise TooMuch(f"a format with a width of more than {MAX_WIDTH}")
        return super().call_binop(context, operator, left, right)

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self._limits.turns += len(numbers)
        if self._limits.turns > MAX_LOOP:
            raise TooMuch(f"more than {MAX_LOOP} turns of loops")
        self.check()
        return numbers


def _check_text_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Refuses a method of a text that would make a long one."""
    wide = any(isinstance(a, int) and a > MAX_WIDTH for a in args)
    if name in _PADDING and wide:
        raise TooMuch(f"{name}() with a width of more than {MAX_WIDTH}")
    if name in ("format", "format_map") and (_WIDTH.search(text) or (wide and _NESTED.search(text))):
        raise TooMuch(f"{name}() with a number of more than {MAX_WIDTH}")
    if name in ("replace", "join") and _grown(text, name, args) > MAX_VALUE:
        raise TooMuch(f"{name}() would make a text of more than {MAX_VALUE} characters")


def _product(left: Any, right: Any) -> int:
    """Length of left * right."""
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            return len(value) * count
        if isinstance(value, int) and isinstance(count, int) and value.bit_length() + count.bit_length() > MAX_BITS:
            return MAX_VALUE + 1
    return 0


def _power_bits(left: Any, right: Any) -> int:
    return right * left.bit_length() if isinstance(left, int) and isinstance(right, int) else 0


def _joined(left: Any, right: Any) -> int:
    """Length of left + right."""
    return len(left) + len(right) if isinstance(left, str | list | tuple) and isinstance(right, type(left)) else 0


def _grown(owner: str, name: str, args: tuple[Any, ...]) -> int:
    """An upper bound of the length of a text after `replace` or `join`, without making it."""
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        return len(owner) + owner.count(args[0]) * max(0, len(args[1]) - len(args[0]))
    if name == "join" and args and isinstance(args[0], list | tuple):
        return len(owner) * len(args[0]) + sum(len(item) for item in args[0] if isinstance(item, str))
    return 0


def _format(filter_: Any) -> Any:
    def limited(text: Any, *args: Any, **kwargs: Any) -> Any:
        if _WIDTH.search(str(text)) or "*" in str(text):
            raise TooMuch(f"a format with a width of more than {MAX_WIDTH}")
        return filter_(text, *args, **kwargs)

    return limited


def _sum(filter_: Any) -> Any:
    @pass_environment
    def limited(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):  # each list would be copied into the next
            raise TooMuch("a sum of what are no numbers")
        return filter_(environment, values, attribute, start)

    return limited


def _padding(filter_: Any) -> Any:
    def limited(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, int) and a > MAX_WIDTH for a in (*args, *kwargs.values())):
            raise TooMuch(f"a filter with a width of more than {MAX_WIDTH}")
        return filter_(*args, **kwargs)

    for mark in ("jinja_pass_arg",):  # the environment or context that the filter wants as its first argument
        if hasattr(filter_, mark):
            setattr(limited, mark, getattr(filter_, mark))
    return limited
