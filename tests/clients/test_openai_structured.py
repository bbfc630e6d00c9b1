"""Structured output through the official client: its `parse` helpers, streams of them, and many at once."""

from __future__ import annotations

import asyncio
import json
import re
from enum import Enum
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field, ValidationError
from served import KEY, MODEL, Served


class Colour(str, Enum):
    red = "red"
    green = "green"


class Part(BaseModel):
    name: str = Field(max_length=12)
    count: int = Field(ge=0, le=99)


class Wheel(BaseModel):
    """A nested object with everything that bounds its length, so that a short answer is whole."""

    colour: Colour
    kind: Literal["water", "wind"]
    turning: bool
    diameter: float | None
    parts: list[Part] = Field(min_length=1, max_length=2)


ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Describe a water wheel as JSON."}]


def test_a_pydantic_model(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=ASKED, response_format=Wheel, max_tokens=250, temperature=0
    )
    message = made.choices[0].message
    assert made.choices[0].finish_reason == "stop"
    assert isinstance(message.parsed, Wheel)
    assert message.refusal is None
    assert Wheel.model_validate_json(message.content or "") == message.parsed


def test_a_pydantic_model_as_a_stream(client: openai.OpenAI) -> None:
    asked = {
        "model": MODEL,
        "messages": ASKED,
        "response_format": Wheel,
        "max_tokens": 250,
        "temperature": 0.7,
        "seed": 4,
    }
    whole = client.chat.completions.parse(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    assert final.content == whole.content
    assert final.parsed == whole.parsed
    deltas = [event for event in events if event.type == "content.delta"]
    assert len(deltas) > 5
    # The helper shows the object as it grows.
    assert any(isinstance(event.parsed, dict) and "colour" in event.parsed for event in deltas)


def test_any_json_object(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=ASKED, response_format={"type": "json_object"}, max_tokens=100, temperature=0.3, seed=11
    )
    content = made.choices[0].message.content or ""
    assert content.startswith("{")
    if made.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
    else:
        assert made.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}, r"\d{4}-\d\d-\d\d"),
        ({"choice": ["paddle", "bucket"]}, "paddle|bucket"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
    ],
)
def test_extensions(client: openai.OpenAI, asked: dict[str, object], pattern: str) -> None:
    for temperature in (0, 1.5):
        made = client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            max_tokens=30,
            temperature=temperature,
            seed=2,
            extra_body={"structured_outputs": asked},
        )
        assert re.fullmatch(pattern, made.choices[0].message.content or "")
        assert made.choices[0].finish_reason == "stop"


def test_a_schema_that_cannot_be_served_is_refused(client: openai.OpenAI) -> None:
    for schema in ({"type": "object", "properties": 7}, {"$ref": "https://elsewhere.example/schema.json"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL,
                messages=ASKED,
                max_tokens=20,
                response_format={"type": "json_schema", "json_schema": {"name": "wheel", "schema": schema}},
            )
        assert "response_format" in (caught.value.param or "")


def test_thirty_two_at_once(client: openai.OpenAI, server: Served) -> None:
    """All valid, and equal to the same requests alone."""
    bodies = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Describe wheel number {i} as JSON."}],
            "response_format": Wheel,
            "max_tokens": 250,
            "temperature": 0.2 * (i % 6),
            "seed": i,
        }
        for i in range(32)
    ]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=KEY, max_retries=0, timeout=240) as many:
            made = await asyncio.gather(*(many.chat.completions.parse(**body) for body in bodies))
        return [one.choices[0].message.content or "" for one in made]

    together = asyncio.run(ask_all())
    for content in together:
        try:
            Wheel.model_validate_json(content)
        except ValidationError as error:
            pytest.fail(f"{content}: {error}")
    for index in range(0, 32, 8):
        assert client.chat.completions.parse(**bodies[index]).choices[0].message.content == together[index]
