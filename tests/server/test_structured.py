"""Structured output over HTTP: which grammar reaches the engine, and what is refused. The engine recites."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fakes import Running, recited, serving, wait_until
from llguidance import LLMatcher
from test_grammars import SLEEPER

from noria.frontend.grammars import Compiler, Grammars
from noria.guidance import BYTES, make_tokenizer

TOKENIZER = make_tokenizer(BYTES)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
LOOSE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
PATHS = ("/v1/completions", "/v1/chat/completions")


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    asked = {"prompt": "abc"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "abc"}]}
    return http.post(path, json={"max_tokens": 4, **asked, **fields})


def grammar_of(running: Running, http: httpx.Client, path: str = PATHS[1], **fields: Any) -> str | None:
    """The grammar with which a request reaches the engine."""
    response = post(http, path, **fields)
    assert response.status_code == 200, response.text
    return running.core.submitted[-1].params.grammar


def accepts(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def refusal(http: httpx.Client, path: str = PATHS[1], **fields: Any) -> tuple[str, str]:
    """The field that is named, and the message."""
    response = post(http, path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": None}}},
        {"response_format": {"type": "json_object", "schema": POINT}},
        {"structured_outputs": {"json": POINT}},
        {"structured_outputs": {"json": json.dumps(POINT), "regex": None, "json_object": False}},
        {"guided_json": POINT},
        {"guided_json": json.dumps(POINT), "guided_decoding_backend": "xgrammar"},
        {"json_schema": POINT, "grammar": ""},
    ],
)
def test_a_schema_by_each_name(running: Running, http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    made = grammar_of(running, http, path, **fields)
    assert accepts(made, '{"x": 1, "y": -2}')
    assert not accepts(made, '{"x": 1}')
    assert not accepts(made, '{"x": 1,   "y": 2}')


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"structured_outputs": {"json_object": True}}, '{"a": [1]}', "[1]"),
        ({"structured_outputs": {"json": True}}, "[1]", "(1)"),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "abc", "abd"),
        ({"guided_regex": "[a-c]+"}, "abc", "abd"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" start'}}, "bba", "bb"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "bba", "bb"),
        ({"guided_grammar": 'start: "a" | "b" start'}, "bba", "bb"),
        ({"grammar": 'root ::= "a" | "b" root'}, "bba", "bb"),
        ({"structured_outputs": {"json": POINT, "whitespace_pattern": r"\t"}}, '{\t"x":1,\t"y":2}', '{"x": 1,"y":2}'),
        ({"guided_json": POINT, "guided_whitespace_pattern": r"\t"}, '{\t"x":1,\t"y":2}', '{"x": 1,"y":2}'),
        ({"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}, '{"x":1,"y":2}', '{"x": 1,"y":2}'),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, '{"x":1}', '{"x": 1}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE, "strict": False}}},
            "[1]",
            '["a"]',
        ),
    ],
)
def test_every_kind(running: Running, http: httpx.Client, fields: dict[str, Any], good: str, bad: str) -> None:
    made = grammar_of(running, http, **fields)
    assert accepts(made, good)
    assert not accepts(made, bad)


def test_no_kind(running: Running, http: httpx.Client) -> None:
    nothing = {
        "structured_outputs": None,
        "guided_json": None,
        "json_schema": None,
        "grammar": "",
        "guided_regex": None,
    }
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}, nothing):
        assert grammar_of(running, http, **fields) is None


def test_all_choices_of_all_prompts_have_it(running: Running, http: httpx.Client) -> None:
    before = len(running.core.submitted)
    made = post(http, PATHS[0], prompt=["a", "b"], n=2, guided_regex="[a-z]+", stream=True)
    assert made.status_code == 200
    grammars = [submit.params.grammar for submit in running.core.submitted[before:]]
    assert len(grammars) == 4
    assert len(set(grammars)) == 1
    assert accepts(grammars[0], "abc")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": "json_object"}, "response_format", "must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE}}},
            "response_format.json_schema.schema",
            "'uniqueItems' (at #)",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE, "strict": True}}},
            "response_format.json_schema.schema",
            "strict: false",
        ),
        (
            {"response_format": {"type": "json_object", "schema": [1]}},
            "response_format.schema",
            "a schema is an object",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "got regex and json"),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs", "jsno"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "must be"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "structured_outputs.regex", "JSON only"),
        ({"structured_outputs": {"json": LOOSE}}, "structured_outputs.json", "'uniqueItems' (at #)"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json", "unclosed"),
        ({"structured_outputs": {"json": {}, "structural_tag": "x"}}, "structured_outputs.structural_tag", "grammar"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "in the schema",
        ),
        ({"guided_json": {"$ref": "https://example.com/a"}}, "guided_json", "never fetched"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern", "needs guided_json"),
        ({"guided_regex": "a" * 20000}, "guided_regex", "at most"),
        ({"guided_grammar": "root ::= absent"}, "guided_grammar", "absent"),
        ({"grammar": "start: absent"}, "grammar", "absent"),
        ({"json_schema": {"type": "text"}}, "json_schema", "Invalid type"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "response_format",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "guided_regex"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, path: str, fields: dict[str, Any], param: str, said: str) -> None:
    named, message = refusal(http, path, **fields)
    assert named == param
    assert said in message


def test_echo_would_not_match(http: httpx.Client) -> None:
    assert refusal(http, PATHS[0], guided_regex="a", echo=True)[0] == "echo"


def test_what_is_refused_leaves_nothing_behind(running: Running, http: httpx.Client) -> None:
    before = len(running.core.submitted)
    refusal(http, guided_regex="(")
    assert len(running.core.submitted) == before
    assert running.state.client.unfinished == 0
    assert post(http, PATHS[0]).json()["choices"][0]["text"] == recited(4)


def test_one_that_compiles_too_long_hurts_nobody_else() -> None:
    with serving() as server, httpx.Client(base_url=server.url, timeout=20) as client:
        server.state.grammars.close()
        server.state.grammars = Grammars(Compiler(seconds=0.5, command=(sys.executable, "-c", SLEEPER)))
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(refusal, client, guided_regex="a+")
            wait_until(lambda: server.state.client.unfinished == 1)
            assert post(client, PATHS[1]).status_code == 200
            assert slow.result() == (
                "guided_regex",
                "guided_regex: it took longer than 0.5 s to compile; make it simpler",
            )
        assert server.state.client.unfinished == 0
        assert len(server.core.submitted) == 1


def test_a_client_that_goes_while_its_grammar_compiles() -> None:
    with serving() as server:
        server.state.grammars.close()
        server.state.grammars = Grammars(Compiler(seconds=60, command=(sys.executable, "-c", SLEEPER)))
        with httpx.Client(base_url=server.url, timeout=0.1) as client, pytest.raises(httpx.TimeoutException):
            post(client, PATHS[1], guided_regex="a+")
        wait_until(lambda: server.state.client.unfinished == 0)
        assert server.core.submitted == []


@pytest.mark.parametrize("path", PATHS)
def test_bad_words_are_in_no_answer(running: Running, http: httpx.Client, path: str) -> None:
    words = ["eel", "[a.b]*", "größer", "new\nline", '"quoted"', "\\d", "/"]
    made = grammar_of(running, http, path, bad_words=words, min_tokens=2)
    for word in words:
        assert not accepts(made, f"before {word} behind")
        assert accepts(made, f"before {word[:-1]}")
    assert accepts(made, "")
    assert accepts(made, "anything\nelse, groß, 🌊")
    assert grammar_of(running, http, path, bad_words=[]) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": ["a"], "guided_regex": "b"}, "bad_words"),
        ({"bad_words": ["a"], "ignore_eos": True}, "bad_words"),
        ({"bad_words": ["a"], "allowed_token_ids": [5]}, "bad_words"),
        ({"allowed_token_ids": [5], "guided_regex": "b"}, "allowed_token_ids"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ],
)
def test_what_restricts_an_answer_stands_alone(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refusal(http, **fields)[0] == param
