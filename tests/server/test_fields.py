"""Each field of each endpoint: what the reference says of it is true. A new field needs a row in EFFECTS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from fakes import BOS, EOS, ReciterCore, Running, recited, serving

from noria.config import ServerOptions
from noria.errors import InvalidRequestError
from noria.messages import Submit
from noria.server.fields import known_fields
from noria.server.http import decode
from noria.server.openapi import OPERATIONS
from noria.server.others import Ignored, Refused, others_of
from noria.server.tools.dialect import Dialect
from noria.server.tools.forcing import Style
from noria.server.tools.formats import FORMATS
from noria.server.tools.thinking import THINK

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65, 256]},
}
STRUCTS = {one.path: one.body for one in OPERATIONS if one.body is not None}
FIELDS = [(path, name) for path, struct in STRUCTS.items() for name in known_fields(struct)]
OTHERS = [(path, name) for path, struct in STRUCTS.items() for name in others_of(struct)]
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server of a model that calls functions and reasons."""
    core, dialect = ReciterCore(scripts=SCRIPTS, context=1200), Dialect(Style(FORMATS["json"], THINK))
    with serving(core, dialect=dialect, options=ServerOptions(trust_request_chat_template=True)) as server:
        yield server


@dataclass
class Answer:
    """`submit`: what reached the engine last."""

    status: int
    text: str
    submit: Submit | None

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def said(self) -> str:
        choice = self.json["choices"][0]
        text: str = choice["text"] if "text" in choice else choice["message"]["content"]
        return text

    @property
    def prompt(self) -> str:
        assert self.submit is not None
        return bytes(byte for byte in self.submit.prompt_ids[::4]).decode()

    @property
    def params(self) -> Any:
        assert self.submit is not None
        return self.submit.params


Ask = Callable[..., Answer]


@pytest.fixture
def ask_at(http: httpx.Client, running: Running) -> Callable[[str], Ask]:
    def at(path: str) -> Ask:
        def ask(**fields: Any) -> Answer:
            reply = http.post(path, json=BODIES[path] | {"max_tokens": 20} | fields)
            return Answer(reply.status_code, reply.text, running.core.submitted[-1] if running.core.submitted else None)

        return ask

    return at


def reaches(name: str, value: Any, expected: Any = None) -> Callable[[Ask], bool]:
    """The field's value is a parameter of the engine."""
    return lambda ask: getattr(ask(**{name: value}).params, name) == (value if expected is None else expected)


def shapes(name: str, value: Any) -> Callable[[Ask], bool]:
    """The field says what the answer must look like."""
    return lambda ask: ask().params.grammar is None and bool(ask(**{name: value}).params.grammar)


def calls(ask: Ask, **fields: Any) -> Any:
    return ask(messages=say("calls"), tools=TOOLS, max_tokens=100, **fields).json["choices"][0]["message"]["tool_calls"]


def thought(ask: Ask, **fields: Any) -> str:
    return ask(messages=say("thinks"), max_tokens=100, **fields).text


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


