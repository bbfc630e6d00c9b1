"""Answers with calls in the formats of each family: whole, cut at every place, malformed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from noria.server.tools.answer import AnswerReader
from noria.server.tools.formats import FORMATS
from noria.server.tools.reader import Part
from noria.server.tools.request import Function, ToolUse
from noria.server.tools.thinking import THINK, Thinking

FUNCTIONS = (Function(name="f"), Function(name="get_x"), Function(name="add"))
USE = ToolUse(FUNCTIONS)
Calls = list[tuple[str, str]]
HARD = r'{"a": [1, {"b": "}\"]</tool_call> [TOOL_CALLS] ``` é\\"}], "größe": "🌊", "n": null}'


def joined(parts: Iterable[Part]) -> tuple[str, str, Calls]:
    """Reasoning, content and calls."""
    texts = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for part in parts:
        if part.kind in ("reasoning", "content"):
            texts[part.kind] += part.text
        elif part.kind == "call":
            assert part.call == len(calls)
            calls.append([part.text, ""])
        else:
            assert part.call == len(calls) - 1
            calls[part.call][1] += part.text
    return texts["reasoning"], texts["content"], [(name, arguments) for name, arguments in calls]


def read(
    name: str,
    text: str,
    cuts: Sequence[int] = (),
    use: ToolUse | None = USE,
    thinking: Thinking | None = None,
    opened: bool = False,
) -> tuple[str, str, Calls]:
    reader = AnswerReader(use, FORMATS[name], thinking, opened)
    parts: list[Part] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.push(text[start:end])
    return joined(parts + reader.finish())


# format, answer, content, calls
ANSWERS: list[tuple[str, str, str, Calls]] = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {HARD}}}\n</tool_call>', "", [("f", HARD)]),
    (
        "hermes",
        'Let me see. \n<tool_call>{"arguments": {"z":1}, "name": "f"}</tool_call>\n'
        '<tool_call>{"name": "add"}</tool_call>',
        "Let me see.",
        [("f", '{"z":1}'), ("add", "{}")],
    ),
    (
        "hermes",
        '<tool_call>[{"name":"f","arguments":{}}, {"name":"add","arguments":{"x":2}}]</tool_call>',
        "",
        [("f", "{}"), ("add", '{"x":2}')],
    ),
    ("hermes", '<tool_call>{"name": "new", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("new", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call> Done.', " Done.", [("f", "{}")]),
    (
        "llama3_json",
        f'{{"name": "f", "parameters": {HARD}}}; {{"name":"add","parameters":{{}}}}',
        "",
        [("f", HARD), ("add", "{}")],
    ),
    ("llama3_json", 'Sure.<|python_tag|>{"name": "new", "parameters": {}}', "Sure.", [("new", "{}")]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {HARD}}}, {{"name": "g", "arguments": {{}}, "id": "abc"}}]',
        "",
        [("f", HARD), ("g", "{}")],
    ),
    ("mistral", f'On it.[TOOL_CALLS]f[ARGS]{HARD}[TOOL_CALLS]g{{"b": 2}}', "On it.", [("f", HARD), ("g", '{"b": 2}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
    (
        "json",
        f'{{"name": "f", "parameters": {HARD}}}\n{{"name": "add", "arguments": {{}}}}',
        "",
        [("f", HARD), ("add", "{}")],
    ),
    (
        "json",
        'First.\n```json\n[{"name": "f", "parameters": {"a": 1}}, {"name": "add"}]\n```\nThen.',
        "First.\nThen.",
        [("f", '{"a": 1}'), ("add", "{}")],
    ),
    # Cut off, or not quite as it should be: what was begun as a call goes on as far as it does.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Hm.', " Hm.", [("f", '{"a": 1')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}} and</tool_call>',
        " and</tool_call>",
        [("f", '{"a": 1}')],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}} and; more', " and; more", [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"other": 1}', '; {"other": 1}', [("f", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]', ", 3]", [("f", "{}")]),
]

# What looks like the beginning of a call, and is none: nothing of it may be lost.
CONTENT = [
    ("hermes", "a < b <tool_"),
    ("hermes", "<tool_call>oops</tool_call> x"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>\n'),
    ("hermes", '<tool_call>{"name": "' + "x" * 2000 + '"}'),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '  {"other": 1}'),
    ("llama3_json", 'As JSON: {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] what? [TOOL_"),
    ("mistral", "[TOOL_CALLS]f[ARGS]nothing"),
    ("json", "```python\nprint()\n``` ok\n"),
    ("json", '{"name": "f", "age": 3}'),
    ("json", "[1, 2]"),
    ("json", '```json\n{"name": "unknown", "parameters": {}}\n```'),
    *((name, text) for name in FORMATS for text in ("", " ", "\n\nHello – größer 🌊!  ", "{", "[", "`", "<")),
]


def every_cut(text: str) -> Iterable[list[int]]:
    """In two at each place, and into characters."""
    yield from ([place] for place in range(len(text) + 1))
    yield list(range(len(text)))


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_calls(name: str, text: str, content: str, calls: Calls) -> None:
    assert read(name, text) == ("", content, calls)
    assert all(read(name, text, cuts) == ("", content, calls) for cuts in every_cut(text))


@pytest.mark.parametrize(("name", "text"), CONTENT)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert read(name, text) == ("", text, [])
    assert all(read(name, text, cuts) == ("", text, []) for cuts in every_cut(text))


def test_without_tools_calls_are_text() -> None:
    text = ANSWERS[0][1]
    assert read("hermes", text, use=None) == ("", text, [])


def test_one_call_where_several_are_not_wanted() -> None:
    for name, text, _, calls in ANSWERS:
        limited = read(name, text, use=ToolUse(FUNCTIONS, parallel=False))
        assert limited[2] == calls[:1]


def test_arguments_come_as_they_are_written() -> None:
    reader = AnswerReader(USE, FORMATS["hermes"], None, False)
    assert reader.push('<tool_call>{"name": "f", ') == []
    assert reader.push('"arguments": {"city": "Par') == [Part("call", "f", 0), Part("arguments", '{"city": "Par', 0)]
    assert reader.push("is") == [Part("arguments", "is", 0)]
    assert reader.push('"}}\n</tool') == [Part("arguments", '"}', 0)]
    assert reader.push("_call>") == []
    assert reader.finish() == []


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_without_end(name: str) -> None:
    """Each token of it is looked at once: this took minutes when all of it was looked at with each."""
    blank, cuts = "\n" * 100_000, range(2, 100_000, 2)
    assert read(name, blank, cuts) == ("", blank, [])
    assert read(name, f"a{blank}b", cuts[1:]) == ("", f"a{blank}b", [])
    assert read(name, f"{blank}a{blank}</think>{blank}b", [*cuts], None, THINK, True) == ("a", "b", [])
    assert read(name, f"{blank}a{blank}b", [*cuts], None, THINK) == ("", f"{blank}a{blank}b", [])
    assert read(name, f"a{blank}b", [*cuts], None, THINK, True) == (f"a{blank}b", "", [])


@pytest.mark.parametrize("arguments", [r'"{\"a\": \"\ud800\"}"', r'{"a": "\ud800"}'])
def test_half_a_surrogate_pair_is_left_as_it_was_written(arguments: str) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read("hermes", call) == ("", "", [("f", arguments)])
    named = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert read("hermes", named) == ("", named, [])


def test_only_what_may_become_a_mark_is_withheld() -> None:
    reader = AnswerReader(USE, FORMATS["hermes"], None, False)
    assert reader.push("The wheel") == [Part("content", "The wheel")]
    assert reader.push(" turns <") == [Part("content", " turns")]
    assert reader.push("b>") == [Part("content", " <b>")]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_they_are_written(name: str) -> None:
    calls = [("f", HARD), ("get_x", "{}"), ("add", '{"a": [[]]}')]
    assert read(name, FORMATS[name].write(calls)) == ("", "", calls)


# ------------------------------------------------------------------------------------------------ reasoning


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nWell.\n</think>\n\nYes.", False, ("Well.", "Yes.")),
        ("\n<think>Well.</think>Yes.\n", False, ("Well.", "Yes.\n")),
        ("\nWell. \n\n So.\n</think>\n\nYes.", True, ("Well. \n\n So.", "Yes.")),
        ("<think>\nWell.</think>Yes.", True, ("Well.", "Yes.")),
        ("<think>\nWell. ", False, ("Well.", "")),
        ("Well.", True, ("Well.", "")),
        (" Yes, <think>.</think>", False, ("", " Yes, <think>.</think>")),
        ("<think>\n\n</think>\n\n", False, ("", "")),
        ("<thi", False, ("", "<thi")),
        (" </thin", True, ("</thin", "")),
    ],
)
def test_reasoning(text: str, opened: bool, expected: tuple[str, str]) -> None:
    for cuts in ([], *every_cut(text)):
        assert read("hermes", text, cuts, thinking=THINK, opened=opened) == (*expected, [])
        assert read("hermes", text, cuts, None, THINK, opened) == (*expected, [])


def test_calls_are_looked_for_behind_the_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>I could {call}.</think>\n{call}"
    for cuts in every_cut(text):
        assert read("hermes", text, cuts, thinking=THINK) == (f"I could {call}.", "", [("f", "{}")])


def test_reasoning_tokens_are_counted_to_its_mark() -> None:
    tokens = ["<think>", "\n", "So", ".</th", "ink>\n", "\n", "Yes"]
    reader = AnswerReader(None, FORMATS["json"], THINK, False)
    for token in tokens:
        if (counter := reader.counter) is not None:
            counter.push(token.encode())
        reader.push(token)
    assert reader.reasoning_tokens == 5
    plain = AnswerReader(None, FORMATS["json"], THINK, False)
    assert plain.counter is not None
    plain.counter.push(b"Yes")
    plain.push("Yes")
    assert plain.reasoning_tokens == 0


# ------------------------------------------------------------------------------------------------ any text, any cuts

_SNIPPETS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```", "json", "; "),
    *("<think>", "</think>", "\n", " ", '{"name": "f", "arguments": ', '{"name": "add", "parameters": ', "}", "{", "["),
    *(
        "]",
        ",",
        ":",
        '"',
        "\\",
        '"name"',
        '"arguments"',
        '{"a": "}"}',
        "f",
        "x < y",
        "größer 🌊",
        "null",
        "true",
        "-1.5e3",
    ),
]
_TEXTS = st.lists(st.sampled_from(_SNIPPETS) | st.text(max_size=4), max_size=14).map("".join)


@given(name=st.sampled_from(sorted(FORMATS)), text=_TEXTS, data=st.data(), opened=st.booleans())
@example(name="hermes", text='<tool_call>{"name": "f", "arguments": {"name": ', data=None, opened=False)
@settings(max_examples=400, deadline=None)
def test_parts_do_not_depend_on_the_cuts(name: str, text: str, data: Any, opened: bool) -> None:
    for thinking in (None, THINK):
        whole = read(name, text, thinking=thinking, opened=opened)
        cuts = list(range(len(text))) if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)))))
        assert read(name, text, cuts, thinking=thinking, opened=opened) == whole
        assert read(name, text, range(len(text)), thinking=thinking, opened=opened) == whole
        _nothing_is_invented(text, whole)
        assert whole[2] or thinking or whole[1] == text  # nothing is lost


def _nothing_is_invented(text: str, parts: tuple[str, str, Calls]) -> None:
    reasoning, content, calls = parts
    assert len(reasoning) + len(content) <= len(text)
    assert all(character in text for character in reasoning + content)
    for _, arguments in calls:
        assert arguments in ("", "{}") or arguments in text or json.dumps(arguments)[1:-1] in text or "\\" in text


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    calls=st.lists(
        st.tuples(st.sampled_from(["f", "get_x", "add"]), st.dictionaries(st.text(max_size=6), _JSON, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
    ascii_only=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_arguments_are_read_as_they_were_written(
    name: str, calls: list[tuple[str, dict[str, Any]]], data: Any, ascii_only: bool
) -> None:
    written = [(function, json.dumps(arguments, ensure_ascii=ascii_only)) for function, arguments in calls]
    text = FORMATS[name].write(written)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    assert read(name, text, cuts) == ("", "", written)
