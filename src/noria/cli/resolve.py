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

from noria.cli.common import SERVER_SETTINGS, server_options
from noria.cli.keys import Entry
from noria.cli.sections import KEYS
from noria.config import ENGINE_SETTINGS, EngineOptions, ServerOptions, engine_options
from noria.errors import ConfigError

_PARALLEL = ("tensor_parallel.enabled", "tensor_parallel.size", "engine_config.tensor_parallel_size")


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
        from noria.cli.reader import Reader  # YAML is not needed for flags

        entries |= {entry.path: replace(entry, file=number) for entry in Reader(path).entries()}
    return entries


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
