"""Runs a workload: closed loop (so many callers) or open loop (arrivals at given times)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from noria.bench.http import Record
from noria.bench.workloads import BenchRequest

T = TypeVar("T")
Ask = Callable[[BenchRequest], Awaitable[Record]]
Progress = Callable[[Record], None]


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on the event loop that takes the least of the processor."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.run(main)
    return uvloop.run(main)


async def run_load(
    ask: Ask, requests: Sequence[BenchRequest], concurrency: int | None, on_done: Progress = lambda _: None
) -> list[Record]:
    """Asks everything and returns the records in the order of `requests`.

    Args:
        concurrency: callers of a closed loop, each with one request at a time; None sends each at its own time.
    """
    if concurrency is None:
        return await _open_loop(ask, requests, on_done)
    records: list[Record | None] = [None] * len(requests)
    waiting = iter(enumerate(requests))

    async def caller() -> None:
        for index, request in waiting:
            record = records[index] = await ask(request)
            on_done(record)

    await asyncio.gather(*(caller() for _ in range(min(concurrency, len(requests)))))
    return [record for record in records if record is not None]


async def _open_loop(ask: Ask, requests: Sequence[BenchRequest], on_done: Progress) -> list[Record]:
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(request: BenchRequest) -> Record:
        await asyncio.sleep(max(0.0, start + request.at - loop.time()))
        record = await ask(request)
        on_done(record)
        return record

    return await asyncio.gather(*(one(request) for request in requests))
