"""One user request on its way: what the engine has yielded so far, and the way to whoever reads it.

Owns the form in which outputs leave the client. Increments that nobody has taken yet are merged, so that a slow reader
costs no more memory than the output itself. A reader that only writes them on is served where they arrive, so that no
task is woken for each token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noria.frontend.course import Course, Passage
from noria.frontend.detokenizer import Detokenizer
from noria.messages import FinishReason, LogProbs, Submit


@dataclass(slots=True)
class LogProbColumns:
    """Log-probabilities of consecutive tokens. `top_ids`, `top`: most likely first, as many as were asked for."""

    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)

    @classmethod
    def decode(cls, wire: LogProbs) -> LogProbColumns:
        """From the columns of a message."""
        tokens = np.frombuffer(wire.tokens, "<i4").tolist()
        shape = (len(tokens), wire.k)
        return cls(
            tokens,
            np.frombuffer(wire.chosen, "<f4").tolist(),
            np.frombuffer(wire.ranks, "<i4").tolist(),
            np.frombuffer(wire.top_ids, "<i4").reshape(shape).tolist(),
            np.frombuffer(wire.top, "<f4").reshape(shape).tolist(),
        )

    def extend(self, other: LogProbColumns) -> None:
        """Appends `other`."""
        self.tokens += other.tokens
        self.chosen += other.chosen
        self.ranks += other.ranks
        self.top_ids += other.top_ids
        self.top += other.top

    @property
    def size(self) -> int:
        """Log-probabilities in all."""
        return len(self.tokens) + sum(map(len, self.top_ids))

    def cut(self, count: int) -> None:
        """Keeps the first `count` tokens."""
        for column in (self.tokens, self.chosen, self.ranks, self.top_ids, self.top):
            del column[count:]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice.

    Attributes:
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended it; None for the model's end tokens.
        cached_tokens: prompt tokens that came from the prefix cache.
        refused: it ended in error because of what it asked for, not for a fault of the server.
    """

    reason: FinishReason
    stop_reason: str | int | None = None
    message: str | None = None
    cached_tokens: int = 0
    refused: bool = False


@dataclass(slots=True)
class Increment:
    """What is new of one choice. `prompt_logprobs` are of prompt tokens 1 …, whole, with the first increment."""

    choice: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: LogProbColumns | None = None
    prompt_logprobs: LogProbColumns | None = None
    finish: Finish | None = None

    def merge(self, other: Increment) -> None:
        """Appends what came later."""
        self.token_ids += other.token_ids
        self.text += other.text
        if other.logprobs is not None:
            self.logprobs = _joined(self.logprobs, other.logprobs)
        if other.prompt_logprobs is not None:
            self.prompt_logprobs = _joined(self.prompt_logprobs, other.prompt_logprobs)
        self.finish = other.finish or self.finish


def _joined(old: LogProbColumns | None, new: LogProbColumns) -> LogProbColumns:
    if old is None:
        return new
    old.extend(new)
    return old


class StreamClosedError(Exception):
    """The stream was closed while somebody waited for its news."""


Write = Callable[[list[Increment]], Coroutine[Any, Any, None] | None]


class _Rest:
    """The rest of a coroutine that was begun outside of a task and now waits for `pending`: await this to go on."""

    __slots__ = ("_coroutine", "_pending")

    def __init__(self, coroutine: Coroutine[Any, Any, None], pending: Any) -> None:
        self._coroutine = coroutine
        self._pending = pending

    def __await__(self) -> Generator[Any, Any, None]:
        pending = self._pending
        try:
            while True:
                try:
                    value = yield pending
                except BaseException as error:
                    pending = self._coroutine.throw(error)
                else:
                    pending = self._coroutine.send(value)
        except StopIteration:
            return

    def close(self) -> None:
        self._coroutine.close()


