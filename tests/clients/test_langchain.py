"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from served import KEY, MODEL, Served


@pytest.fixture(scope="module")
def at(server: Served) -> dict[str, Any]:
    return {"model": MODEL, "base_url": server.base_url, "api_key": KEY, "temperature": 0, "max_retries": 0}


@pytest.fixture(scope="module")
def model(at: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(max_tokens=20, **at)


MESSAGES = [SystemMessage("Answer in one sentence."), HumanMessage("What is a water wheel?")]


def test_invoke_and_stream(model: ChatOpenAI) -> None:
    whole = model.invoke(MESSAGES)
    assert isinstance(whole, AIMessage)
    assert whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    streamed = AIMessageChunk("")
    for chunk in model.stream(MESSAGES):
        streamed = streamed + chunk
    assert streamed.content == whole.content
    assert streamed.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_chains_and_batches(model: ChatOpenAI) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "Name {count} things that turn.")]) | model
    asked = [{"count": str(count)} for count in range(1, 7)]
    together = [made.content for made in chain.batch(asked)]
    assert together[3] == chain.invoke(asked[3]).content
    assert asyncio.run(_later(chain, asked[2])) == together[2]


async def _later(chain: Any, asked: dict[str, str]) -> str:
    return str((await chain.ainvoke(asked)).content)


def test_log_probabilities(at: dict[str, Any]) -> None:
    made = ChatOpenAI(max_tokens=3, logprobs=True, top_logprobs=2, **at).invoke("Water")
    assert [len(token["top_logprobs"]) for token in made.response_metadata["logprobs"]["content"]] == [2, 2, 2]


def test_completions(at: dict[str, Any]) -> None:
    assert "Paris" in OpenAI(max_tokens=5, **at).invoke("The capital of France is")


class Wheel(BaseModel):
    """A wheel."""

    kind: str = Field(max_length=10)
    spokes: int = Field(ge=0, le=99)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(at: dict[str, Any], method: Any) -> None:
    bound = ChatOpenAI(max_tokens=150, **at).with_structured_output(Wheel, method=method)
    assert isinstance(bound.invoke("Describe a water wheel."), Wheel)


@tool
def turn(times: int, direction: str) -> str:
    """Turns the wheel so many times, left or right."""
    return f"turned {times} times {direction}"


def test_tools(at: dict[str, Any]) -> None:
    bound = ChatOpenAI(max_tokens=200, **at).bind_tools([turn], tool_choice="turn")
    messages: list[Any] = [HumanMessage("Turn the wheel three times to the left.")]
    called = bound.invoke(messages)
    assert isinstance(called, AIMessage)
    assert not called.invalid_tool_calls
    (call,) = called.tool_calls
    assert call["name"] == "turn"
    assert set(call["args"]) == {"times", "direction"}
    streamed = AIMessageChunk("")
    for chunk in bound.stream(messages):
        streamed = streamed + chunk
    assert [made["args"] for made in streamed.tool_calls] == [call["args"]]
    messages += [called, ToolMessage("turned 3 times left", tool_call_id=call["id"])]
    assert ChatOpenAI(max_tokens=10, **at).bind_tools([turn], tool_choice="none").invoke(messages).content
