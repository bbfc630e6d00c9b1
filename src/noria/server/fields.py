"""What is said of each field of a request, at the field: `Annotated[TYPE, about("…")]`.

One source for the checks, the messages of a 400, `/openapi.json` and the tables of docs/reference/api.md. Ranges are
those of the type (`msgspec.Meta(ge=…, le=…)`). Knows nothing of particular requests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Meta, Raw
from msgspec.inspect import (
    BoolType,
    DictType,
    Field,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    type_info,
)


def about(text: str, *, range: str = "", default: str = "") -> Meta:
    """Describes a field.

    Args:
        range: of the value, where the type does not tell it.
        default: what holds if the field is left out, where the struct's own default does not tell it.
    """
    return Meta(description=text, extra={"range": range, "default": default})


class Known(msgspec.Struct, frozen=True):
    """A field of a struct and what is said of it. `type` is without that; `initial` is msgspec.NODEFAULT for none."""

    name: str
    type: Type
    required: bool
    initial: Any
    description: str
    range: str
    default: str


_info = functools.cache(type_info)  # it takes milliseconds


@functools.cache
def known_fields(struct: type[msgspec.Struct]) -> dict[str, Known]:
    """The fields of a struct, by their names in a body."""
    info = _info(struct)
    assert isinstance(info, StructType)
    return {field.encode_name: _known(field) for field in info.fields}


def _known(field: Field) -> Known:
    extra: dict[str, Any] = {}
    description, kind = "", field.type
    while isinstance(kind, Metadata):
        extra |= kind.extra or {}
        description = description or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return Known(
        name=field.encode_name,
        type=kind,
        required=field.required,
        initial=field.default,
        description=description,
        range=extra.get("range", ""),
        default=extra.get("default", ""),
    )


# ---------------------------------------------------------------------------------------------------- types in words


def allowed(kind: Type) -> str:
    """What a value of this type may be, for people: `a number in [0, 100]`."""
    return " or ".join(dict.fromkeys(_words(kind)))


def _words(kind: Type) -> Iterator[str]:
    match kind:
        case Metadata():
            said = (kind.extra or {}).get("range")
            yield from (said,) if said else _words(kind.type)
        case UnionType():
            for member in kind.types:
                yield from _words(member)
        case IntType() | FloatType():
            yield ("an integer" if isinstance(kind, IntType) else "a number") + span(kind)
        case StrType():
            yield "a string" + _length(kind.min_length, kind.max_length, "characters")
        case BoolType():
            yield "true or false"
        case LiteralType():
            yield " or ".join(msgspec.json.encode(value).decode() for value in kind.values)
        case ListType():
            yield "a list" + _length(kind.min_length, kind.max_length, "items") + _inner(kind.item_type)
        case DictType():
            yield "an object" + _length(kind.min_length, kind.max_length, "entries") + _inner(kind.value_type)
        case StructType():
            yield "an object"
        case NoneType():
            return
        case _:
            yield "any value"


def _inner(kind: Type) -> str:
    inner = allowed(kind)
    return "" if inner == "any value" else f", each {inner}"


def span(kind: IntType | FloatType) -> str:
    """The range of a number: ` in [0, 100]`, or nothing."""
    low, high = (kind.ge if kind.gt is None else kind.gt), (kind.le if kind.lt is None else kind.lt)
    if low is None or high is None:
        return f" of at least {low}" if low is not None else ""
    return f" in {'[' if kind.gt is None else '('}{low}, {high}{']' if kind.lt is None else ')'}"


def _length(low: int | None, high: int | None, what: str) -> str:
    return "" if high is None else f" of {low or 0} to {high} {what}"


# ---------------------------------------------------------------------------------------------------- paths

_STEP = re.compile(r"(\w+|\[\.\.\.\])|\[(\d+)\]")  # msgspec writes [...] for a key of an object
_AS_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_AS_LIST = msgspec.json.Decoder(list[Raw])
_SHOWN = 60  # characters of a value


def _steps(path: str) -> list[str | int] | None:
    """`messages[1].role` → its names and indices; None for a path with something else."""
    steps: list[str | int] = []
    end = 0
    for found in _STEP.finditer(path):
        if path[end : found.start()] not in ("", "."):
            return None
        steps.append(found.group(1) if found.group(1) is not None else int(found.group(2)))
        end = found.end()
    return steps if end == len(path) else None


def value_at(body: bytes | bytearray, path: str) -> bytes | None:
    """The JSON at a path like `messages[1].role` of a body; None if it cannot be told."""
    steps = _steps(path)
    value: bytes | bytearray | Raw = body
    try:
        for step in steps or ():
            value = _AS_OBJECT.decode(value)[step] if isinstance(step, str) else _AS_LIST.decode(value)[step]
    except (msgspec.DecodeError, KeyError, IndexError, UnicodeDecodeError, RecursionError):
        return None
    return bytes(value).strip() if steps else None


def type_at(struct: type[msgspec.Struct], path: str) -> Type | None:
    """The type at a path of a struct; None if it cannot be told."""
    kind: Any = _info(struct)
    for step in _steps(path) or (None,):
        kind = next(_inside(kind, step), None)
    return None if kind is None else kind


def _inside(kind: Any, step: str | int | None) -> Iterator[Any]:
    """The types that a step leads to."""
    if isinstance(kind, Metadata):
        yield from _inside(kind.type, step)
    elif isinstance(kind, UnionType):
        for member in kind.types:
            yield from _inside(member, step)
    elif isinstance(kind, StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif isinstance(kind, ListType) and isinstance(step, int):
        yield kind.item_type
    elif isinstance(kind, DictType) and isinstance(step, str):
        yield kind.value_type


def shorten(written: bytes) -> str:
    """A value as it was written, or its beginning."""
    text = written.decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
