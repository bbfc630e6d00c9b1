"""What an answer must look like → llguidance's serialised grammar, which `SamplingParams.grammar` carries.

A `Spec` says what is wanted: a JSON schema, a regular expression, one of some texts, a grammar. Making one checks its
bounds, nothing else; `compile_spec` checks all of it and may take long, so that a server leaves it to a process of its
own (`grammar_worker`, asked through `grammars`). Knows nothing of requests. Nothing is ever fetched.

JSON is written on one line, unless asked for otherwise: one space may follow a comma or a colon, and there is no other
white space. It takes the fewest tokens, and a model cannot lose itself in it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from noria.errors import InvalidRequestError
from noria.guidance import make_limits

MAX_TEXT = 256 * 1024  # bytes of a schema or grammar, or of all choices together
MAX_REGEX = 16 * 1024  # characters
MAX_WHITESPACE = 256  # characters of a pattern for white space
MAX_CHOICES = 4096
MAX_DEPTH = 64  # of a schema's JSON
_TRIED = 16  # tokens of an answer, when a grammar is compiled
_SHOWN = 400  # characters of what llguidance says
_RECURSION = "it is nested too deeply"


class SpecError(Exception):
    """A specification that cannot be served. `str(error)` says why and what to do."""


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must look like. Made by the functions below, which check its bounds.

    Attributes:
        kind: `schema`: `text` is a JSON schema. `regex`: a regular expression, for all of the answer. `choice`: a JSON
            list of strings. `grammar`: a context-free grammar in Lark's or llama.cpp's (GBNF) notation. `lark`: surely
            in Lark's.
        lenient: keywords of a schema that cannot be enforced are ignored instead of refused.
        whitespace: a regular expression for what may stand at each place where JSON allows white space; empty: nothing;
            None: at most one space behind a comma or a colon.
    """

    kind: Literal["schema", "regex", "choice", "grammar", "lark"]
    text: str
    lenient: bool = False
    whitespace: str | None = None


# ---------------------------------------------------------------------------------------------------- making them


def any_object(field: str = "grammar") -> Spec:
    """Any JSON object. `field`: the request's field that asks for it, here and below, for messages."""
    return schema({"type": "object"}, field)


def schema(
    wanted: str | Mapping[str, Any] | bool, field: str = "grammar", lenient: bool = False, whitespace: str | None = None
) -> Spec:
    """JSON that is valid against a schema, given as JSON text or as what that stands for."""
    text = wanted if isinstance(wanted, str) else _json(wanted)
    if whitespace is not None and len(whitespace) > MAX_WHITESPACE:
        raise InvalidRequestError(f"{field}: a pattern of more than {MAX_WHITESPACE} characters for white space", field)
    return Spec("schema", _bounded(text, MAX_TEXT, field), lenient, whitespace)


def regex(pattern: str, field: str = "grammar") -> Spec:
    """Text of which all matches a regular expression, as the Rust crate `regex` reads it, without look-around."""
    return Spec("regex", _bounded(pattern, MAX_REGEX, field))


def choice(texts: Sequence[str], field: str = "grammar") -> Spec:
    """One of these texts."""
    if not 0 < len(texts) <= MAX_CHOICES:
        raise InvalidRequestError(f"{field}: 1 to {MAX_CHOICES} texts are possible, got {len(texts)}", field)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequestError(f"{field}: each must be a text that is not empty", field)
    return Spec("choice", _bounded(_json(list(dict.fromkeys(texts))), MAX_TEXT, field))


def grammar(text: str, field: str = "grammar") -> Spec:
    """Text of a context-free grammar: in Lark's notation with llguidance's extensions, which begins at `start:`, or in
    llama.cpp's GBNF, which begins at `root ::=`."""
    return Spec("grammar", _bounded(text, MAX_TEXT, field))


def without(texts: Sequence[str], field: str = "grammar") -> Spec:
    """Any text, of which none of these is a part."""
    parts = "|".join(re.sub(r"[^a-zA-Z0-9]", _escaped, text) for text in texts)
    return lark(f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*({parts}).*)/", field)


