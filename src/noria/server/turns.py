"""Work that takes milliseconds, done for callers one after the other, so that all else need not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from noria.errors import RateLimitError

T = TypeVar("T")


class Turns:
    """Args: `most`: of one caller at a time, waiting or under way. (Who closes the connection still counts until the
    work is done, so that whoever does so again and again gains nothing.)"""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()  # by caller
        self._turn = asyncio.Lock()

    @contextlib.contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """While a caller waits. Raises RateLimitError if it does so too often already."""
        if self._counts[caller] >= self._most:
            raise RateLimitError(f"{self._most} such questions are being answered; try again later", retry_after=1.0)
        self._counts[caller] += 1
        try:
            yield
        finally:
            self._counts[caller] -= 1
            if not self._counts[caller]:
                del self._counts[caller]

    async def work(self, make: Callable[[], T]) -> T:
        """What `make` makes, in a thread, when it is its turn."""
        async with self._turn:
            return await asyncio.to_thread(make)
