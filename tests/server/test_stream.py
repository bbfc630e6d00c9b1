"""News that are written where they arrive: order, waiting writers, failing ones, readers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from noria.errors import EngineError
from noria.frontend.stream import Finish, Increment, RequestStream, StreamClosedError


class Writer:
    """Keeps what it is given as (choice, text); waits for `gate` once it is shut."""

    def __init__(self) -> None:
        self.written: list[tuple[int, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = False

    def __call__(self, news: list[Increment]) -> Coroutine[Any, Any, None] | None:
        if all(not increment.text for increment in news):
            return None
        return self._write([(increment.choice, increment.text) for increment in news])

    async def _write(self, news: list[tuple[int, str]]) -> None:
        try:
            await self.gate.wait()
        except BaseException:
            self.cancelled = True
            raise
        self.written += news


def counted(choices: int = 1) -> dict[int, Any]:
    """What stands for live requests where they are only counted."""
    return dict.fromkeys(range(choices))


def put(stream: RequestStream, text: str, choice: int = 0, last: bool = False) -> None:
    if last:
        stream.live.pop(choice)
    stream.put(Increment(choice, [1] * len(text), text, finish=Finish("length") if last else None))


def run(test: Callable[[RequestStream, Writer, asyncio.Task[None]], Awaitable[None]], choices: int = 1) -> None:
    async def main() -> None:
        stream, writer = RequestStream(choices, 1, lambda stream: None), Writer()
        stream.live = counted(choices)
        reader = asyncio.create_task(stream.forward(writer))
        await asyncio.sleep(0)
        await test(stream, writer, reader)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_news_are_written_before_put_returns() -> None:
    async def test(stream: RequestStream, writer: Writer, reader: asyncio.Task[None]) -> None:
        for text in ("a", "", "b"):
            put(stream, text)
        put(stream, "x", choice=1)
        assert writer.written == [(0, "a"), (0, "b"), (1, "x")]
        put(stream, "y", choice=1, last=True)
        assert not reader.done()
        put(stream, "c", last=True)
        assert writer.written[3:] == [(1, "y"), (0, "c")]
        await reader

    run(test, choices=2)


def test_the_first_news_are_written_as_they_come_with_the_beginning() -> None:
    async def test(stream: RequestStream, writer: Writer, reader: asyncio.Task[None]) -> None:
        stream.begin()
        put(stream, "a")
        assert writer.written == [(0, "a")]
        put(stream, "b", last=True)
        await reader

    run(test)


def test_what_came_before_the_reader_is_written_first() -> None:
    async def main() -> None:
        stream, writer = RequestStream(1, 1, lambda stream: None), Writer()
        stream.live = counted()
        put(stream, "a")
        put(stream, "b")
        reader = asyncio.create_task(stream.forward(writer))
        await asyncio.sleep(0)
        put(stream, "c", last=True)
        await reader
        assert writer.written == [(0, "ab"), (0, "c")]

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize("finished", [False, True])
def test_while_a_write_waits_the_rest_is_merged(finished: bool) -> None:
    async def test(stream: RequestStream, writer: Writer, reader: asyncio.Task[None]) -> None:
        writer.gate.clear()
        put(stream, "a")
        for text in "bcd":
            put(stream, text)
            await asyncio.sleep(0)
        put(stream, "e", last=finished)
        await asyncio.sleep(0)
        assert writer.written == []
        writer.gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert writer.written == [(0, "a"), (0, "bcde")]
        if not finished:
            put(stream, "f", last=True)  # written at once again
            assert writer.written[2:] == [(0, "f")]
        await reader

    run(test)


def test_a_writer_that_fails_ends_the_reader() -> None:
    async def main() -> None:
        closed: list[RequestStream] = []
        stream = RequestStream(1, 1, closed.append)
        stream.live = counted()

        def write(news: list[Increment]) -> None:
            raise EngineError("no more of this")

        reader = asyncio.create_task(stream.forward(write))
        await asyncio.sleep(0)
        put(stream, "a")  # raises nothing here: other requests are served by the same loop
        put(stream, "b")
        with pytest.raises(EngineError, match="no more of this"):
            await reader
        stream.close()
        assert closed == [stream]

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize("waiting", [False, True])
def test_closing_ends_the_reader_and_its_write(waiting: bool) -> None:
    async def test(stream: RequestStream, writer: Writer, reader: asyncio.Task[None]) -> None:
        if waiting:
            writer.gate.clear()
            put(stream, "a")
        stream.close()
        with pytest.raises(StreamClosedError):
            await reader
        assert writer.cancelled == waiting
        assert writer.written == []

    run(test)


def test_a_cancelled_reader_cancels_its_write() -> None:
    async def test(stream: RequestStream, writer: Writer, reader: asyncio.Task[None]) -> None:
        writer.gate.clear()
        put(stream, "a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert writer.cancelled

    run(test)


def test_an_engine_that_dies_is_told_after_what_it_said() -> None:
    async def test(stream: RequestStream, writer: Writer, reader: asyncio.Task[None]) -> None:
        writer.gate.clear()
        put(stream, "a")
        put(stream, "b")
        stream.fail(EngineError("gone"))
        writer.gate.set()
        with pytest.raises(EngineError, match="gone"):
            await reader
        assert writer.written == [(0, "a"), (0, "b")]

    run(test)