TOOLS = [{"type": "function", "function": {"name": "noon"}}]
SCRIPTS = {
    "user: calls\n": '{"name": "noon", "parameters": {}}\n{"name": "noon", "parameters": {}}',
    "user: thinks\n": "<think>\nHm.\n</think>\n\nYes.",
}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
# Whether the field does what is said of it, by name; one that does something else elsewhere, by path and name.
EFFECTS: dict[str | tuple[str, str], Callable[[Ask], bool]] = {
    "model": lambda ask: (ask(model="mill").status, ask(model="wheel").status) == (404, 200),
    "temperature": reaches("temperature", 0.5),
    "top_p": reaches("top_p", 0.5),
    "top_k": reaches("top_k", 5),
    "min_p": reaches("min_p", 0.5),
    "seed": reaches("seed", 5),
    "n": lambda ask: len(ask(n=3).json["choices"]) == 3,
    "stop": lambda ask: ask(stop=["turn"]).said == "Water ",
    "stop_token_ids": lambda ask: ask(stop_token_ids=[ord("r")]).json["choices"][0]["stop_reason"] == ord("r"),
    "max_tokens": lambda ask: ask(max_tokens=7).said == recited(7),
    "min_tokens": reaches("min_tokens", 5),
    "ignore_eos": lambda ask: (len(ask().submit.stop_ids), len(ask(ignore_eos=True).submit.stop_ids)) == (1, 0),
    "repetition_penalty": reaches("repetition_penalty", 1.5),
    "frequency_penalty": reaches("frequency_penalty", 0.5),
    "presence_penalty": reaches("presence_penalty", 0.5),
    "logit_bias": reaches("logit_bias", {"65": 5}, {65: 5.0}),
    "skip_special_tokens": reaches("skip_special_tokens", False),
    "include_stop_str_in_output": lambda ask: ask(stop="turn", include_stop_str_in_output=True).said == "Water turn",
    "truncate_prompt_tokens": lambda ask: ask(truncate_prompt_tokens=2).json["usage"]["prompt_tokens"] == 2,
    "cache_salt": lambda ask: ask(cache_salt="sea").submit.salt.endswith("sea"),
    "return_token_ids": lambda ask: '"prompt_token_ids":[' in ask(return_token_ids=True).text,
    "return_tokens_as_token_ids": lambda ask: '"token_id:87"' in ask(logprobs=1, return_tokens_as_token_ids=True).text,
    (CHAT, "return_tokens_as_token_ids"): lambda ask: (
        '"token_id:87"' in ask(logprobs=True, return_tokens_as_token_ids=True).text
    ),
    "prompt_logprobs": lambda ask: (
        ask(prompt_logprobs=1).json["choices"][0]["prompt_logprobs"][:2]
        == [
            None,
            {
                "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            },
        ]
    ),
    (CHAT, "prompt_logprobs"): lambda ask: (
        ask(prompt_logprobs=0).json["prompt_logprobs"][1]
        == {"117": {"logprob": -0.25, "rank": 1, "decoded_token": "u"}}
    ),
    "request_id": lambda ask: ask(request_id="my-1").json["id"].endswith("-my-1"),
    "priority": lambda ask: ask(priority=-3).submit.priority == -3,
    "stream": lambda ask: ask(stream=True).text.endswith("data: [DONE]\n\n"),
    "stream_options": lambda ask: (
        '"completion_tokens":20' in ask(stream=True, stream_options={"include_usage": True}).text
    ),
    "allowed_token_ids": reaches("allowed_token_ids", [65, 66], (65, 66)),
    "bad_words": shapes("bad_words", ["eel"]),
    "response_format": shapes("response_format", {"type": "json_object"}),
    "structured_outputs": shapes("structured_outputs", {"choice": ["a", "b"]}),
    "guided_json": shapes("guided_json", SCHEMA),
    "guided_regex": shapes("guided_regex", "a+"),
    "guided_choice": shapes("guided_choice", ["a"]),
    "guided_grammar": shapes("guided_grammar", 'start: "a"'),
    "guided_whitespace_pattern": lambda ask: (
        ask(guided_json=SCHEMA, guided_whitespace_pattern=" ").params.grammar != ask(guided_json=SCHEMA).params.grammar
    ),
    "grammar": shapes("grammar", 'root ::= "a"'),
    "json_schema": shapes("json_schema", SCHEMA),
    # completions
    "prompt": lambda ask: ask(prompt="other").prompt.endswith("other"),
    "logprobs": lambda ask: ask(logprobs=2).json["choices"][0]["logprobs"]["token_logprobs"][0] == -0.25,
    "echo": lambda ask: ask(echo=True).said == "abc" + recited(20),
    "best_of": lambda ask: (ask(best_of=2).status, ask(best_of=2, n=2).status) == (400, 200),
    "add_special_tokens": lambda ask: ask(add_special_tokens=False).json["usage"]["prompt_tokens"] == 3,
    # chat
    "messages": lambda ask: "user: hi\nassistant: so" in ask(messages=MESSAGES).prompt,
    "max_completion_tokens": lambda ask: ask(max_completion_tokens=7).said == recited(7),
    (CHAT, "logprobs"): lambda ask: ask(logprobs=True).json["choices"][0]["logprobs"]["content"][0]["token"] == "W",
    "top_logprobs": lambda ask: (
        len(ask(logprobs=True, top_logprobs=3).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    ),
    "add_generation_prompt": lambda ask: ask(add_generation_prompt=False).prompt.endswith("user: abc\n"),
    "chat_template_kwargs": lambda ask: "mood=calm\n" in ask(chat_template_kwargs={"mood": "calm"}).prompt,
    "chat_template": lambda ask: ask(chat_template="{{ messages[0].role }}!").prompt.endswith("user!"),
    (TOKENIZE, "chat_template"): lambda ask: (
        bytes(ask(prompt=None, messages=MESSAGES, chat_template="{{ messages[0].role }}!").json["tokens"][-5:])
        == b"user!"
    ),
    "documents": lambda ask: "documents=[{'title': 'a'}]\n" in ask(documents=[{"title": "a"}]).prompt,
    "reasoning_effort": lambda ask: "reasoning_effort=low\n" in ask(reasoning_effort="low").prompt,
    (TOKENIZE, "continue_final_message"): lambda ask: (
        bytes(ask(prompt=None, messages=MESSAGES, continue_final_message=True).json["tokens"][-2:]) == b"so"
    ),
    "continue_final_message": lambda ask: ask(messages=MESSAGES, continue_final_message=True).prompt.endswith(
        "assistant: so"
    ),
    "tools": lambda ask: "noon" in ask(tools=TOOLS).prompt,
    "tool_choice": lambda ask: ask(tools=TOOLS, tool_choice="required").params.grammar is not None,
    "parallel_tool_calls": lambda ask: len(calls(ask)) == 2 and len(calls(ask, parallel_tool_calls=False)) == 1,
    "include_reasoning": lambda ask: "Hm." in thought(ask) and "Hm." not in thought(ask, include_reasoning=False),
    # tokens
    (TOKENIZE, "prompt"): lambda ask: ask(prompt="hi").json["tokens"][1:] == [104, 105],
    (TOKENIZE, "messages"): lambda ask: ask(prompt=None, messages=MESSAGES).json["count"] > 10,
    (TOKENIZE, "add_special_tokens"): lambda ask: ask(add_special_tokens=False).json["count"] == 3,
    (TOKENIZE, "add_generation_prompt"): lambda ask: (
        bytes(ask(prompt=None, messages=MESSAGES, add_generation_prompt=False).json["tokens"][-3:]) == b"so\n"
    ),
    (TOKENIZE, "chat_template_kwargs"): lambda ask: (
        bytes(ask(prompt=None, messages=MESSAGES, chat_template_kwargs={"a": "b"}).json["tokens"][-15:-11]) == b"a=b\n"
    ),
    (TOKENIZE, "tools"): lambda ask: (
        ask(prompt=None, messages=MESSAGES, tools=TOOLS).json["count"]
        > ask(prompt=None, messages=MESSAGES).json["count"]
    ),
    "return_token_strs": lambda ask: ask(return_token_strs=True).json["token_strs"][1] == "a",
    "tokens": lambda ask: ask(tokens=[66]).json["prompt"] == "B",
    ("/detokenize", "skip_special_tokens"): lambda ask: ask(skip_special_tokens=True).json["prompt"] == "A",
}


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_a_supported_field_has_its_effect(ask_at: Any, path: str, name: str) -> None:
    effect = EFFECTS.get((path, name), EFFECTS.get(name))
    assert effect is not None, f"a row for {name} in EFFECTS is missing"
    assert effect(ask_at(path))


@pytest.mark.parametrize(("path", "name"), OTHERS)
def test_other_fields_are_ignored_or_refused_as_is_said(ask_at: Any, path: str, name: str) -> None:
    other = others_of(STRUCTS[path])[name]
    ask = ask_at(path)
    if isinstance(other, Ignored):
        for value in (None, 5, "x", [{"a": "b"}]):
            assert ask(**{name: value}).status == 200
        plain, with_it = ask(seed=5), ask(seed=5, **{name: {"a": ["b"]}})
        assert (plain.params, plain.prompt) == (with_it.params, with_it.prompt)
        return
    assert isinstance(other, Refused)
    for value in (12345, True, "xyz", ["x"], {"a": "b"}, "x" * 10_000):
        refused = ask(**{name: value})
        assert refused.status == 400
        assert refused.json["error"]["param"] == name
        assert other.why in refused.json["error"]["message"]
    for value in (None, False, "", [], {}, *other.harmless):
        assert ask(**{name: value}).status == 200


# JSON for any field: every type, and numbers at the edges of what can be written.
VALUES = [
    *(
        "null",
        "true",
        "false",
        '""',
        '"x"',
        '"5"',
        "[]",
        "{}",
        "[1]",
        '["x"]',
        '[["x"]]',
        '{"a":1}',
        "[null]",
    ),
    *("0", "1", "-1", "-0", "-0.0", "1.5", "1e-320", "1e2", "1e999", "-1e999", "9" * 25, "-" + "9" * 25, "9" * 4000),
    *(str(2**power + offset) for power in (31, 32, 53, 63, 64) for offset in (-1, 0, 1)),
    *(str(-(2**power) + offset) for power in (31, 63) for offset in (-1, 0, 1)),
    *("1" + "0" * 400 + ".5", "0." + "0" * 400 + "1", "100.00001", "-2.0000001"),
]
NOT_JSON = ["NaN", "Infinity", "-Infinity", "+1", ".5", "1.", "0x10", "01", "'x'", "undefined", "1e", "--1"]


@pytest.fixture(scope="module")
def schemas(http: httpx.Client) -> dict[str, Any]:
    made: dict[str, Any] = http.get("/openapi.json").json()["components"]
    return made


def body_of(path: str, name: str, value: str) -> bytes:
    """A body in which a field holds some JSON."""
    members = {key: json.dumps(other) for key, other in (BODIES[path] | {"max_tokens": 2}).items()} | {name: value}
    return ("{" + ",".join(f'"{key}":{member}' for key, member in members.items()) + "}").encode()


def refusal(path: str, name: str, value: str) -> InvalidRequestError:
    """What is said of a body that cannot be decoded."""
    with pytest.raises(InvalidRequestError) as raised:
        decode(bytearray(body_of(path, name, value)), msgspec.json.Decoder(STRUCTS[path]))
    return raised.value


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_whatever_is_sent_in_a_field_the_answer_names_it(
    http: httpx.Client, schemas: dict[str, Any], path: str, name: str
) -> None:
    schema = schemas["schemas"][STRUCTS[path].__name__]["properties"][name]
    needed = {"components": schemas} if "$ref" in str(schema) else {}  # they are slow to look through
    check = jsonschema.Draft202012Validator(schema | needed)
    anything = set(schema) <= {"description"}  # a JSON schema, which is looked at later
    possible: list[str] = []
    for value in VALUES:
        if anything or (not value.endswith("1e999") and check.is_valid(json.loads(value))):
            possible.append(value)
            continue
        error = refusal(path, name, value)
        assert error.param is not None
        assert error.param.startswith(name), value
        assert str(error).startswith(error.param), value
        if error.param == name and len(value) <= 60:
            assert str(error).endswith(f", got {value}")
    for value in possible[:16]:
        reply = http.post(path, content=body_of(path, name, value))
        assert reply.status_code in (200, 400) or (name == "model" and reply.status_code == 404), (value, reply.text)
        assert reply.status_code == 200 or reply.json()["error"]["param"], (value, reply.text)


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_what_is_not_json_is_refused_where_it_stands(path: str, name: str) -> None:
    for value in NOT_JSON:
        error = refusal(path, name, value)
        assert error.param == name, value
        assert str(error).startswith(name)
    assert "not valid JSON" in str(refusal(path, name, '"\\ud800"'))  # half a character


@pytest.mark.parametrize("value", ['{"5": NaN}', '{"a": {"model": NaN}}', '[{"b": [{}, NaN', '{"a": "}: ", "b": NaN'])
def test_what_is_no_json_within_a_field_is_refused(value: str) -> None:
    error = refusal(COMPLETIONS, "guided_json", value)
    assert "not valid JSON" in str(error)
    assert error.param == "guided_json"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "100.5", "temperature must be a number in [0, 100], got 100.5"),
        ("temperature", "1e999", "temperature must be a number in [0, 100], got 1e999"),
        ("top_p", "0", "top_p must be a number in (0, 1], got 0"),
        ("n", "129", "n must be an integer in [1, 128], got 129"),
        ("n", "1.0", "n must be an integer in [1, 128], got 1.0"),
        ("n", "true", "n must be an integer in [1, 128], got true"),
        ("n", '"1"', 'n must be an integer in [1, 128], got "1"'),
        ("seed", str(2**64), f"seed must be an integer in [−2⁶³, 2⁶⁴ − 1], got {2**64}"),
        ("logit_bias", '{"5": 101}', "logit_bias[...] must be a number in [-100, 100]"),
        ("prompt", "[1.5]", "prompt[0] must be a string or an integer or a list, each an integer, got 1.5"),
        ("truncate_prompt_tokens", "0", "truncate_prompt_tokens must be at least 1, or -1"),
        ("prompt_logprobs", "21", "prompt_logprobs must be an integer in [0, 20], got 21"),
    ],
)
def test_a_value_out_of_range_is_quoted_with_what_is_possible(
    http: httpx.Client, name: str, value: str, message: str
) -> None:
    reply = http.post("/v1/completions", content=body_of("/v1/completions", name, value))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)


def test_tokens_that_nobody_has_asked_for_can_be_named_by_id() -> None:
    with serving() as server:  # a new one: an end token, and those of a prompt, were never written as text
        body = {"prompt": "brief", "logprobs": 1, "echo": True, "max_tokens": 9, "return_tokens_as_token_ids": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=body)
    assert reply.status_code == 200
    tokens = reply.json()["choices"][0]["logprobs"]["tokens"]
    assert tokens[:2] == [f"token_id:{BOS}", "token_id:98"]
    assert tokens[-1] == f"token_id:{EOS}"
