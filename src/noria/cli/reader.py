"""Reads one configuration file: which keys it has, of what values, on which lines. Knows nothing of what they set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from noria.cli.common import FLAT
from noria.cli.keys import Entry
from noria.cli.sections import KEYS, SECTIONS
from noria.config import nearest
from noria.errors import ConfigError

# What PyYAML raises beside its own errors, of values that do not fit their tags.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_PLAIN = (type(None), bool, int, float, str)
_UNUSABLE = re.compile("[\\0\ud800-\udfff]")  # NUL, and halves of characters


class Reader:
    """One file. Values are made key by key, so that each is known by its line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
            self._root = self._loader.get_single_node()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}", "--config") from None
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise _invalid(path, error) from None

    def entries(self) -> Iterator[Entry]:
        """Every key with a value, checked."""
        try:
            if self._root is not None and not self._null(self._root):
                yield from self._section(self._root, "")
        except (yaml.YAMLError, RecursionError) as error:
            raise _invalid(self._path, error) from None

    def _section(self, node: yaml.Node, prefix: str) -> Iterator[Entry]:
        section = prefix.rstrip(".")
        if not isinstance(node, yaml.MappingNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "single value"
            if not section:
                raise ConfigError(f"{self._path} must hold `key: value` lines, not a {kind}", "--config")
            raise ConfigError(f"must hold keys of its own, not a {kind}", f"{self._place(node)}: {section}")
        self._refuse_repeated(node, prefix)
        self._loader.flatten_mapping(node)
        for key, value in node.value:
            path = prefix + self._name(key)
            if path in SECTIONS:
                if not self._null(value):
                    yield from self._section(value, path + ".")
            else:
                yield self._entry(path, key, value)

    def _entry(self, path: str, key: yaml.Node, node: yaml.Node) -> Entry:
        where = f"{self._place(key)}: {path}"
        if path not in KEYS and path not in FLAT:
            raise ConfigError(f"there is no such key{_suggestion(path)}", where)
        if isinstance(node, yaml.MappingNode) and path in FLAT and (section := _section_named(path)):
            raise ConfigError(f"is a flag with one value; did you mean the section {section}?", where)
        value = self._value(node, where)
        if path in KEYS and (problem := KEYS[path].problem(value)) is not None:
            raise ConfigError(problem, where)
        return Entry(path, value, self._place(key))

    def _refuse_repeated(self, node: yaml.MappingNode, prefix: str) -> None:
        seen: dict[str, str] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name, place = self._name(key), self._place(key)
            if name in seen:
                raise ConfigError(f"stands twice, first at {seen[name]}", f"{place}: {prefix}{name}")
            seen[name] = place

    def _name(self, key: yaml.Node) -> str:
        return str(self._value(key, self._place(key))).replace("-", "_")

    def _value(self, node: yaml.Node, where: str) -> Any:
        """A plain value, or a list of such. Raises ConfigError for what no setting can be: dates, sets, bytes."""
        try:
            value = self._loader.construct_object(node, deep=True)
        except yaml.YAMLError:
            raise
        except _UNREADABLE as error:  # of a tag that the text does not fit, a thirteenth month, too many digits
            raise ConfigError(f"cannot be read as {node.tag.rpartition(':')[2]}: {error}", where) from None
        for part in value if isinstance(value, list) else (value,):
            if type(part) not in _PLAIN:
                kind = type(part).__name__
                raise ConfigError(
                    f"must be a plain value, not a {kind}; a text that looks like one needs quotes", where
                )
            if isinstance(part, str) and _UNUSABLE.search(part):
                raise ConfigError("holds characters that no text can have", where)
        return value

    def _place(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"

    @staticmethod
    def _null(node: yaml.Node) -> bool:
        return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _invalid(path: Path, error: Exception) -> ConfigError:
    """What is wrong, and where. The line itself, which PyYAML would show, may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    line = f", line {mark.line + 1}" if mark is not None else ""
    what = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", None)
    if isinstance(error, UnicodeDecodeError):
        what = f"not UTF-8 at byte {error.start}"
    what = what or getattr(error, "reason", None) or "not readable"
    return ConfigError(f"{path} is not valid YAML{line}: {what}", "--config")


def _suggestion(path: str) -> str:
    """What was probably meant by an unknown key: the same name elsewhere, or the nearest one, beside it first."""
    prefix, _, name = path.rpartition(".")
    everything = [*FLAT, *KEYS, *SECTIONS]
    same = [known for known in everything if known.rpartition(".")[2] == name]
    beside = {known.rpartition(".")[2] for known in everything if known.rpartition(".")[0] == prefix}
    if len(same) == 1 or (same and same[0] in FLAT):
        return f"; did you mean {_shown(same[0], prefix)}?"
    if near := nearest(name, beside):
        return near
    elsewhere = {known.rpartition(".")[2]: known for known in reversed(everything)}
    if near := nearest(name, elsewhere):
        known = near.removeprefix("; did you mean ").removesuffix("?")
        return f"; did you mean {_shown(elsewhere[known], prefix)}?"
    return f"; known here: {', '.join(sorted(beside))}" if prefix and len(beside) < 20 else ""


def _section_named(name: str) -> str | None:
    return next((path for path in SECTIONS if path.endswith(f".{name}")), None)


def _shown(path: str, prefix: str) -> str:
    return f"{path}, at the top of the file" if prefix and "." not in path else path
