"""From configuration files and flags to settings, each with its source.

A file holds the names of flags, the sections of `cli/sections.py`, or both. Files come in order, later ones win key by
key; flags win over all of them. What a value came from is kept, so that whatever turns out to be wrong with it is said
of the place where it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from noria.cli.common import SERVER_SETTINGS, server_options
from noria.cli.sections import KEYS, SECTIONS
from noria.config import ENGINE_SETTINGS, EngineOptions, ServerOptions, engine_options, nearest
from noria.errors import ConfigError

FLAT = ("model", *SERVER_SETTINGS, *(name for name in ENGINE_SETTINGS if name not in SECTIONS))
_PARALLEL = ("tensor_parallel.enabled", "tensor_parallel.size", "engine_config.tensor_parallel_size")


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


@dataclass(frozen=True, slots=True)
class Given:
    """A setting's value and what it comes from.

    Attributes:
        source: for people, after the value.
        where: how an error about it begins.
        note: what an error about it ends with.
    """

    value: Any
    source: str
    where: str
    note: str = ""
    file: int = 0


Settings = dict[str, Given]  # by name of the flag; constants of the rules as rules.NAME


def resolve(files: Sequence[Path], flags: Mapping[str, Any]) -> Settings:
    """Settings from files, in order, and from flags, which win.

    Raises:
        ConfigError: a file cannot be read, or has a key that is unknown, contradicts another, or has a wrong value.
    """
    settings = settings_of(read_files(files))
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        settings[name] = Given(value, "argument MODEL" if name == "model" else f"flag {flag}", flag)
    return settings


def read_files(files: Sequence[Path]) -> dict[str, Entry]:
    """The keys of several files by path, those of later files instead of the same in earlier ones."""
    entries: dict[str, Entry] = {}
    for number, path in enumerate(files):
        entries |= {entry.path: replace(entry, file=number) for entry in _Reader(path).entries()}
    return entries


class _Reader:
    """One file. Values are made key by key, so that each is known by its line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
            self._root = self._loader.get_single_node()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}", "--config") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid YAML: {error}", "--config") from None

    def entries(self) -> Iterator[Entry]:
        """Every key with a value, checked."""
        try:
            if self._root is not None and not self._null(self._root):
                yield from self._section(self._root, "")
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._path} is not valid YAML: {error}", "--config") from None

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
            path = prefix + str(self._loader.construct_object(key)).replace("-", "_")
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
        value = self._loader.construct_object(node, deep=True)
        if path in KEYS and (problem := KEYS[path].problem(value)) is not None:
            raise ConfigError(problem, where)
        return Entry(path, value, self._place(key))

    def _refuse_repeated(self, node: yaml.MappingNode, prefix: str) -> None:
        seen: dict[str, str] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name, place = str(self._loader.construct_object(key)).replace("-", "_"), self._place(key)
            if name in seen:
                raise ConfigError(f"stands twice, first at {seen[name]}", f"{place}: {prefix}{name}")
            seen[name] = place

    def _place(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"

    @staticmethod
    def _null(node: yaml.Node) -> bool:
        return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


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


def settings_of(entries: Mapping[str, Entry]) -> Settings:
    """Settings from keys: a section's switch goes before its keys, a later file before an earlier one.

    Raises:
        ConfigError: two keys of one file contradict each other.
    """
    _check_drafts(entries)
    settings: Settings = {}
    for setting, found in _by_setting(entries):
        before = settings.get(setting)
        if before is not None and before.file == found.file and before.value != found.value:
            raise ConfigError(f"contradicts {before.where}; leave one out", found.where)
        if before is None or before.file <= found.file:
            settings[setting] = found
    return settings


def _by_setting(entries: Mapping[str, Entry]) -> Iterator[tuple[str, Given]]:
    switched: dict[str, Entry] = {}
    for entry in entries.values():
        key = KEYS.get(entry.path)
        if key is not None and entry.value is False:
            for setting, value in key.when_false:
                if setting not in switched:
                    switched[setting] = entry
                    yield setting, _given(entry, value)
    for entry in entries.values():
        key = KEYS.get(entry.path)
        if key is None:
            yield entry.path, _given(entry, entry.value)
        elif key.setting and key.setting not in switched and entry.path not in _PARALLEL:
            yield key.setting, _given(entry, key.to_setting(entry.value))
    yield from _parallel(*(entries.get(path) for path in _PARALLEL))


def _parallel(enabled: Entry | None, size: Entry | None, plain_size: Entry | None) -> Iterator[tuple[str, Given]]:
    """The size of tensor parallelism: of `tensor_parallel` if that is enabled, else of `engine_config`."""
    chosen, other = plain_size, None
    if size is not None and enabled is not None and enabled.value:
        chosen, other = size, plain_size
    if chosen is None:
        return
    note = ""
    if other is not None and other.value != chosen.value:
        note = f" ({other.where} is {other.value}, and gives way to it"
        note += "; --tensor-parallel-size on the command line goes before both)"
    yield "tensor_parallel_size", replace(_given(chosen, chosen.value), note=note)


def _given(entry: Entry, value: Any) -> Given:
    return Given(value, f"{entry.place} {entry.path}", entry.where, file=entry.file)


def _check_drafts(entries: Mapping[str, Entry]) -> None:
    """Least ≤ first ≤ most, of what the keys of speculation say."""
    names = ("min_prediction_length", "prediction_length", "max_prediction_length")
    paths = [f"continuous_batching.speculative_decoding.{name}" for name in names]
    values = [entries[path].value if path in entries else KEYS[path].default for path in paths]
    given = [path for path in paths if path in entries]
    if given and values != sorted(values):
        wanted = " ≤ ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
        raise ConfigError(f"must fit {wanted}", entries[given[0]].where)


@contextmanager
def blaming(settings: Settings) -> Iterator[None]:
    """Lets a ConfigError about a setting name the place in the file that it came from."""
    try:
        yield
    except ConfigError as error:
        given = settings.get((error.field or "").lstrip("-").replace("-", "_"))
        if given is None or error.field is None:
            raise
        message = str(error).removeprefix(f"{error.field}: ") + given.note
        raise ConfigError(message, given.where) from None


def options_of(settings: Settings) -> tuple[str, EngineOptions, ServerOptions]:
    """Model and options. Raises ConfigError that names the flag, or the key and its place in a file."""
    model = settings["model"].value if "model" in settings else None
    if not isinstance(model, str) or not model:
        raise ConfigError("which model? For example: noria serve smollm2")
    with blaming(settings):
        server = {name: one.value for name, one in settings.items() if name in SERVER_SETTINGS}
        return model, engine_options(model, **_engine_settings(settings)), server_options(server)


def _engine_settings(settings: Settings) -> dict[str, Any]:
    """Those of the engine, with the rules' constants together."""
    plain_ones = {name: one.value for name, one in settings.items() if name in ENGINE_SETTINGS}
    constants = {name.removeprefix("rules."): one.value for name, one in settings.items() if name.startswith("rules.")}
    return plain_ones | ({"rules": constants} if constants else {})
