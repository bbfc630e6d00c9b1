"""LiteLLM, as a library in front of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest
from served import KEY, MODEL, Served

MESSAGES = [{"role": "user", "content": "Name a thing that turns."}]


@pytest.fixture(scope="module")
def at(server: Served) -> dict[str, Any]:
    """What every call says."""
    return {"model": f"openai/{MODEL}", "api_base": server.base_url, "api_key": KEY, "temperature": 0, "max_tokens": 12}


def test_chat_whole_and_streamed(at: dict[str, Any]) -> None:
    whole = litellm.completion(messages=MESSAGES, **at)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **at))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_text_completion(at: dict[str, Any]) -> None:
    made = litellm.text_completion(
        prompt="The capital of France is", **at | {"model": f"text-completion-openai/{MODEL}"}
    )
    assert "Paris" in made.choices[0].text


def test_many_at_once(at: dict[str, Any]) -> None:
    async def ask_all() -> list[str]:
        calls = [litellm.acompletion(messages=[{"role": "user", "content": f"Count to {i}."}], **at) for i in range(12)]
        return [made.choices[0].message.content for made in await asyncio.gather(*calls)]

    together = asyncio.run(ask_all())
    alone = litellm.completion(messages=[{"role": "user", "content": "Count to 7."}], **at)
    assert alone.choices[0].message.content == together[7]


def test_errors_keep_their_kind(at: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=MESSAGES, top_p=7, **at)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=MESSAGES, **at | {"api_key": "another"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **at | {"model": "openai/mill"})
    with pytest.raises(litellm.BadRequestError, match="limited to"):
        litellm.completion(messages=[{"role": "user", "content": "wheel " * 20_000}], **at)
