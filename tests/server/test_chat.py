"""`/v1/chat/completions`, plain and through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fakes import BOS, EOS, MAX_LEN, TEXT, Running, recited, serving
from test_completions import chunks

from noria.config import ServerOptions

HELLO: Any = [{"role": "user", "content": "hello"}]
PROMPT = "user: hello\nassistant: "


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"model": "wheel", "messages": HELLO} | body)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def test_answer(http: httpx.Client) -> None:
    made = ask(http, max_tokens=8)
    assert made["object"] == "chat.completion"
    assert made["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": recited(8), "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert made["usage"]["prompt_tokens"] == 1 + len(PROMPT)


def test_the_rest_of_the_context_by_default(http: httpx.Client) -> None:
    made = ask(http)
    assert made["usage"]["total_tokens"] == MAX_LEN
    assert made["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_goes_before_max_tokens(http: httpx.Client) -> None:
    assert ask(http, max_tokens=9, max_completion_tokens=4)["usage"]["completion_tokens"] == 4


def test_template_variables_and_prompt_ids(http: httpx.Client) -> None:
    made = ask(http, max_tokens=1, return_token_ids=True, chat_template_kwargs={"mood": "calm"})
    assert bytes(made["prompt_token_ids"][1:]).decode() == "user: hello\nmood=calm\nassistant: "
    assert made["prompt_token_ids"][0] == BOS
    assert made["choices"][0]["token_ids"] == [ord("W")]


def test_the_last_message_goes_on(http: httpx.Client) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "The wheel"}]
    body = {"messages": talk, "continue_final_message": True, "max_tokens": 1, "return_token_ids": True}
    assert bytes(ask(http, **body)["prompt_token_ids"][1:]).decode() == "user: hello\nassistant: The wheel"
    for wrong in ({"messages": HELLO}, {"add_generation_prompt": True}):
        reply = http.post("/v1/chat/completions", json=body | wrong)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "continue_final_message"


def test_a_conversation_is_cut_on_the_left(http: httpx.Client) -> None:
    made = ask(http, truncate_prompt_tokens=11, max_tokens=1, return_token_ids=True)
    assert bytes(made["prompt_token_ids"]).decode() == "assistant: "


def test_every_chunk_tells_usage_if_asked(http: httpx.Client) -> None:
    options = {"continuous_usage_stats": True}
    body = {"messages": HELLO, "stream": True, "max_tokens": 6, "stream_options": options}
    spent = [part["usage"]["completion_tokens"] for part in chunks(http.post("/v1/chat/completions", json=body))]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[-1] == 6


def test_parts_of_a_content(http: httpx.Client) -> None:
    parts = [{"type": "output_text", "text": "Hm"}, {"type": "refusal", "refusal": "No"}]
    messages = [{"role": "assistant", "content": parts}, {"role": "assistant", "content": None}]
    made = ask(http, messages=messages, return_token_ids=True, max_tokens=1)
    assert bytes(made["prompt_token_ids"][1:]) == b"assistant: Hm\nNo\nassistant: \nassistant: "


def test_stream(http: httpx.Client) -> None:
    body = {"messages": HELLO, "stream": True, "max_tokens": 30, "stream_options": {"include_usage": True}}
    first, *parts, final, usage = chunks(http.post("/v1/chat/completions", json=body))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == recited(30)
    assert all("role" not in part["choices"][0]["delta"] for part in parts)
    assert final["choices"][0]["delta"] == {}
    assert final["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 30)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert {part["object"] for part in (first, *parts, final, usage)} == {"chat.completion.chunk"}


def test_streamed_choices_have_their_own_chunks(http: httpx.Client) -> None:
    body = {"messages": HELLO, "stream": True, "max_tokens": 12, "n": 3}
    parts = chunks(http.post("/v1/chat/completions", json=body))
    for index in range(3):
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == recited(12, index)
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


def test_logprobs(http: httpx.Client) -> None:
    made = ask(http, max_tokens=2, logprobs=True, top_logprobs=2)
    assert made["choices"][0]["logprobs"]["content"] == [
        {
            "token": token,
            "logprob": -0.25,
            "bytes": [ord(token)],
            "top_logprobs": [
                {"token": token, "logprob": -0.25, "bytes": [ord(token)]},
                {"token": chr(ord(token) + 1), "logprob": -1.25, "bytes": [ord(token) + 1]},
            ],
        }
        for token in "Wa"
    ]
    assert ask(http, max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_streamed_logprobs_cover_every_token(http: httpx.Client) -> None:
    count = len(TEXT.encode())
    body = {"messages": HELLO, "stream": True, "max_tokens": count, "logprobs": True}
    parts = [part["choices"][0] for part in chunks(http.post("/v1/chat/completions", json=body))]
    entries = [entry for part in parts if part.get("logprobs") for entry in part["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT


def test_template_error_in_its_own_words(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "unspeakable"}]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "this template will not say that"


def test_openai_client(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="wheel", messages=HELLO, max_tokens=10, seed=1, n=2)
    assert [choice.message.content for choice in made.choices] == [recited(10), recited(10, 1)]
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 3
    assert [model.id for model in client.models.list()] == ["wheel"]
    assert client.models.retrieve("wheel").id == "wheel"


def test_openai_client_streams(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="wheel",
        messages=HELLO,
        max_tokens=20,
        stream=True,
        stream_options=options,
    )
    said, usage = "", None
    for chunk in stream:
        said += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert said == recited(20)
    assert usage is not None
    assert usage.completion_tokens == 20


def test_openai_client_completions(client: openai.OpenAI) -> None:
    made = client.completions.create(model="wheel", prompt="brief", logprobs=1, echo=True)
    assert made.choices[0].text == "brief" + recited(5)
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.tokens is not None
    assert made.choices[0].logprobs.tokens[-1] == "<eos>"
    extra = {"return_token_ids": True, "top_k": 4}
    streamed = client.completions.create(model="wheel", prompt="brief", stream=True, extra_body=extra)
    ids = [token for chunk in streamed for token in getattr(chunk.choices[0], "token_ids", [])]
    assert ids == [*TEXT.encode()[:5], EOS]


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'mill' is not served here"):
        client.chat.completions.create(model="mill", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="wheel", messages=HELLO, temperature=-1)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.APIError, match="poisoned"):
        list(client.completions.create(model="wheel", prompt="poison", stream=True))


def test_a_template_of_its_own_only_where_requests_are_trusted(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a"}]
    refused = http.post("/v1/chat/completions", json={"messages": messages, "chat_template": "{{ messages }}"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in refused.json()["error"]["message"]
    with (
        serving(options=ServerOptions(trust_request_chat_template=True)) as server,
        httpx.Client(base_url=server.url, timeout=20) as trusted,
    ):
        for template, status, message in (
            ("{% for m in messages %}{{ m.content }}{% endfor %}", 200, ""),
            ("{% if %}", 400, "line 1"),
            ("x" * 70_000, 400, "longer than 65536"),
            ("{{ messages.__class__.__mro__ }}", 400, "failed on these messages"),
            ("{% for a in range(10000000) %}{% endfor %}", 400, "stopped"),
            ("{{ raise_exception('not so') }}", 400, "not so"),
        ):
            body = {"messages": messages, "chat_template": template, "max_tokens": 2}
            reply = trusted.post("/v1/chat/completions", json=body)
            assert reply.status_code == status, reply.text
            assert message in reply.text
