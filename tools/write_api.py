"""Writes the tables of docs/reference/api.md from the structs that requests are decoded with, and from the tables of
what is ignored and refused. A test fails while the page lags behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec.inspect import CollectionType, DictType, Metadata, StructType, Type, UnionType, type_info

from noria.server.fields import Known, allowed, known_fields
from noria.server.others import Ignored, Others, others_of
from noria.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "api.md"
Struct = type[msgspec.Struct]
_BEGIN = "<!-- tools/write_api.py writes from here -->\n"
_END = "<!-- to here -->\n"
_EXPONENTS = {str(2**31 - 1): "2³¹ − 1", str(-(2**31)): "−2³¹"}


def tables() -> str:
    """The generated part of the page."""
    both = (CompletionRequest, ChatRequest)
    parts = ["## Fields of completions and chat\n", *_completions(*both)]
    for struct in _nested(*both):
        parts += [f"## Fields of `{_title(struct)}`\n", *_plain(struct)]
    for path, struct in (("/tokenize", TokenizeRequest), ("/detokenize", DetokenizeRequest)):
        parts += [f"## Fields of `{path}`\n", *_plain(struct)]
    return "\n".join(parts)


def _completions(first: Struct, second: Struct) -> Iterator[str]:
    columns = [known_fields(first), known_fields(second)]
    others = [others_of(first), others_of(second)]
    yield "| field | completions | chat | value | default | meaning |\n|---|---|---|---|---|---|"
    names = dict.fromkeys(name for column in (*columns, *map(_ignored_first, others)) for name in column)
    for name in names:
        states = [_state(name, column, other) for column, other in zip(columns, others, strict=True)]
        for known in _apart([column[name] for column in columns if name in column]):
            cells = [
                state if column.get(name, known) == known else "–"
                for state, column in zip(states, columns, strict=True)
            ]
            yield _row(f"`{name}`", *cells, _value(known), _default(known), known.description)
        if not any(name in column for column in columns):
            yield _row(f"`{name}`", *states, _harmless([other.get(name) for other in others]), "", _why(name, others))
    yield ""


def _apart(found: list[Known]) -> list[Known]:
    """Fields of one name that mean different things in different endpoints have a row each."""
    return [known for index, known in enumerate(found) if known not in found[:index]]


def _ignored_first(others: Others) -> Others:
    return dict(sorted(others.items(), key=lambda item: not isinstance(item[1], Ignored)))


def _state(name: str, known: dict[str, Known], others: Others) -> str:
    if name in known:
        return "yes"
    other = others.get(name)
    return "–" if other is None else "ignored" if isinstance(other, Ignored) else "refused"


def _why(name: str, others: list[Others]) -> str:
    return "; ".join(dict.fromkeys(other[name].why for other in others if name in other))


def _harmless(found: list[Any]) -> str:
    values = dict.fromkeys(
        msgspec.json.encode(value).decode() for other in found for value in getattr(other, "harmless", ())
    )
    return "only " + " or ".join(f"`{value}`" for value in values) if values else ""


def _plain(struct: Struct) -> Iterator[str]:
    yield "| field | value | default | meaning |\n|---|---|---|---|"
    for known in known_fields(struct).values():
        yield _row(f"`{known.name}`", _value(known), _default(known), known.description)
    yield ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(known: Known) -> str:
    text = known.range or allowed(known.type)
    return re.sub(r"-?\d{5,}", lambda found: _EXPONENTS.get(found[0], found[0]), text).replace("[-", "[−")


def _default(known: Known) -> str:
    if known.required:
        return "required"
    if known.default or known.initial in (None, NODEFAULT):
        return known.default
    return msgspec.json.encode(known.initial).decode()


def _nested(*structs: Struct) -> list[Struct]:
    """Structs within the fields of these, in the order in which they are found."""
    found: dict[Struct, None] = {}

    def visit(kind: Type) -> None:
        match kind:
            case Metadata():
                visit(kind.type)
            case UnionType():
                for member in kind.types:
                    visit(member)
            case CollectionType():
                visit(kind.item_type)
            case DictType():
                visit(kind.value_type)
            case StructType():
                if kind.cls not in found and kind.cls not in structs:
                    found[kind.cls] = None
                    for field in kind.fields:
                        visit(field.type)

    for struct in structs:
        info = type_info(struct)
        assert isinstance(info, StructType)
        for field in info.fields:
            visit(field.type)
    return list(found)


def _title(struct: Struct) -> str:
    """The field that holds the struct: its docstring begins with that, in backquotes."""
    named = re.match(r"`([^`]+)`", struct.__doc__ or "")
    assert named, f"the docstring of {struct.__name__} must begin with the field that holds it, in backquotes"
    return named.group(1)


def page(before: str) -> str:
    """The page's text, from what it is."""
    head, rest = before.split(_BEGIN)
    return f"{head}{_BEGIN}\n{tables()}\n{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
