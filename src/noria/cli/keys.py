"""What a key of a configuration file may be, and what it sets. The keys themselves are in `cli/sections.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, without those that are open."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def allows(self, value: float) -> bool:
        if not self.low <= value <= self.high:  # nor if it is not a number
            return False
        return not (self.open_low and value == self.low) and not (self.open_high and value == self.high)

    def __str__(self) -> str:
        low, high = f"{self.low:.10g}", f"{self.high:.10g}"
        if not self.open_low and not self.open_high:
            return f"in {low}…{high}"
        first = f"above {low}" if self.open_low else f"at least {low}"
        return f"{first} and {'below' if self.open_high else 'at most'} {high}"


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a configuration file.

    Attributes:
        path: of the key from the top of the file, with dots.
        text: what it does. advice: when to touch it.
        kind: type of its value.
        setting: the flag of the same meaning, with underscores; of the rules' constants with a dot. Empty: there is
            none, and the key sets nothing by itself.
        span: numbers that are allowed. choices: the only values that are.
        optional: null is allowed too, and means that there is none.
        values: value → that of the setting, where they differ.
        when_false: settings, and what they become if this is false, whatever their own keys say.
        default: of a key without a setting.
        missing: what would be needed for any other value than the default; empty: nothing.
    """

    path: str
    text: str
    advice: str
    kind: type
    setting: str = ""
    span: Range | None = None
    choices: tuple[Any, ...] = ()
    optional: bool = False
    values: tuple[tuple[Any, Any], ...] = ()
    when_false: tuple[tuple[str, Any], ...] = field(default=())
    default: Any = None
    missing: str = ""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        """What its value must be, for people."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        kind = _KINDS[self.kind] + (f" {self.span}" if self.span is not None else "")
        return kind + (" or null" if self.optional else "")

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value; None: nothing."""
        if value is None and self.optional:
            return None
        if not self._fits(value):
            return f"must be {self.allowed}, got {value!r}{self._hint(value)}"
        if self.missing and value != self.default:
            return f"{self.missing}; leave it at {plain(self.default)}"
        return None

    def to_setting(self, value: Any) -> Any:
        """What the setting becomes by a value."""
        return next((ours for theirs, ours in self.values if theirs == value), value)

    def from_setting(self, value: Any) -> Any:
        """The value by which the setting becomes this."""
        return next((theirs for theirs, ours in self.values if ours == value), value)

    def _hint(self, value: Any) -> str:
        """What may be meant by a text."""
        if not isinstance(value, str):
            return ""
        if self.kind is bool and value in ("true", "false", "yes", "no", "on", "off"):
            return "; true and false are written without quotes"
        if self.kind is float and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value):
            return "; such a number is written with a point in YAML: 1.0e-3"
        return ""

    def _fits(self, value: Any) -> bool:
        if self.kind is float:
            right = isinstance(value, (int, float)) and not isinstance(value, bool)
        else:
            right = type(value) is self.kind
        if not right or (self.choices and value not in self.choices):
            return False
        return self.span is None or self.span.allows(value)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it stands in a file. `file`: number of the file, later ones win."""

    path: str
    value: Any
    place: str  # FILE:LINE
    file: int = 0

    @property
    def where(self) -> str:
        return f"{self.place}: {self.path}"


def plain(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)
