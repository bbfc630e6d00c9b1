"""API keys as they are configured: flags and a file, checked and hashed. What is done with them is `access`'s.

A key file is YAML (JSON is YAML too): a list with one entry for each key. Keys are forgotten once they are hashed.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from noria.config import nearest
from noria.errors import ConfigError
from noria.observe.logging import get_logger

log = get_logger(__name__)
MOST_KEYS = 1000  # each request is compared with all, and each name is a label in the metrics
_MOST_BYTES = 1024 * 1024
_FLAG = "--api-key-file"
_HASHED = "sha256:"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")  # what a header can carry


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a key file.

    Attributes:
        name: shown in metrics and messages.
        key: the key itself, or `sha256:` and the 64 hexadecimal digits of its SHA-256.
        requests_per_minute, tokens_per_minute: most of them; None: no limit. Tokens are those of prompts and answers.
        share: weight under the fair policy.
    """

    name: str
    key: str
    requests_per_minute: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    share: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key that lets in. `digest`: SHA-256 of what the client sends."""

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    share: float = 1.0


def hashed(key: str) -> str:
    """A key in the form in which a file may hold it instead of the key itself."""
    return key if key.startswith(_HASHED) else _HASHED + sha256(key.encode()).hexdigest()


def make_keys(given: Sequence[str], path: str | None) -> tuple[Key, ...]:
    """All keys, of flags (`key-1`, `key-2`, …) and of a file.

    Raises:
        ConfigError: names the flag, or the file and its line.
    """
    keys = [Key(name=f"key-{number}", digest=_digest(key, "--api-key")) for number, key in enumerate(given, 1)]
    if path is not None:
        keys += read_key_file(Path(path))
    _check_distinct(keys)
    return tuple(keys)


def read_key_file(path: Path) -> list[Key]:
    """The keys of a file. Raises ConfigError that names file, line and remedy."""
    import yaml

    text = _read(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or "not readable"
        raise ConfigError(f"{path}{line} is not valid YAML or JSON: {what}", _FLAG) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", _FLAG) from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must be a list of entries, each with name and key: `- name: team` …", _FLAG)
    if len(entries) > MOST_KEYS:
        raise ConfigError(f"{path} has {len(entries)} keys, at most {MOST_KEYS} are possible", _FLAG)
    assert isinstance(root, yaml.SequenceNode)
    lines = [node.start_mark.line + 1 for node in root.value]
    return [_key(entry, f"{path}:{line}") for entry, line in zip(entries, lines, strict=True)]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", _FLAG) from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes", _FLAG)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", _FLAG) from None


def warn_if_readable(path: Path) -> None:
    """Says so if others can read a file of keys."""
    with contextlib.suppress(OSError):
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("%s can be read by others; make it yours alone: chmod 600 %s", path, path)


def _key(entry: Any, place: str) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: an entry must be `name: …` and `key: …`, not a {type(entry).__name__}", _FLAG)
    known = KeyEntry.__struct_fields__
    for name in entry:
        if name not in known:
            raise ConfigError(f"{place}: there is no {str(name)[:50]!r}{nearest(str(name), known)}", _FLAG)
    try:
        made = msgspec.convert(entry, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {_plain(str(error))}", _FLAG) from None
    if not _NAME.fullmatch(made.name):
        raise ConfigError(f"{place}: name must be 1 to 64 letters, digits or any of . _ @ -, got {made.name!r}", _FLAG)
    return Key(
        name=made.name,
        digest=_digest(made.key, _FLAG, f"{place}: key "),
        requests_per_minute=made.requests_per_minute,
        tokens_per_minute=made.tokens_per_minute,
        share=made.share,
    )


def _plain(error: str) -> str:
    """msgspec's words with the field first: "Expected `int`, got `str` - at `$.share`" → "share: expected …"."""
    what, _, where = error.partition(" - at `$.")
    return f"{where.rstrip('`')}: {what[:1].lower()}{what[1:]}" if where else what


def _digest(key: str, flag: str, place: str = "") -> bytes:
    if key.startswith(_HASHED):
        digits = key.removeprefix(_HASHED)
        if not _DIGEST.fullmatch(digits):
            raise ConfigError(f"{place}must have 64 hexadecimal digits after {_HASHED}, it has {len(digits)}", flag)
        return bytes.fromhex(digits)
    if not key:
        raise ConfigError(f"{place}is empty, which would let everybody in; leave it out for that".strip(), flag)
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{place}must be 1 to 512 printable ASCII characters without spaces", flag)
    return sha256(key.encode()).digest()


def _check_distinct(keys: Iterable[Key]) -> None:
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"two keys are named {key.name!r}; give each its own name", _FLAG)
        if key.digest in digests:
            raise ConfigError(f"{digests[key.digest]!r} and {key.name!r} are the same key; leave one out", _FLAG)
        names.add(key.name)
        digests[key.digest] = key.name
