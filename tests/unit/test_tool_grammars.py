"""Grammars that make a model call: tried with llguidance itself, token by token."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import pytest
from llguidance import LLMatcher

from noria.frontend import grammar
from noria.frontend.grammar import Spec, compile_spec
from noria.guidance import make_tokenizer, vocabulary_of
from noria.server.tools.answer import AnswerReader
from noria.server.tools.forcing import Style, beside, forced, guarded
from noria.server.tools.formats import FORMATS
from noria.server.tools.request import Function, ToolUse, schema_of
from noria.server.tools.thinking import THINK, Thinking

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = (
    Function(name="get", parameters=CITY, strict=True),
    Function(name="get_x", parameters={"properties": {"q": {"enum": ["a", "b"]}}, "required": ["q"]}),
    Function(name="now"),
)
SEVERAL, ONE, NAMED = (
    ToolUse(FUNCTIONS, "required"),
    ToolUse(FUNCTIONS, "required", parallel=False),
    ToolUse(FUNCTIONS[:1], "named"),
)
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
CONTROL = {mark: 257 + index for index, mark in enumerate(MARKS)}
END = 256
PIECES = (*(bytes((value,)) for value in range(256)), b"<end>", *(mark.encode() for mark in MARKS))
TOKENIZER: Any = make_tokenizer(vocabulary_of(PIECES, (END,), (END, *CONTROL.values())))
STYLES = [
    pytest.param(Style(form, thinking, control), id=f"{name}-{thinking and thinking.always}-{bool(control)}")
    for name, form in FORMATS.items()
    for thinking, control in (
        (None, {}),
        (THINK, {}),
        (Thinking(always=True), {mark: CONTROL[mark] for mark in (*form.marks, *MARKS[-2:]) if mark in CONTROL}),
    )
]


def tokens(text: str, style: Style) -> list[int]:
    """Bytes, and control tokens where the style has them."""
    pieces = re.split(f"({'|'.join(map(re.escape, style.control))})", text) if style.control else [text]
    return [
        token
        for piece in pieces
        for token in ([style.control[piece]] if piece in style.control else list(piece.encode()))
    ]


@lru_cache(maxsize=1)
def matcher_of(serialised: str) -> Any:
    matcher = LLMatcher(TOKENIZER, serialised, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matches(serialised: str, text: str, style: Style) -> bool:
    """Whether it is a whole answer that the grammar allows."""
    matcher, wanted = matcher_of(serialised), tokens(text, style)
    matcher.reset()
    allowed = matcher.validate_tokens(wanted) == len(wanted) and matcher.consume_tokens(wanted)
    return bool(allowed and matcher.is_accepting())


def compiled(spec: Spec) -> str:
    return compile_spec(spec, TOKENIZER)


def written(style: Style, *calls: tuple[str, str]) -> str:
    return style.form.write(list(calls))


def openings(style: Style) -> list[tuple[bool, str]]:
    """Whether the prompt opened the reasoning, and what may then stand before the answer."""
    if style.thinking is None:
        return [(False, "")]
    first = "Hm, {.</think>\n\n"
    return [(True, first), (False, f"<think>\n{first}"), (False, first if style.thinking.always else "")]


GOOD = ("get", '{"city": "Köln", "days": 3}')
OTHERS = (("get_x", '{"q":"b"}'), ("now", "{}"))


@pytest.mark.parametrize("style", STYLES)
def test_forced(style: Style) -> None:
    for opened, before in openings(style):
        for use in (SEVERAL, ONE, NAMED):
            serialised = compiled(forced(use, style, opened))
            assert matches(serialised, before + written(style, GOOD), style)
            assert matches(serialised, before + written(style, GOOD, *OTHERS), style) == (use is SEVERAL)
            assert matches(serialised, before + written(style, OTHERS[0]), style) == (use is not NAMED)
            for wrong in ('{"city": "a", "more": 1}', '{"days": 1}', '{"city": 1}', "[]", "{}", ""):
                assert not matches(serialised, before + written(style, ("get", wrong)), style)
            assert not matches(serialised, before + written(style, ("gets", '{"city": "a"}')), style)
            assert not matches(serialised, before + "Hello", style)
            assert not matches(serialised, before, style)


@pytest.mark.parametrize("style", STYLES)
def test_what_is_forced_is_read_back(style: Style) -> None:
    for opened, before in openings(style):
        reader = AnswerReader(SEVERAL, style.form, style.thinking, opened)
        parts = reader.push(before + written(style, GOOD, *OTHERS)) + reader.finish()
        assert [part.text for part in parts if part.kind == "call"] == ["get", "get_x", "now"]
        assert not any(part.kind == "content" for part in parts)


@pytest.mark.parametrize("style", STYLES)
def test_free_answers_whose_calls_match(style: Style) -> None:
    wrong = written(style, ("get", '{"city": "a", "more": 1}'))
    for opened, before in openings(style):
        serialised = compiled(guarded(ToolUse(FUNCTIONS), style, opened))
        for text in ("Hello – größer!", "", written(style, GOOD), written(style, GOOD, *OTHERS)):
            assert matches(serialised, before + text, style)
        assert not matches(serialised, before + wrong, style)
        if style.form.trigger:
            assert matches(serialised, f"{before}I see. {written(style, GOOD)} Well.", style)
            assert not matches(serialised, f"{before}I see. {wrong}", style)
        if style.thinking is not None and style.form.trigger not in style.control:
            thought = f"<think>I could {style.form.trigger}.</think>"
            assert opened or matches(serialised, f"{thought}Yes.", style)
            assert opened or not matches(serialised, f"{thought}{wrong}", style)


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_of_a_form_or_calls(style: Style) -> None:
    specs = [
        (grammar.schema(CITY), '{"city": "Köln"}', '{"town": 1}'),
        (grammar.regex("[0-9]{3}"), "123", "1234"),
        (grammar.choice(["yes", "no"]), "no", "never"),
        (grammar.lark('start: "a" b\nb: "c"'), "ac", "ab"),
    ]
    for spec, good, wrong in specs:
        for opened, before in openings(style):
            alone = beside(compiled(spec), None, style, opened)
            assert matches(alone, before + good, style)
            assert not matches(alone, before + wrong, style)
            either = beside(compiled(spec), ToolUse(FUNCTIONS), style, opened)
            assert matches(either, before + good, style)
            assert matches(either, before + written(style, GOOD, *OTHERS), style) == bool(style.form.trigger)
            assert not matches(either, before + wrong, style)
            assert not matches(either, before + written(style, ("get", "{}")), style)


def test_calls_have_an_end() -> None:
    style = Style(FORMATS["hermes"])
    serialised = compiled(forced(SEVERAL, style, False))
    assert matches(serialised, written(style, *[("now", "{}")] * 16), style)
    assert not matches(serialised, written(style, *[("now", "{}")] * 17), style)


def test_many_functions() -> None:
    functions = tuple(
        Function(name=f"function_{index}", parameters={"type": "object", "properties": {f"a{index}": CITY}})
        for index in range(128)
    )
    style = Style(FORMATS["hermes"])
    serialised = compiled(forced(ToolUse(functions, "required"), style, False))
    arguments = json.dumps({"a127": {"city": "a"}})
    assert matches(serialised, written(style, ("function_127", arguments)), style)
    assert not matches(serialised, written(style, ("function_127", arguments.replace("city", "town"))), style)


def test_a_function_that_lists_its_arguments_gets_no_others() -> None:
    listed = {"properties": {"a": {"type": "integer"}}}
    assert schema_of(Function(name="f", parameters=listed)) == {
        "type": "object",
        "additionalProperties": False,
        **listed,
    }
    assert "additionalProperties" not in listed
    for more in ({"additionalProperties": {"type": "string"}}, {"allOf": [{"properties": {"b": {}}}]}):
        assert schema_of(Function(name="f", parameters=listed | more)) == {"type": "object", **listed, **more}
    assert schema_of(Function(name="f", parameters={})) == {"type": "object"}