class RequestStream:
    """The choices of one user request, as they grow. Choice index = prompt index * n + index within its n.

    Iterate for lists of increments, one per choice that has news; or have them written by `forward()`; or await
    `result()` for the whole. `close()` aborts whatever has not finished, and ends a reader that waits with
    StreamClosedError; leaving `with` closes. While all of it may be refused, `begun()` tells when it no longer can be.
    """

    def __init__(
        self,
        choices: int,
        prompt_tokens: int,
        on_close: Callable[[RequestStream], None],
        spend: Callable[[int], None] | None = None,
    ) -> None:
        self.choices = choices
        self.prompt_tokens = prompt_tokens  # each prompt counted once
        self.cached_tokens = 0
        self.spend = spend  # is told of tokens as they come
        self.live: dict[int, LiveRequest] = {}  # engine request id → request; shrinks as they finish
        self._news: dict[int, Increment] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._patient = False
        self._write: Write | None = None
        self._rest: _Rest | None = None  # of a write that has to wait
        self._closed = False
        self._error: Exception | None = None
        self._begun = False
        self._on_close = on_close
        self.course = Course(time.monotonic(), time.time(), prompt_tokens=prompt_tokens)

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[list[Increment]]:
        while await self._wait():
            news, self._news = list(self._news.values()), {}
            yield news

    async def begun(self) -> None:
        """Until an engine has begun with it. Raises why it was refused, if it was."""
        while not (self._begun or self._news) and self.live and self._error is None:
            await self._sleep()
        if self._closed:
            raise StreamClosedError
        if self._error is not None and not self._news:
            raise self._error

    async def result(self) -> list[Increment]:
        """All choices, finished, by index. The reader is woken once, not per token."""
        self._patient = True
        await self._wait()
        return [self._news[index] for index in sorted(self._news)]

    async def forward(self, write: Write) -> None:
        """Gives all news to `write`, to the last; raises what it raises.

        While the reader, who awaits this, has nothing to do, `write` runs inside of `put`. If it has to wait there (it
        writes to something that is full), the reader finishes it, and what comes meanwhile is merged.
        """
        self._write = write
        try:
            while await self._wait():
                if self._rest is not None:
                    rest, self._rest = self._rest, None
                    await rest
                    continue
                news, self._news = list(self._news.values()), {}
                writing = write(news)
                if writing is not None:
                    await writing
        finally:
            self._write = None
            if self._rest is not None:
                self._rest.close()

    def begin(self) -> None:
        """Called by the client: an engine has begun with it."""
        self._begun = True
        if not self._patient and self._write is None:  # a reader of news is not woken for nothing
            self._wake()

    def put(self, increment: Increment) -> None:
        """Called by the client: more of a choice."""
        if self._error is not None:
            return  # of an earlier write: the reader gives up
        if self._write is not None and not self._news and self._waiter is not None and not self._waiter.done():
            self._write_now(self._write, increment)
            return
        present = self._news.get(increment.choice)
        if present is None:
            self._news[increment.choice] = increment
        else:
            present.merge(increment)
        if not self._patient or not self.live:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Called by the client: nothing more will come."""
        self._error = error
        self.live.clear()
        self._wake()

    def close(self) -> None:
        """Aborts what has not finished."""
        if self.live:
            self._on_close(self)
            self.live.clear()
            self._closed = True
            self._wake()

    def _write_now(self, write: Write, increment: Increment) -> None:
        try:
            writing = write([increment])
            if writing is not None:
                self._rest = _Rest(writing, writing.send(None))
                self._wake()
        except StopIteration:
            pass
        except Exception as error:
            self._error = error
            self._wake()
        if not self.live:
            self._wake()

    async def _wait(self) -> bool:
        """Until there is news (for the patient: until all is there) or a write to finish. False: all was read."""
        while (not (self._news or self._rest) or self._patient) and self.live and self._error is None:
            await self._sleep()
        if self._closed:
            raise StreamClosedError
        if self._error is not None and (self._patient or not (self._news or self._rest)):
            raise self._error
        return bool(self._news or self._rest)

    async def _sleep(self) -> None:
        """Until `_wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One engine request that has not finished, with all that is needed to submit it again.

    Attributes:
        received: output tokens so far, sent to the reader or withheld.
        prompt_logprobs: gathered until the first token.
        last: when its latest token came, or it was submitted (`time.monotonic()`).
        in_engine: an engine has it. handed_over: tokens of `received` that this engine was told of.
        deaths: engines that died while they had it, since its last token; lonely_deaths: of those, while they had
            nothing else.
        shed: it was refused because it would have missed an objective.
    """

    submit: Submit
    stream: RequestStream
    choice: int
    detokenizer: Detokenizer
    prompt_tokens: int
    started: float
    last: float
    passage: Passage
    received: list[int] = field(default_factory=list)
    prompt_logprobs: LogProbColumns | None = None
    cached_tokens: int = 0
    queued_seconds: float = 0.0
    first_token: float | None = None
    in_engine: bool = False
    handed_over: int = 0
    deaths: int = 0
    lonely_deaths: int = 0
    shed: bool = False

    def note_start(self, cached_tokens: int, queued_seconds: float) -> None:
        """It was admitted. What an engine says of it that has it after another one does not count."""
        if self.first_token is None:
            self.cached_tokens, self.queued_seconds = cached_tokens, queued_seconds
        self.stream.begin()

    def note_end(self, reason: FinishReason, now: float) -> None:
        """It has ended."""
        passage = self.passage
        passage.ended, passage.reason, passage.tokens = now, reason, len(self.received)
        passage.last = None if self.first_token is None else self.last
        passage.cached_tokens = self.cached_tokens
