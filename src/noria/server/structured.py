"""Structured output as clients ask for it: OpenAI's `response_format`, vLLM's `structured_outputs` (and the older
`guided_*`), llama.cpp's `grammar` and `json_schema`. One request asks for one kind.

Owns what these fields may hold and which others they contradict. What a schema or grammar may be is checked by
`frontend.grammar`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Raw, field

from noria.errors import InvalidRequestError
from noria.frontend import grammar
from noria.frontend.grammar import Spec
from noria.server.fields import about

if TYPE_CHECKING:
    from noria.server.protocol import GenerationRequest

_ABSENT = msgspec.Raw(b"")


class JsonSchema(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`."""

    name: Annotated[str | None, about("changes nothing")] = None
    description: Annotated[str | None, about("changes nothing")] = None
    schema: Annotated[Raw, about("a JSON schema")] = field(default_factory=Raw)
    strict: Annotated[
        bool | None, about("false ignores keywords of the schema that cannot be enforced; otherwise they are refused")
    ] = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`."""

    type: Annotated[str, about("what the answer is", range="`text`, `json_object` or `json_schema`")]
    json_schema: Annotated[JsonSchema | None, about("the schema, with `json_schema`")] = None
    schema: Annotated[Raw, about("llama.cpp's: a schema, with `json_object`")] = field(default_factory=Raw)


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs`: exactly one of the first five."""

    json: Annotated[Raw, about("a JSON schema, or its text")] = field(default_factory=Raw)
    regex: Annotated[str | None, about("an expression that all of the answer matches")] = None
    choice: Annotated[list[str] | None, about("the texts that the answer may be")] = None
    grammar: Annotated[str | None, about("a grammar, in Lark's or GBNF's form")] = None
    json_object: Annotated[bool | None, about("any JSON object")] = None
    whitespace_pattern: Annotated[str | None, about("what may stand where JSON allows white space")] = None
    disable_any_whitespace: Annotated[bool | None, about("that nothing may stand there")] = None
    disable_fallback: Annotated[bool | None, about("changes nothing: there is nothing to fall back to")] = None
    disable_additional_properties: Annotated[bool | None, about("refused: say so in the schema")] = None
    structural_tag: Annotated[Any, about("refused")] = None


MAX_BAD_WORDS = 128
MAX_BAD_WORD = 128  # characters


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like, and the field that says so."""

    spec: Spec
    field: str


def form_of(wanted: GenerationRequest) -> Form | None:
    """What a request's answer must look like; None: anything.

    Raises:
        InvalidRequestError: more than one thing is asked for, or something that cannot go together with it.
    """
    forms = list(_forms(wanted))
    if wanted.bad_words:
        if forms or wanted.allowed_token_ids or wanted.ignore_eos:
            other = forms[0].field if forms else "ignore_eos" if wanted.ignore_eos else "allowed_token_ids"
            raise InvalidRequestError(f"bad_words: not beside {other}", "bad_words")
        return Form(grammar.without(wanted.bad_words, "bad_words"), "bad_words")
    if not forms:
        return None
    if wanted.allowed_token_ids:
        raise InvalidRequestError(f"allowed_token_ids: not beside {forms[0].field}", "allowed_token_ids")
    if len(forms) > 1:
        raise InvalidRequestError(
            f"{forms[1].field}: {forms[0].field} says what the answer is; give one", forms[1].field
        )
    check_beside(wanted, forms[0].field)
    return forms[0]


def check_beside(wanted: GenerationRequest, field: str) -> None:
    """Refuses what cannot be kept together with an answer that must look like something, as `field` says."""
    if wanted.ignore_eos:
        raise InvalidRequestError(f"ignore_eos: an answer that must match {field} ends where it does", "ignore_eos")
    if wanted.min_tokens:
        raise InvalidRequestError(f"min_tokens: an answer that must match {field} ends where it does", "min_tokens")
    if wanted.bad_words:
        raise InvalidRequestError(f"bad_words: not beside {field}", "bad_words")
    if getattr(wanted, "echo", None):
        raise InvalidRequestError(f"echo: with the prompt before it the answer would not match {field}", "echo")


