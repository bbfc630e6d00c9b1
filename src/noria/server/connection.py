"""One client's connection: uvicorn's protocol, and what it leaves open.

A client that goes away ends the request that runs for it, also where it had sent others behind it. A client that does
not read its answer is cut off: what is written for it would fill the memory, or wait for ever. So is one that takes too
long to say what it wants, or says it with too large a head. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from noria.errors import RequestError, UnavailableError
from noria.observe.logging import get_logger
from noria.server.errors import describe

log = get_logger(__name__)
STALL_SECONDS = 30.0  # in which a client must take
STALL_BYTES = 16 << 10  # so much of what is there for it, or all that is left
MOST_HEADERS = 100
MOST_URL = 8 << 10  # bytes
MOST_AHEAD = 32  # requests that wait behind the one that is served


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what clients may do with connections.

    Attributes:
        connections: at once.
        header_bytes: of a request's line and headers, as of anything else that is not its body.
        seconds: for a request's line and headers, and for each STALL_BYTES of its body.
    """

    connections: int = 8192
    header_bytes: int = 64 << 10
    seconds: float = 30.0


class _Rest:
    """Takes the body of a request whose head another parser has read."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.on_message_complete = connection.on_message_complete

    def on_body(self, body: bytes) -> None:
        if self._connection.cycle.more_body:  # what follows is another request, which is not served
            self._connection.on_body(body)


# In Linux' `struct tcp_info`: milliseconds since data last came, 32 bits, exact to a tick of the system's clock.
_LAST_DATA_AT, _TICK = 52, 4


def unread_seconds(transport: asyncio.BaseTransport) -> float:
    """How long at least what is being read has lain in the system's buffer: a process with much to do reads late. 0
    where that cannot be known."""
    connection = transport.get_extra_info("socket")
    if connection is None or sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return 0.0
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_AT + 4)
    except OSError:  # it is closed
        return 0.0
    return (
        max(0, int.from_bytes(told[_LAST_DATA_AT:], sys.byteorder) - _TICK) / 1e3 if len(told) > _LAST_DATA_AT else 0.0
    )


class Connection(HttpToolsProtocol):
    """See the module."""

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served: RequestResponseCycle | None = None  # `cycle` is the newest, which may wait behind it
        self._clock: asyncio.TimerHandle | None = None
        self._left = 0  # bytes to be written when the clock was started
        self._patience: asyncio.TimerHandle | None = None  # runs while the client has to send something
        self._reading = False  # a body; otherwise a head
        self._came = 0  # bytes of the body since the timer was started
        self._unwanted = False  # there is an answer, and the timer runs for what is left of the body
        self._unseen = 0  # bytes that have become part of no body
        self._data = b""  # what is being parsed
        self._refusal: RequestError | None = None  # of what is being parsed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        if len(self.connections) > self.limits.connections:
            self._refuse(UnavailableError("too many connections; try again later", retry_after=1.0))
        else:
            self._wait_for_client()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unseen += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._patience is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_client()  # it has begun something that is no message yet
        if self._unseen > self.limits.header_bytes and self._refusal is None:
            self._refuse(self._too_large())

    def send_400_response(self, msg: str) -> None:
        """What is parsed is not HTTP, or was refused by a callback of this class."""
        refusal = self._refusal or RequestError("this is not a valid HTTP request")
        self._refusal = None
        self._refuse(refusal)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unseen = 0
        self._reading = False
        self._wait_for_client()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MOST_URL:
            self._refusal = _refusal(414, f"the path is longer than {MOST_URL} bytes, the limit of this server")
            raise ValueError

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:  # those behind a body count too
            self._refusal = _refusal(431, f"the request has more than {MOST_HEADERS} headers, the limit of this server")
            raise ValueError
        if sum(map(len, self.headers[-1])) > self.limits.header_bytes:
            self._refusal = self._too_large()
            raise ValueError

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > self.limits.header_bytes:
            self._refusal = self._too_large()
            raise ValueError
        self._unseen = 0
        self._reading = True
        self._wait_for_client()
        if len(self.pipeline) >= MOST_AHEAD:  # a few kilobytes can hold thousands
            self._refusal = _refusal(400, f"more than {MOST_AHEAD} requests were sent ahead on this connection")
            raise ValueError
        # Its endpoint may be called later, and it may have lain there for a while.
        self.scope.setdefault("state", {})["arrived"] = time.monotonic() - unread_seconds(self.transport)
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # or nobody would notice that the client leaves; there cannot be many

    def on_body(self, body: bytes) -> None:
        self._unseen = 0
        self._came += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reading and self._served is self.cycle:
            # The client may be sending yet, and reads its answer only then: it is let finish, but not for ever.
            self._unwanted = True
            self._wait_for_client()

    def _unsupported_upgrade_warning(self) -> None:
        """A head asks for another protocol, as Java's client does with each first request. That may be ignored, but the
        parser stops there: another one reads the body, and the connection ends with the answer."""
        upgrade = sys.exc_info()[1]
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        self.cycle.keep_alive = False
        framing = self._framing()
        if framing and self.cycle.more_body:
            self.parser = httptools.HttpRequestParser(_Rest(self))
            try:
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n" + self._data[upgrade.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("")

    def _framing(self) -> bytes:
        """The headers that tell how long the body is; empty if there is none."""
        names = (b"content-length", b"transfer-encoding")
        return b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name in names)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # its body is to come yet
        self._unseen = 0
        self._reading = self._unwanted = False
        self._stop_waiting()
        super().on_message_complete()

    def _too_large(self) -> RequestError:
        most = self.limits.header_bytes
        return _refusal(431, f"line and headers of the request are larger than {most} bytes, the limit of this server")

    def _refuse(self, error: RequestError) -> None:
        """Says why, and closes; says nothing if an answer is being written."""
        self._stop_waiting()
        served = self._served
        if served is None or served.response_complete or not served.response_started:
            self.transport.write(_response(error))
        self.transport.close()

    def _wait_for_client(self) -> None:
        self._stop_waiting()
        self._came = 0
        self._patience = self.loop.call_later(self.limits.seconds, self._lose_patience)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        if self._unwanted:
            self.transport.close()
            return
        if self._reading and (self.flow.read_paused or self._came >= STALL_BYTES):
            self._wait_for_client()
            return
        seconds = self.limits.seconds
        what = f"{STALL_BYTES} bytes of its body" if self._reading else "the head of a request"
        self._refuse(_refusal(408, f"the client did not send {what} within {seconds:g} seconds"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._stop_waiting()
        self._unset_keepalive_if_required()  # it would keep all of this for as long as it runs
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


def limited(limits: Limits) -> type[Connection]:
    """Connections with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


def _refusal(status: int, message: str) -> RequestError:
    error = RequestError(message)
    error.status = status
    return error


def _response(error: RequestError) -> bytes:
    """A whole reply, after which the connection is closed."""
    status, reply = describe(error)
    body = msgspec.json.encode(reply)
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    if error.retry_after is not None:
        head += f"retry-after: {error.retry_after:.0f}\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
