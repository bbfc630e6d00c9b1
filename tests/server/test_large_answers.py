"""Answers and conversations of many parts keep nobody else waiting."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import msgspec
import pytest


@pytest.mark.parametrize("parts", [0, 1_000_000])
def test_large_answers_are_made_in_a_thread(http: httpx.Client, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr("noria.server.http.MANY_PARTS", parts)
    monkeypatch.setattr("noria.server.reading.MANY_MESSAGES", parts)
    made: list[str] = []
    encode = msgspec.json.Encoder().encode

    class Encoder:
        def encode(self, value: Any) -> bytes:
            made.append(threading.current_thread().name)
            return encode(value)

    monkeypatch.setattr("noria.server.http._encoder", Encoder())
    completion = {"prompt": [97, 98], "echo": True, "logprobs": 2, "max_tokens": 3}
    reply = http.post("/v1/completions", json=completion).json()
    assert reply["choices"][0]["text"] == "abWat"
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 5
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    reply = http.post("/v1/chat/completions", json=chat).json()
    assert len(reply["choices"][0]["logprobs"]["content"]) == 3
    assert len(made) == 2
    assert ("asyncio" in made[0] and "asyncio" in made[1]) == (parts == 0)
