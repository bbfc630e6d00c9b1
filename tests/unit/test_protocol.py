"""Every field of a request, right and wrong: what is refused names the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from noria.errors import InvalidRequestError
from noria.params import SamplingParams
from noria.server.http import decode, other_fields
from noria.server.others import check_others
from noria.server.protocol import ChatRequest, CompletionRequest, Message
from noria.server.reading import Defaults, plain_messages, prompts_of, sampling_params


def parse(body: dict[str, Any] | str, kind: type[Any] = CompletionRequest) -> Any:
    raw = bytearray((body if isinstance(body, str) else json.dumps(body)).encode())
    made = decode(raw, msgspec.json.Decoder(kind))
    check_others(kind, other_fields(raw, kind))
    made.check()
    return made


def params(**fields: Any) -> SamplingParams:
    wanted = parse({"prompt": "a"} | fields)
    return sampling_params(wanted, Defaults(), wanted.max_tokens, wanted.logprobs)


@pytest.mark.parametrize(
    ("field", "value", "name", "expected"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 0.7, "temperature", 0.7),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_k", 40, "top_k", 40),
        ("top_k", -1, "top_k", -1),
        ("min_p", 0.1, "min_p", 0.1),
        ("seed", 0, "seed", 0),
        ("seed", 2**64 - 1, "seed", 2**64 - 1),
        ("seed", -1, "seed", 2**64 - 1),
        ("n", 3, "n", 3),
        ("stop", "x", "stop", ("x",)),
        ("stop", ["x", "y"], "stop", ("x", "y")),
        ("stop", None, "stop", ()),
        ("stop", ["a"] * 16, "stop", ("a",) * 16),
        ("stop_token_ids", [1, 2], "stop_token_ids", (1, 2)),
        ("max_tokens", 5, "max_tokens", 5),
        ("max_tokens", None, "max_tokens", None),
        ("ignore_eos", True, "ignore_eos", True),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("frequency_penalty", -2, "frequency_penalty", -2.0),
        ("presence_penalty", 2, "presence_penalty", 2.0),
        ("logit_bias", {"5": 1, "7": -100}, "logit_bias", {5: 1.0, 7: -100.0}),
        ("allowed_token_ids", [3, 4], "allowed_token_ids", (3, 4)),
        ("logprobs", 0, "logprobs", 0),
        ("logprobs", 20, "logprobs", 20),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("temperature", None, "temperature", 1.0),
    ],
)
def test_accepted(field: str, value: Any, name: str, expected: Any) -> None:
    assert getattr(params(**{field: value}), name) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 101),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("min_p", 2),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("seed", "x"),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 1025),
        ("stop", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [1] * 129),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-50),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"--5": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("logprobs", True),
        ("stream", 1),
        ("priority", 2**31),
        ("suffix", "after"),
        ("stream_options", {"include_usage": True}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1] * 1025),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 129),
        ("bad_words", ["a" * 129]),
        ("include_stop_str_in_output", 1),
        ("prompt_logprobs", 21),
        ("request_id", ""),
        ("request_id", "a\n"),
        ("request_id", "x" * 129),
        ("truncate_prompt_tokens", 0),
        ("cache_salt", ""),
    ],
)
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        params(**{field: value})
    assert raised.value.status == 400
    assert raised.value.param is not None
    assert raised.value.param.split("[")[0].split(".")[0] == field
    assert field in str(raised.value)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        params(min_tokens=5, max_tokens=4)


def test_harmless_fields_are_accepted() -> None:
    params(user="me", store=False, metadata={"a": "b"}, response_format={"type": "text"}, suffix="")


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("functions", [{"name": "f"}], []),
        ("function_call", {"name": "f"}, "auto"),
        ("modalities", ["text", "audio"], ["text"]),
        ("echo", True, False),
        ("continue_final_message", True, False),
    ],
)
def test_refused_in_chat(field: str, value: Any, harmless: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequestError, match=field):
        parse({"messages": messages, field: value}, ChatRequest)
    parse({"messages": messages, field: harmless}, ChatRequest)


def test_stop_in_python_may_be_one_string_or_a_list() -> None:
    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(**fields)

    assert params(stop="END").stop == ("END",)
    assert params(stop=["a", "b"], stop_token_ids=[3]).stop == ("a", "b")
    with pytest.raises(InvalidRequestError, match="stop: must be a string or a list of strings"):
        params(stop=[1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[]", "expected `object`, got `array`"),
        ("{}", "prompt is required"),
    ],
)
def test_bad_bodies(body: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(body)


def test_nested_field_is_named() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}, ChatRequest)
    assert raised.value.param == "messages[1].role"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert prompts_of(parse({"prompt": prompt}).prompt) == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], ["a", [1]], [1, [2]], 5, None, [1.5], [["a"]], [True]])
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        prompts_of(parse({"prompt": prompt}).prompt)
    assert (raised.value.param or "").startswith("prompt")


def test_model_defaults_yield_to_the_request() -> None:
    defaults = Defaults(temperature=0.2, top_k=7, repetition_penalty=1.3)
    made = sampling_params(parse({"prompt": "a", "top_k": 3}), defaults, None, None)
    assert (made.temperature, made.top_k, made.repetition_penalty, made.top_p) == (0.2, 3, 1.3, 1.0)


def test_messages_as_templates_read_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    made = plain_messages(
        [
            Message(role="developer", content="be brief"),
            Message(role="user", content=parts, name="me"),
            Message(role="assistant", tool_calls=call),
            Message(role="tool", content="4", tool_call_id="1"),
        ]
    )
    assert made == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (Message(role="robot", content="a"), "messages[0].role"),
        (Message(role="user"), "messages[0].content"),
        (Message(role="user", content=[{"type": "image_url"}]), "messages[0].content"),
        (Message(role="user", content=[{"type": "text"}]), "messages[0].content"),
    ],
)
def test_bad_messages(message: Message, where: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        plain_messages([message])
    assert raised.value.param == where
    with pytest.raises(InvalidRequestError, match="at least one"):
        plain_messages([])
