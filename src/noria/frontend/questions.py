"""Questions to the engine, and whoever waits for the answers. An engine answers between two steps; a dead one never."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

from noria.messages import AskPacer, Control, Explain, Explained, PacerLog, ToEngine

_REST = 9.0  # times as long as an answer took the engine before it is asked again: steps lose a tenth at most
_LONGEST = 0.1  # seconds of an answer that count
ANSWER_SECONDS = 5.0  # that an engine has, which may be in the middle of a long step


class Questions:
    """Args: `send`: to the engine. `rest`: lets seconds pass."""

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._rest = rest
        self._clock = clock
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Explained | PacerLog | None]] = {}
        self._turn = asyncio.Lock()  # one at a time: each costs the engine a millisecond, or many
        self._again = 0.0  # when it may be asked again
        self._stats: list[asyncio.Future[None]] = []

    async def explain(self, request_id: int, timeout: float = ANSWER_SECONDS) -> Explained | None:
        """What became of a request in the engine; None: there is no answer."""
        answer = await self._ask(lambda number: Explain(number, request_id), timeout)
        return answer if isinstance(answer, Explained) else None

    async def pacer(self, timeout: float = ANSWER_SECONDS) -> PacerLog | None:
        """What the pacer has decided; None: there is no answer."""
        answer = await self._ask(AskPacer, timeout)
        return answer if isinstance(answer, PacerLog) else None

    async def _ask(self, make: Callable[[int], ToEngine], timeout: float) -> Explained | PacerLog | None:
        async with self._turn:
            if (early := self._again - self._clock()) > 0.0:
                await self._rest(early)
            number = next(self._numbers)
            future: asyncio.Future[Explained | PacerLog | None] = asyncio.get_running_loop().create_future()
            self._asked[number] = future
            self._send(make(number))
            try:
                answer = await asyncio.wait_for(future, timeout)
                if answer is not None:
                    self._again = self._clock() + _REST * min(answer.seconds, _LONGEST)
                return answer
            except asyncio.TimeoutError:
                return None
            finally:
                self._asked.pop(number, None)

    def answered(self, answers: tuple[Explained | PacerLog, ...]) -> None:
        """The engine has said something."""
        for answer in answers:
            future = self._asked.pop(answer.ask, None)
            if future is not None and not future.done():
                future.set_result(answer)

    async def fresh_stats(self, timeout: float) -> None:
        """Until the engine has told its statistics, or `timeout` seconds have passed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stats.append(waiter)
        if len(self._stats) == 1:
            self._send(Control("stats"))
        try:
            await asyncio.wait_for(waiter, timeout)
        except asyncio.TimeoutError:
            self._stats = [other for other in self._stats if other is not waiter]

    def told_stats(self) -> None:
        """The engine has told its statistics."""
        for waiter in self._stats:
            if not waiter.done():
                waiter.set_result(None)
        self._stats.clear()

    def give_up(self) -> None:
        """The engine will not answer."""
        self.told_stats()
        for future in self._asked.values():
            if not future.done():
                future.set_result(None)
        self._asked.clear()
