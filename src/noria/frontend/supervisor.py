"""Keeps an engine alive: starts another one when it dies, and ends one that makes no progress.

Owns the current transport and the pauses between starts. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from noria.errors import ConfigError, EngineError
from noria.frontend.transport import Transport
from noria.messages import EngineInfo, StepOutputs, ToEngine
from noria.observe.logging import get_logger

log = get_logger(__name__)

# Seconds before a start, by the number of deaths shortly before; the last one repeats.
PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
HEALTHY_SECONDS = 60.0  # an engine that lives so long clears the record
START_SECONDS = 600.0  # that a later engine may take to start
MOST_FAILED_STARTS = 5  # in a row, before there is no hope
MOST_BARREN_ENGINES = 20  # in a row that died before any request had a token of them
STALL_SECONDS = 30.0  # in which nothing runs although there is work; at least
FIRST_STALL_SECONDS = 300.0  # before the first step, when their length is not known
STALL_STEPS = 10.0  # or so many times the longest of them
DUMP_SECONDS = 0.5  # that an engine has to log where it stands


class Supervisor:
    """The engine at hand.

    Args:
        transport: to the first engine.
        make: a transport to a new one; None: there will be no other.
    """

    def __init__(self, transport: Transport, make: Callable[[], Transport] | None = None) -> None:
        self.restarts = 0
        self.barren = 0  # engines in a row, this one among them, that gave no token; whoever gets one sets it to 0
        self._transport = transport
        self._make = make
        self._deaths = 0  # shortly one after the other
        self._since = 0.0
        self._heard = 0.0  # when something ran, or work began
        self._longest = 0.0  # seconds between two such times with this engine; 0: nothing ran yet

    @property
    def replaceable(self) -> bool:
        """Whether another engine can be made."""
        return self._make is not None

    async def start(self) -> EngineInfo:
        """Waits for the first engine. Raises ConfigError or EngineError if it cannot start."""
        info = await self._transport.start()
        self._begin()
        return info

    def send(self, message: ToEngine) -> None:
        """To the engine at hand."""
        self._transport.send(message)

    async def receive(self) -> StepOutputs:
        """The engine's next outputs. Raises EngineError once it is dead."""
        return await self._transport.receive()

    async def close(self) -> None:
        """Stops the engine."""
        await self._transport.close()

    async def restart(self, error: EngineError) -> EngineInfo:
        """Another engine for the one that died of `error`, after a pause.

        Raises:
            EngineError: there is none to be had, or none that lives.
        """
        if self._make is None:
            raise error
        if self.barren > MOST_BARREN_ENGINES:
            raise EngineError(f"{error}; {self.barren} engines have died one after the other before they gave a token")
        if time.monotonic() - self._since > HEALTHY_SECONDS:
            self._deaths = 0
        failed = error
        for _ in range(MOST_FAILED_STARTS):
            pause = PAUSES[min(self._deaths, len(PAUSES) - 1)]
            self._deaths += 1
            self.restarts += 1
            await self._transport.close()
            await asyncio.sleep(pause)
            try:
                self._transport = self._make()
                info = await asyncio.wait_for(self._transport.start(), START_SECONDS)
            except (ConfigError, EngineError, OSError, asyncio.TimeoutError) as failure:
                why = str(failure) or f"it was not ready within {START_SECONDS:g} s"
                log.error("the engine could not be started again: %s", why)
                failed = EngineError(f"{error}; it could not be started again: {why}")
                continue
            self._begin()
            return info
        raise failed

    def _begin(self) -> None:
        self.barren += 1
        self._since = self._heard = time.monotonic()
        self._longest = 0.0

    # ------------------------------------------------------------------------------------------------ watchdog

    def works_from_now(self) -> None:
        """The engine had no work until now."""
        self._heard = time.monotonic()

    def heard(self, now: float) -> None:
        """Something ran."""
        self._longest = max(self._longest, now - self._heard)
        self._heard = now

    def stalled(self, now: float) -> float | None:
        """Seconds since something ran if they are too many for an engine that has work, otherwise None."""
        limit = max(STALL_SECONDS, STALL_STEPS * self._longest) if self._longest else FIRST_STALL_SECONDS
        return now - self._heard if now - self._heard > limit else None

    async def put_down(self) -> None:
        """Lets an engine that makes no progress log where it stands, and ends it."""
        transport = self._transport
        transport.dump()
        await asyncio.sleep(DUMP_SECONDS)
        transport.end()
