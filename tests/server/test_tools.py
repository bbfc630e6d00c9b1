"""Calls of functions and reasoning in `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fakes import BOS, ReciterCore, Running, serving
from llguidance import LLMatcher
from test_completions import chunks

from noria.guidance import BYTES, make_tokenizer
from noria.server.tools.dialect import Dialect
from noria.server.tools.forcing import Style
from noria.server.tools.formats import FORMATS
from noria.server.tools.thinking import THINK

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ONE = '{"name": "weather", "parameters": {"city": "Köln"}}'
SCRIPTS = {
    "one call": ONE,
    "two calls": f"{ONE}\n{ONE}",
    "words": "No need: {it} rains.",
    "call in words": f"Look.\n```json\n{ONE}\n```\n",
    "thinking": f"<think>\nHm, {ONE}.\n</think>\n\nYes.",
    "silence": "",
    "a name": '{"name": "clock"}',
    "pondering": f"<think>\nHm.\n</think>\n\n{ONE}",
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server of a model whose template knows no tools, and which reasons if it likes."""
    dialect = Dialect(Style(FORMATS["json"], THINK))
    scripts = {f"user: {say}\n": answer for say, answer in SCRIPTS.items()}
    with serving(ReciterCore(scripts=scripts, context=4000), dialect=dialect) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def body(say: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": say}], "tools": [WEATHER, CLOCK], **more}


def ask(http: httpx.Client, say: str, **more: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json=body(say, **more))
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def refused(http: httpx.Client, **more: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json=body("one call", **more))
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def gathered(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed choice as a message, without ids."""
    made: dict[str, Any] = {"content": None, "calls": [], "reasoning": "", "finish": None}
    for choice in (one for part in parts for one in part["choices"] if one["index"] == index):
        delta = choice["delta"]
        if delta.get("content") is not None:
            made["content"] = (made["content"] or "") + delta["content"]
        made["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(made["calls"])
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                made["calls"].append([call["function"]["name"], ""])
            made["calls"][call["index"]][1] += call["function"]["arguments"]
        made["finish"] = choice["finish_reason"] or made["finish"]
    return made


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """The same of a choice that was not streamed."""
    message = choice["message"]
    return {
        "content": message["content"],
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])],
        "reasoning": message.get("reasoning_content", ""),
        "finish": choice["finish_reason"],
    }


def test_a_call(http: httpx.Client) -> None:
    choice = ask(http, "one call")["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert call["id"].startswith("call_")


def test_ids_are_unique(http: httpx.Client) -> None:
    choices = ask(http, "two calls", n=3)["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids) == 6


def test_words(http: httpx.Client) -> None:
    choice = ask(http, "words")["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": SCRIPTS["words"], "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("say", SCRIPTS)
@pytest.mark.parametrize("most", [None, 30])
def test_streamed_equals_not_streamed(http: httpx.Client, say: str, most: int | None) -> None:
    for more in ({}, {"logprobs": True, "return_token_ids": True}, {"n": 2}, {"parallel_tool_calls": False}):
        choices = ask(http, say, max_tokens=most, **more)["choices"]
        parts = chunks(http.post("/v1/chat/completions", json=body(say, max_tokens=most, stream=True, **more)))
        for choice in choices:
            assert gathered(parts, choice["index"]) == whole(choice)
        streamed = [part["choices"][0] for part in parts if part["choices"]]
        if "logprobs" in more:
            entries = [entry for one in streamed if one.get("logprobs") for entry in one["logprobs"]["content"]]
            assert entries == choices[0]["logprobs"]["content"]
            ids = [token for one in streamed for token in one.get("token_ids", [])]
            assert ids == choices[0]["token_ids"]


def test_stream_opens_with_a_role_and_no_content(http: httpx.Client) -> None:
    first, *parts = chunks(http.post("/v1/chat/completions", json=body("one call", stream=True)))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    begin = parts[0]["choices"][0]["delta"]["tool_calls"]
    assert [(call["index"], call["type"], call["function"]) for call in begin] == [
        (0, "function", {"arguments": "", "name": "weather"})
    ]
    assert parts[-1]["choices"][0]["delta"] == {}


def test_arguments_are_streamed_while_they_are_written(http: httpx.Client) -> None:
    parts = chunks(http.post("/v1/chat/completions", json=body("one call", stream=True)))
    assert sum("tool_calls" in part["choices"][0]["delta"] for part in parts) > 5


def test_a_call_that_is_cut_off(http: httpx.Client) -> None:
    choice = ask(http, "one call", max_tokens=40)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":'[: 40 - ONE.index('{"city')]


def test_one_call_at_most(http: httpx.Client) -> None:
    assert len(ask(http, "two calls")["choices"][0]["message"]["tool_calls"]) == 2
    assert len(ask(http, "two calls", parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1


def test_no_call_where_none_is_wanted(http: httpx.Client) -> None:
    made = ask(http, "one call", tool_choice="none", return_token_ids=True)
    assert made["choices"][0]["message"]["content"] == ONE
    assert b"weather" not in bytes(made["prompt_token_ids"][1:])


def test_functions_are_described_where_the_template_cannot(http: httpx.Client) -> None:
    prompt = bytes(ask(http, "words", return_token_ids=True)["prompt_token_ids"][1:]).decode()
    system, rest = prompt.split("user: ")
    assert system.startswith("system: ")
    assert json.dumps(WEATHER["function"], ensure_ascii=False) in system
    assert '"clock"' in system
    assert rest == "words\nassistant: "


def test_tokens_of_a_prompt_with_tools(http: httpx.Client) -> None:
    ids = ask(http, "words", return_token_ids=True)["prompt_token_ids"]
    assert http.post("/tokenize", json=body("words")).json()["tokens"] == ids
    assert http.post("/tokenize", json=body("words", tools=[])).json()["count"] < len(ids)


def test_results_are_told_where_the_template_cannot(http: httpx.Client) -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "a2"}]},
        {"role": "tool", "tool_call_id": "a1", "content": "dry"},
        {"role": "tool", "tool_call_id": "a2", "content": "wet"},
        {"role": "user", "content": "words"},
    ]
    made = ask(http, "", messages=messages, return_token_ids=True, max_tokens=1)
    assert made["prompt_token_ids"][0] == BOS
    prompt = bytes(made["prompt_token_ids"][1:]).decode()
    assert prompt.startswith("system: Be brief.\n\nYou can call functions.")
    assert prompt.endswith(
        f"user: Rain?\nassistant: {ONE}\n{ONE}\n"
        "user: Result of the function weather:\ndry\n\nResult of the function weather:\nwet\n\nwords\nassistant: "
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"city":', '{"city":'),
        ("[1]", "[1]"),
        ("", "{}"),
        ({"city": "ü"}, '{"city": "ü"}'),
        (r'{"city": "\ud800"}', r'{"city": "\ud800"}'),
    ],
)
def test_arguments_of_earlier_calls_are_told_whatever_they_are(http: httpx.Client, arguments: Any, told: str) -> None:
    call = {"function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "dry"}]
    made = ask(http, "", messages=messages, tools=[], return_token_ids=True, max_tokens=1)
    said = bytes(made["prompt_token_ids"][1:]).decode()
    assert said.startswith(
        f'assistant: {{"name": "weather", "parameters": {told}}}\nuser: Result of the function:\ndry'
    )


def test_an_empty_answer_is_a_text(http: httpx.Client) -> None:
    assert ask(http, "silence")["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}


@pytest.mark.parametrize("say", ["thinking", "pondering", "one call", "silence"])
def test_an_answer_may_be_sent_back_as_it_was(http: httpx.Client, say: str) -> None:
    for most in (12, None):
        message = ask(http, say, max_tokens=most)["choices"][0]["message"]
        talk = [{"role": "user", "content": "?"}, message, {"role": "user", "content": "words"}]
        assert ask(http, "", messages=talk)["choices"][0]["message"]["content"] == SCRIPTS["words"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1]"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [CLOCK | {"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "a" * 200_000}}]}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "bad_words": ["city"]}, "bad_words"),
        ({"functions": [{"name": "a"}]}, "functions"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_refused(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    error = refused(http, **more)
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]


def test_reasoning_is_apart(http: httpx.Client) -> None:
    made = ask(http, "thinking")
    message = made["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning_content"] == message["reasoning"] == f"Hm, {ONE}."
    assert "tool_calls" not in message
    counted = len(SCRIPTS["thinking"].encode().split(b"</think>")[0]) + len("</think>")
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}


def test_reasoning_before_a_call(http: httpx.Client) -> None:
    choice = ask(http, "pondering")["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"


def test_reasoning_can_be_left_out(http: httpx.Client) -> None:
    message = ask(http, "thinking", include_reasoning=False)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    parts = chunks(http.post("/v1/chat/completions", json=body("thinking", include_reasoning=False, stream=True)))
    assert gathered(parts)["reasoning"] == ""
    assert gathered(parts)["content"] == "Yes."


def test_reasoning_that_the_prompt_opens(http: httpx.Client) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think>"}]
    made = ask(http, "", messages=talk, tools=[], continue_final_message=True, max_tokens=7)
    assert made["choices"][0]["message"]["content"] is None
    assert made["choices"][0]["message"]["reasoning"] == "Water t"


@pytest.mark.parametrize(
    ("more", "begins"),
    [
        ({"tool_choice": "required"}, '{"name": "'),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, '{"name": "weather"'),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}}},
            '{"name": "clock", "parameters": {}',
        ),
    ],
)
def test_a_call_that_is_forced(http: httpx.Client, running: Running, more: dict[str, Any], begins: str) -> None:
    ask(http, "one call", **more)
    assert allows(running, begins)
    assert not allows(running, "Well")
    assert not allows(running, '{"name": "cloud')


def test_calls_are_bound_where_schemas_are_strict(http: httpx.Client, running: Running) -> None:
    ask(http, "words")
    assert running.core.submitted[-1].params.grammar is None
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    ask(http, "words", tools=[strict])
    assert allows(running, "Well")
    assert allows(running, '{"name": "weather", "parameters": {"city"')
    assert not allows(running, '{"name": "weather", "parameters": {"town"')


def test_a_form_binds_the_answer_but_not_the_reasoning(http: httpx.Client, running: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}}
    ask(http, "words", response_format=form)
    for begins in ('{"a": 1}', "<think>Well.</think>\n\n{"):
        assert allows(running, begins)
    assert not allows(running, "Well")
    ask(http, "words", response_format=form, tools=[])
    assert allows(running, '<think>Well.</think>{"a"')


def test_what_has_a_form_is_no_call(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert ask(http, "a name")["choices"][0]["finish_reason"] == "tool_calls"
    choice = ask(http, "a name", response_format=form)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"name": "clock"}', "stop")
    parts = chunks(http.post("/v1/chat/completions", json=body("a name", response_format=form, stream=True)))
    assert gathered(parts) == whole(choice)


def allows(running: Running, text: str) -> bool:
    """Whether the latest request's grammar allows an answer to begin with a text."""
    serialised = running.core.submitted[-1].params.grammar
    assert serialised is not None
    matcher = LLMatcher(make_tokenizer(BYTES), serialised, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.validate_tokens(list(text.encode())) == len(text.encode()))


def test_a_schema_that_cannot_be_served_is_named(http: httpx.Client) -> None:
    bad = {"type": "function", "function": {"name": "bad", "strict": True, "parameters": {"properties": {"a": 3}}}}
    error = refused(http, tools=[CLOCK, bad], tool_choice="required")
    assert error["param"] == "tools"
    assert "the parameters of bad" in error["message"]
    assert refused(http, tool_choice="required", ignore_eos=True)["param"] == "ignore_eos"


def test_openai_client(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="wheel", **body("two calls"))
    calls = made.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls if call.type == "function"] == ["weather", "weather"]
    with client.chat.completions.stream(model="wheel", **body("call in words")) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Look."
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