def _escaped(found: re.Match[str]) -> str:
    """A character that stands for itself in a regular expression of Lark's."""
    return f"\\x{{{ord(found[0]):x}}}"


def lark(text: str, field: str = "grammar") -> Spec:
    """The same, surely in Lark's notation. See `embedded` and `quoted` for what may stand in it."""
    return Spec("lark", _bounded(text, MAX_TEXT, field))


def embedded(wanted: Mapping[str, Any] | bool, lenient: bool = False, whitespace: str | None = None) -> str:
    """A JSON schema as it stands within a rule of a Lark grammar, with its white space bounded."""
    inner: dict[str, Any] = dict(wanted) if isinstance(wanted, Mapping) else {"allOf": [wanted]}
    inner["x-guidance"] = _options(lenient, whitespace)
    return f"%json {_json(inner)}"


def quoted(text: str) -> str:
    """A text as it stands within a rule of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bounded(text: str, limit: int, field: str) -> str:
    if not text.strip():
        raise InvalidRequestError(f"{field}: it is empty", field)
    if len(text) > limit:
        raise InvalidRequestError(f"{field}: {len(text)} characters; at most {limit} are possible", field)
    if "\0" in text or not is_unicode(text):
        raise InvalidRequestError(f"{field}: it is not text: it has a zero or half a surrogate pair", field)
    return text


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: escapes of JSON can stand for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _options(lenient: bool, whitespace: str | None) -> Any:
    """llguidance's `JsonCompileOptions`; all of them, so that none of a schema's own stands."""
    return {
        "whitespace_flexible": bool(whitespace),
        "whitespace_pattern": whitespace or None,
        "item_separator": ", ?" if whitespace is None else ",",
        "key_separator": ": ?" if whitespace is None else ":",
        "lenient": lenient,
        "coerce_one_of": lenient,
        "json_allowed_escapes": None,
    }


# ---------------------------------------------------------------------------------------------------- compiling


def compile_spec(spec: Spec, tokenizer: Any) -> str:
    """The serialised grammar of a specification, tried with an `LLTokenizer` and followed for some tokens.

    Raises:
        SpecError: it cannot be served.
    """
    from llguidance import LLMatcher

    try:
        serialised = _serialise(spec)
    except SpecError:
        raise
    except RecursionError:
        raise SpecError(_RECURSION) from None
    except Exception as error:
        raise SpecError(_tidy(str(error))) from None
    matcher = LLMatcher(tokenizer, serialised, log_level=0, limits=make_limits())
    allowed = _allowed(matcher, tokenizer)
    if matcher.is_error():
        raise SpecError(_explain(spec, matcher.get_error()))
    if not allowed:
        raise SpecError("nothing but an empty answer can match it")
    dice = random.Random(0)  # the same answer for the same specification
    for _ in range(_TRIED):
        if not allowed:
            break
        matcher.consume_token(dice.choice(allowed))
        allowed = _allowed(matcher, tokenizer)
    if matcher.is_error():
        raise SpecError(f"it takes too much to follow: {_tidy(matcher.get_error())}")
    return serialised


def _allowed(matcher: Any, tokenizer: Any) -> list[int]:
    """Tokens that may come next, but those that end the answer."""
    if matcher.is_error() or matcher.is_stopped():
        return []
    mask = matcher.compute_bitmask()  # one bit per token
    ends = frozenset(tokenizer.eos_tokens)
    bits = ((8 * at + bit, byte) for at, byte in enumerate(mask) if byte for bit in range(8))
    return [token for token, byte in bits if byte >> token % 8 & 1 and token not in ends]


def _serialise(spec: Spec) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    serialised: str
    if spec.kind == "schema":
        text = _checked_schema(spec)
        serialised = LLMatcher.grammar_from_json_schema(text, overrides=_options(spec.lenient, spec.whitespace))
    elif spec.kind == "regex":
        serialised = LLMatcher.grammar_from_regex(spec.text)
    elif spec.kind == "choice":
        texts = " | ".join(map(quoted, json.loads(spec.text)))
        # As one terminal: alternatives of rules would each be an item of the parser's.
        serialised = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    else:
        text = any_to_lark(spec.text) if spec.kind == "grammar" else spec.text
        serialised = LLMatcher.grammar_from_lark(text)
    return serialised


def _checked_schema(spec: Spec) -> str:
    """The text of a schema that is an object. Refuses what is no schema, and other documents."""
    try:
        parsed = json.loads(spec.text)
    except ValueError as error:
        raise SpecError(f"it is not JSON: {error}") from None
    if parsed is False:
        raise SpecError("nothing can match it")
    if parsed is True:
        return "{}"
    if not isinstance(parsed, dict):
        raise SpecError("a schema is an object, or true or false")
    if _depth(parsed) > MAX_DEPTH:
        raise SpecError(f"{_RECURSION}; at most {MAX_DEPTH} levels are possible")
    for where, part in _parts(parsed):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise SpecError(
                f"$ref {reference[:100]!r} at {where}: other documents are never fetched; put it under $defs"
            )
    return spec.text


def _depth(value: object) -> int:
    """Levels of lists and objects."""
    depth, level = 0, [value]
    while level:
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
        depth += 1
    return depth


_OF_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _parts(parsed: object, where: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas in a schema, each with its place."""
    if not isinstance(parsed, dict):
        return
    yield where, parsed
    for name in _OF_ONE:
        yield from _parts(parsed.get(name), f"{where}/{name}")
    for name in _OF_MANY:
        inner = parsed.get(name)
        for index, one in enumerate(inner if isinstance(inner, list) else ()):
            yield from _parts(one, f"{where}/{name}/{index}")
    for name in _OF_NAMES:
        inner = parsed.get(name)
        for key, one in inner.items() if isinstance(inner, dict) else ():
            yield from _parts(one, f"{where}/{name}/{key}")


