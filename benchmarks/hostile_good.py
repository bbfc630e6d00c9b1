"""Requests that deserve their answer, and the answers: found out before anybody disturbs the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hostile_wire import Reply, Wire, post

PATIENCE = 300.0  # seconds that an answer may take: the machine is under attack, but does not stop
PAUSE = 0.2  # seconds between two requests of one client


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Path and body: greedy and seeded, short and long, whole and streamed, of every kind that the server answers."""
    made: list[tuple[str, dict[str, Any]]] = []
    topics = ("a water wheel", "the sea", "an old mill", "rain in May", "two brothers", "a lighthouse")
    for index, topic in enumerate(topics):
        story = {"prompt": f"A short story about {topic}.", "max_tokens": 20 + 10 * index}
        talk = {"messages": [{"role": "user", "content": f"What do you know about {topic}?"}], "max_tokens": 40}
        made += [
            ("/v1/completions", {**story, "temperature": 0, "stream": index % 2 == 0}),
            ("/v1/completions", {**story, "seed": index, "frequency_penalty": 0.5, "top_p": 0.9, "n": 2}),
            ("/v1/completions", {**story, "temperature": 0, "logprobs": 3, "echo": True, "stop": [" the"]}),
            ("/v1/chat/completions", {**talk, "temperature": 0, "stream": index % 2 == 1}),
            ("/v1/chat/completions", {**talk, "seed": index, "repetition_penalty": 1.2, "logit_bias": {"260": -5}}),
        ]
    made += [
        (
            "/v1/completions",
            {"prompt": "A word: ", "max_tokens": 20, "structured_outputs": {"regex": "[a-z]{4,9}"}, **how},
        )
        for how in ({"temperature": 0}, {"seed": 1}, {"seed": 2, "stream": True})
    ]
    long = " ".join(f"The wheel has {number} buckets." for number in range(300))
    made.append(("/v1/completions", {"prompt": long, "max_tokens": 10, "temperature": 0}))
    made.append(("/tokenize", {"prompt": long}))
    return made


def answer(reply: Reply) -> Any:
    """What must be equal: what an answer says, without the names and times that differ from one to the next."""
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line.removeprefix(b"data: ") for line in reply.body.split(b"\n\n") if line]
        if not events or events[-1] != b"[DONE]":
            return "a stream without its end"
        said: dict[int, str] = {}
        ends: dict[int, Any] = {}
        for event in map(json.loads, events[:-1]):
            if "error" in event:
                return event
            for choice in event["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                said[choice["index"]] = said.get(choice["index"], "") + text
                ends[choice["index"]] = choice.get("finish_reason") or ends.get(choice["index"])
        return said, ends
    body = json.loads(reply.body)
    return body.get("choices", body)


@dataclass(slots=True)
class Good:
    """Well-behaved clients. `waits`: times that one was asked to come again later, by status."""

    port: int
    random: random.Random
    known: list[tuple[bytes, Any]] = field(default_factory=list)
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    waits: Counter[int] = field(default_factory=Counter)

    async def learn(self) -> None:
        """Asks everything once, one after the other, and then once more, all at once."""
        for path, body in requests():
            async with Wire(self.port) as wire:
                data = post(path, body)
                await wire.send(data)
                reply = await wire.reply()
            if reply.status != 200:
                raise SystemExit(f"{path} {body}: {reply.status} {reply.body[:500]!r}")
            self.known.append((data, answer(reply)))
        await asyncio.gather(*(self.ask(*pair) for pair in self.known))
        if self.wrong:
            raise SystemExit(f"answers differ without any attack: {self.wrong[0]}")

    async def work(self, end: asyncio.Event) -> None:
        """One client, until `end`."""
        while not end.is_set():
            await self.ask(*self.random.choice(self.known))
            await asyncio.sleep(PAUSE * self.random.random())

    async def ask(self, data: bytes, expected: Any) -> None:
        """One request, as often as the server asks to come again."""
        try:
            reply = await asyncio.wait_for(self._ask(data), PATIENCE)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            self.wrong.append(f"{type(error).__name__}: {error} for {data[-300:]!r}")
            return
        got = answer(reply) if reply.status == 200 else f"{reply.status}: {reply.body[:300]!r}"
        if got == expected:
            self.right += 1
        else:
            self.wrong.append(f"{got!r} instead of {expected!r} for {data[-300:]!r}")

    async def _ask(self, data: bytes) -> Reply:
        while True:
            async with Wire(self.port) as wire:
                await wire.send(data)
                reply = await wire.reply()
            if reply.status not in (429, 503) or "retry-after" not in reply.headers:
                return reply
            self.waits[reply.status] += 1
            await asyncio.sleep(float(reply.headers["retry-after"]) * (0.5 + self.random.random()))