def _forms(wanted: GenerationRequest) -> Iterator[Form]:
    """All that a request says of its answer."""
    if wanted.response_format is not None:
        yield from _response_format(wanted.response_format)
    if wanted.structured_outputs is not None:
        yield _structured_outputs(wanted.structured_outputs)
    space = wanted.guided_whitespace_pattern
    if _given(wanted.guided_json):
        yield _schema(wanted.guided_json, "guided_json", whitespace=space)
    elif space is not None:
        raise InvalidRequestError("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
    if wanted.guided_regex is not None:
        yield Form(grammar.regex(wanted.guided_regex, "guided_regex"), "guided_regex")
    if wanted.guided_choice is not None:
        yield Form(grammar.choice(wanted.guided_choice, "guided_choice"), "guided_choice")
    if wanted.guided_grammar is not None:
        yield Form(grammar.grammar(wanted.guided_grammar, "guided_grammar"), "guided_grammar")
    if wanted.grammar:  # llama.cpp's clients send an empty one for none
        yield Form(grammar.grammar(wanted.grammar, "grammar"), "grammar")
    if _given(wanted.json_schema):
        yield _schema(wanted.json_schema, "json_schema")


def _response_format(wanted: ResponseFormat) -> Iterator[Form]:
    field = "response_format.json_schema"
    if wanted.type == "json_object":
        if _given(wanted.schema):
            yield _schema(wanted.schema, "response_format.schema")
        else:
            yield Form(grammar.any_object("response_format"), "response_format")
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise InvalidRequestError(f"{field} is required where the type is json_schema", field)
        if not _given(wanted.json_schema.schema):
            raise InvalidRequestError(f"{field}.schema is required", f"{field}.schema")
        yield _schema(wanted.json_schema.schema, f"{field}.schema", lenient=wanted.json_schema.strict is False)
    elif wanted.type != "text":
        raise InvalidRequestError(
            f"response_format.type must be text, json_object or json_schema, got {wanted.type[:100]!r}",
            "response_format.type",
        )


def _structured_outputs(wanted: StructuredOutputs) -> Form:
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(wanted, name):
            field = f"structured_outputs.{name}"
            remedy = "use grammar" if name == "structural_tag" else "say additionalProperties: false in the schema"
            raise InvalidRequestError(f"{field}: not supported; {remedy}", field)
    names = [name for name in ("regex", "choice", "grammar") if getattr(wanted, name) is not None]
    names += ["json"] * _given(wanted.json) + ["json_object"] * bool(wanted.json_object)
    if len(names) != 1:
        raise InvalidRequestError(
            "structured_outputs: exactly one of json, regex, choice, grammar and json_object must be given, got "
            + (" and ".join(names) or "none"),
            "structured_outputs",
        )
    name, field = names[0], f"structured_outputs.{names[0]}"
    space = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if space is not None and not name.startswith("json"):
        raise InvalidRequestError(f"structured_outputs: white space is said for JSON only, not for {name}", field)
    if name == "json":
        return _schema(wanted.json, field, whitespace=space)
    if name == "json_object":
        return Form(grammar.schema({"type": "object"}, field, whitespace=space), field)
    made: Spec = getattr(grammar, name)(getattr(wanted, name), field)
    return Form(made, field)


def _schema(given: msgspec.Raw, field: str, lenient: bool = False, whitespace: str | None = None) -> Form:
    """A schema that was given as JSON, or as a string with it."""
    try:
        text = bytes(given).decode()
        if text.startswith('"'):
            text = msgspec.json.decode(text, type=str)
    except (UnicodeDecodeError, msgspec.DecodeError):
        raise InvalidRequestError(f"{field}: it is not UTF-8", field) from None
    return Form(grammar.schema(text, field, lenient, whitespace), field)


def _given(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")
