"""Tools through the official client: forced and free calls, whole and streamed, and conversations that go on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel, Field
from served import MODEL

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"hours": {"type": "integer", "minimum": -12, "maximum": 12}},
            "required": ["hours"],
            "additionalProperties": False,
        },
    },
}
CITIES = ["Paris", "Köln", "São Paulo", "東京", "Rome", "Oslo", "Lima", "Bonn", "Kyiv", "Cairo"]


def question(city: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": f"What is the weather in {city}?"}]


def check_weather(arguments: str) -> None:
    made = json.loads(arguments)
    assert set(made) == {"city", "unit"}
    assert made["unit"] in ("celsius", "fahrenheit")
    assert len(made["city"]) <= 20


@pytest.mark.parametrize("choice", ["named", "required"])
def test_fifty_forced_calls_streamed_and_not(client: openai.OpenAI, choice: str) -> None:
    """25 prompts for either way of forcing: all parse, and the streamed call equals the one that was not."""
    with ThreadPoolExecutor(8) as pool:
        for checked in [pool.submit(check_forced, client, choice, index) for index in range(25)]:
            checked.result()


def check_forced(client: openai.OpenAI, choice: str, index: int) -> None:
    asked = {
        "model": MODEL,
        "messages": question(f"{CITIES[index % 10]} {index}"),
        "tools": [WEATHER, TIME] if choice == "named" else [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}} if choice == "named" else choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "temperature": 0.1 * index,
        "seed": index,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    check_weather(call.function.arguments)
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    assert final.finish_reason == whole.finish_reason
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 1  # argument by argument, not at once
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == [call.function.arguments]


def test_required_leaves_the_model_the_choice_of_the_tool(client: openai.OpenAI) -> None:
    names = set()
    for seed in range(6):
        made = client.chat.completions.create(
            model=MODEL,
            messages=question("Paris"),
            tools=[WEATHER, TIME],
            tool_choice="required",
            temperature=1.5,
            seed=seed,
            max_tokens=150,
            parallel_tool_calls=False,
        ).choices[0]
        (call,) = made.message.tool_calls or []
        assert call.type == "function"
        names.add(call.function.name)
        if call.function.name == "get_weather":
            check_weather(call.function.arguments)
        else:
            assert -12 <= json.loads(call.function.arguments)["hours"] <= 12
    assert names <= {"get_weather", "get_time"}


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_model_may_also_just_answer(client: openai.OpenAI, choice: Literal["auto", "none"]) -> None:
    """The demo model was not taught to call tools; what counts is that either way the answer is well-formed."""
    asked = {
        "model": MODEL,
        "messages": question("Paris"),
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 40,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason in ("stop", "length", "tool_calls")
    assert whole.message.content or whole.message.tool_calls
    if choice == "none":
        assert not whole.message.tool_calls
    text, names = "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        names += [call.function.name for call in delta.tool_calls or [] if call.function and call.function.name]
    assert text == (whole.message.content or "")
    assert len(names) == len(whole.message.tool_calls or [])


def test_a_conversation_with_a_tools_answer(client: openai.OpenAI) -> None:
    messages = question("Paris")
    forced = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required", max_tokens=120, temperature=0
    ).choices[0]
    call = (forced.message.tool_calls or [])[0]
    messages = [*messages, forced.message.to_dict()]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21, "sky": "clear"}'})
    made = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=30, temperature=0
    )
    assert made.choices[0].message.content
    assert not made.choices[0].message.tool_calls


class Forecast(BaseModel):
    """A forecast."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=7)


def test_tools_from_pydantic(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL,
        messages=question("Oslo"),
        tools=[openai.pydantic_function_tool(Forecast)],
        tool_choice="required",
        max_tokens=120,
        temperature=0,
    ).choices[0]
    call = (made.message.tool_calls or [])[0]
    assert isinstance(call.function.parsed_arguments, Forecast)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "not a name!"}}]}, "tools"),
        ({"tools": []}, "tool"),
    ],
)
def test_tools_that_cannot_be(client: openai.OpenAI, wrong: dict[str, object], param: str) -> None:
    asked = {"model": MODEL, "messages": question("Paris"), "tools": [WEATHER], "tool_choice": "required"} | wrong
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, max_tokens=5)
    assert param in (caught.value.param or "")
