"""What an answer must look like, for offline use.

    params = SamplingParams(grammar=noria.grammar.json_schema({"type": "object"}))

Each function checks what it is given, here and now, and returns what `SamplingParams.grammar` takes; it raises
InvalidRequestError for what cannot be served. A server checks in a process of its own instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from noria.errors import InvalidRequestError
from noria.frontend import grammar as specs
from noria.frontend.grammar import Spec, SpecError
from noria.guidance import BYTES, make_tokenizer


def json_object() -> str:
    """Any JSON object."""
    return _compiled(specs.any_object())


def json_schema(
    schema: str | Mapping[str, Any] | bool, *, strict: bool = True, whitespace_pattern: str | None = None
) -> str:
    """JSON that is valid against a schema.

    Args:
        schema: the schema, or its text.
        strict: false ignores keywords that cannot be enforced, instead of refusing them.
        whitespace_pattern: a regular expression for what may stand where JSON allows white space; empty: nothing; None:
            at most one space behind a comma or a colon.
    """
    return _compiled(specs.schema(schema, lenient=not strict, whitespace=whitespace_pattern))


def regex(pattern: str) -> str:
    """Text of which all matches a regular expression, in the syntax of the Rust crate `regex`, without look-around."""
    return _compiled(specs.regex(pattern))


def choice(texts: Sequence[str]) -> str:
    """One of these texts."""
    return _compiled(specs.choice(texts))


def grammar(text: str) -> str:
    """Text of a context-free grammar, in Lark's notation (`start: …`) or in llama.cpp's (`root ::= …`)."""
    return _compiled(specs.grammar(text))


def _compiled(spec: Spec) -> str:
    try:
        return specs.compile_spec(spec, _tokenizer())
    except SpecError as error:
        raise InvalidRequestError(f"grammar: {error}", "grammar") from None


@cache
def _tokenizer() -> Any:
    return make_tokenizer(BYTES)
