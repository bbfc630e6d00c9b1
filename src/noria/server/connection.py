"""One client's connection: uvicorn's protocol, and what it leaves open.

A client that goes away ends the request that runs for it, also where it had sent others behind it. A client that does
not read its answer is cut off: what is written for it would fill the memory, or wait for ever. Knows nothing of what is
asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from noria.observe.logging import get_logger

log = get_logger(__name__)
STALL_SECONDS = 30.0  # in which a client must take
STALL_BYTES = 16 << 10  # so much of what is there for it, or all that is left


class Connection(HttpToolsProtocol):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served: RequestResponseCycle | None = None  # `cycle` is the newest, which may wait behind it
        self._clock: asyncio.TimerHandle | None = None
        self._left = 0  # bytes to be written when the clock was started

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self.pipeline.clear()
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True
            served.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_clock()

    def resume_writing(self) -> None:
        self._stop_clock()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self._cut()  # to close it would wait until the client has read its answer
        else:
            super().timeout_keep_alive_handler()

    def _start_clock(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self._clock = self.loop.call_later(STALL_SECONDS, self._look)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _look(self) -> None:
        if self._left - self.transport.get_write_buffer_size() < STALL_BYTES:
            self._cut()
        else:
            self._start_clock()

    def _cut(self) -> None:
        self._stop_clock()
        fields = {"client": str(self.client), "unread_bytes": self.transport.get_write_buffer_size()}
        log.info("a client that does not read its answer is cut off", extra={"fields": fields})
        self.transport.abort()
