"""The official client: completions, chat, streams, errors, many at once."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from served import KEY, MODEL, Served, serving, wait_until

WHEEL: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is a water wheel?"},
]


# ---------------------------------------------------------------------------------------------------- models


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] >= 2048


def test_a_model_that_is_not_served(client: openai.OpenAI) -> None:
    for call in (lambda: client.models.retrieve("mill"), lambda: client.completions.create(model="mill", prompt="a")):
        with pytest.raises(openai.NotFoundError, match="mill") as caught:
            call()
        assert caught.value.code == "model_not_found"


# ---------------------------------------------------------------------------------------------------- completions


def test_a_completion(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
    (choice,) = made.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 5, 10)


def test_a_completion_as_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": 5}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert len(parts) > 10
    assert "".join(choice.text for part in parts for choice in part.choices) == whole.choices[0].text
    assert [choice.finish_reason for part in parts for choice in part.choices][-1] == "length"
    assert (parts[-1].choices, parts[-1].usage) == ([], whole.usage)
    assert all(part.usage is None for part in parts[:-1])


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 1, "seed": 3, "n": 2}
    many = client.completions.create(prompt=["One two", "Red green"], **asked)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    alone = client.completions.create(prompt="Red green", **asked)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in many.choices[2:]]
    assert alone.choices[0].text != alone.choices[1].text


def test_echo_with_log_probabilities(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model=MODEL, prompt="The capital of France", max_tokens=0, echo=True, logprobs=2, temperature=0
    )
    (choice,) = made.choices
    assert choice.text == "The capital of France"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["The", " capital", " of", " France"]
    assert choice.logprobs.text_offset == [0, 3, 11, 14]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert made.usage is not None
    assert made.usage.completion_tokens == 0


# ---------------------------------------------------------------------------------------------------- chat


def test_a_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=WHEEL, max_completion_tokens=20, temperature=0)
    message = made.choices[0].message
    assert (message.role, message.refusal) == ("assistant", None)
    assert message.content
    assert not message.tool_calls
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.prompt_tokens_details is not None
    again = client.chat.completions.create(model=MODEL, messages=WHEEL, max_completion_tokens=20, temperature=0)
    assert again.choices == made.choices
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_a_chat_as_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": WHEEL, "max_tokens": 20, "temperature": 1, "seed": 8}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    last = chunks[-2].choices[0]
    assert (last.finish_reason, last.delta.content) == (whole.choices[0].finish_reason, None)


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    # The helper gives no final completion of an answer that its length ended: a full stop ends these.
    asked = {"model": MODEL, "messages": WHEEL, "max_tokens": 90, "temperature": 0.5, "seed": 1, "n": 2, "stop": "."}
    whole = client.chat.completions.create(**asked)
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    said = [choice.message.content for choice in whole.choices]
    assert sum(len(event.delta) for event in events if event.type == "content.delta") == len("".join(map(str, said)))
    assert sorted(str(event.content) for event in events if event.type == "content.done") == sorted(map(str, said))
    assert [choice.message.content for choice in final.choices] == said
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_the_streaming_helper_says_when_the_length_ended_an_answer(client: openai.OpenAI) -> None:
    with (
        pytest.raises(openai.LengthFinishReasonError) as caught,
        client.chat.completions.stream(model=MODEL, messages=WHEEL, max_tokens=4) as stream,
    ):
        stream.until_done().get_final_completion()
    assert caught.value.completion.choices[0].message.content


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": WHEEL, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert len(content) == 8
    assert b"".join(bytes(token.bytes or ()) for token in content).decode() == whole.message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs)
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0001
    stream = client.chat.completions.create(**asked, stream=True)
    parts = [choice.logprobs for chunk in stream for choice in chunk.choices]
    assert [token for part in parts if part is not None for token in part.content or []] == content


def test_stop_strings(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "1, 2, 3, 4,", "max_tokens": 30, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    assert ", 8" in free
    for stop in (", 8", ["never said", ", 8"]):
        cut = client.completions.create(**asked, stop=stop).choices[0]
        assert (cut.text, cut.finish_reason) == (free[: free.index(", 8")], "stop")
        streamed = client.completions.create(**asked, stop=stop, stream=True)
        assert "".join(part.choices[0].text for part in streamed) == cut.text


def test_fields_beyond_the_standard(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=3, extra_body={"top_k": 1, "return_token_ids": True}
    )
    assert made.choices[0].model_extra is not None
    assert len(made.choices[0].model_extra["token_ids"]) == 3


def test_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=WHEEL, max_tokens=4)
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=WHEEL, max_tokens=4, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


# ---------------------------------------------------------------------------------------------------- errors


def test_a_bad_request_names_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=MODEL, messages=WHEEL, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=WHEEL, max_tokens=10**6, stream=True)
    assert caught.value.param == "max_tokens"


def test_a_wrong_key(server: Served) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="another", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.type == "authentication_error"


def test_a_full_queue() -> None:
    """429 says when to try again, and the client does."""
    with (
        serving("--max-num-seqs", "1", "--max-queued-requests", "1", "--num-blocks", "300") as small,
        openai.OpenAI(base_url=small.base_url, api_key=KEY, max_retries=0, timeout=60) as client,
    ):
        long = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(**long, stream=True)]
        wait_until(lambda: small.gauge("num_requests_running") == 1)
        refused: list[openai.RateLimitError] = []
        for _ in range(4):
            try:
                streams.append(client.completions.create(**long, stream=True))
            except openai.RateLimitError as error:
                refused.append(error)
        assert refused
        assert refused[0].type == "rate_limit_error"
        assert int(refused[0].response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        # A client with its usual patience comes through.
        patient = client.with_options(max_retries=5)
        assert patient.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].finish_reason == "length"


# ---------------------------------------------------------------------------------------------------- many at once


def test_a_client_that_leaves_in_the_middle(client: openai.OpenAI, server: Served) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.gauge("num_requests_running") == 1
    stream.close()
    wait_until(lambda: server.gauge("num_requests_running") == 0)


def test_fifty_at_once_get_what_they_would_get_alone(client: openai.OpenAI, server: Served) -> None:
    bodies = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Name {1 + i % 7} things that turn. Number {i}."}],
            "max_tokens": 6 + i % 10,
            "temperature": (i % 4) * 0.5,
            "seed": i,
        }
        for i in range(50)
    ]

    async def ask(many: openai.AsyncOpenAI, index: int) -> str:
        if index % 2:
            return (await many.chat.completions.create(**bodies[index])).choices[0].message.content or ""
        stream = await many.chat.completions.create(**bodies[index], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=KEY, max_retries=0, timeout=120) as many:
            return await asyncio.gather(*(ask(many, index) for index in range(len(bodies))))

    together = asyncio.run(ask_all())
    for index in range(0, 50, 5):
        assert client.chat.completions.create(**bodies[index]).choices[0].message.content == together[index]