# ---------------------------------------------------------------------------------------------------- explaining

# Within a grammar, its place stands before.
_UNKNOWN = re.compile(r"Unimplemented keys: (\[.*?\])")
_FORMAT = re.compile(r"Unknown format: (.*)")
_NOWHERE = re.compile(r"Resource '(.*?)' is not present")
_ONE_OF = re.compile(r"oneOf constraints are not supported")
_STATE = re.compile(r"<(?:state|backtrace|non-verbose)")
_FORMATS = "date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid and uri"


def _explain(spec: Spec, error: str) -> str:
    """What llguidance says, in the terms of who made the schema or grammar."""
    if error.startswith("NoExtension"):
        return "nothing can match it" if spec.kind == "schema" else "nothing but an empty answer can match it"
    if found := _UNKNOWN.search(error):
        names = json.loads(found.group(1))
        places = ", ".join(f"{name!r} (at {_place(spec, name)})" for name in names[:5])
        return f"this keyword of JSON schema cannot be enforced here: {places}; {_remedy()}"
    if found := _FORMAT.search(error):
        return f"the format {found.group(1)[:100]!r} cannot be enforced here, only {_FORMATS} can; {_remedy()}"
    if found := _NOWHERE.search(error):
        return f"it needs {found.group(1)[:100]!r}: other documents are never fetched"
    if _ONE_OF.search(error):
        return f"'oneOf' (at {_place(spec, 'oneOf')}) cannot be enforced unless its parts exclude each other; use anyOf"
    return _tidy(error)


def _remedy() -> str:
    return "leave it out (response_format with strict: false ignores it)"


def _place(spec: Spec, name: str) -> str:
    if spec.kind != "schema":
        return "a schema within the grammar"
    return next((where for where, part in _parts(json.loads(spec.text)) if name in part), "#")


def _tidy(error: str) -> str:
    """What an error says, without the state that llguidance adds to it, and bounded."""
    if error.startswith("panic"):
        return "it is too large or too complex"
    text = _STATE.split(error)[0].strip() or "it cannot be compiled"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
