"""Bodies in, replies and event streams out, and noticing that a client has gone.

Knows nothing of what is in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar, cast

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from noria.errors import InvalidRequestError, QueueFullError, TooLargeError
from noria.frontend.stream import Increment, RequestStream, StreamClosedError
from noria.server.errors import from_decoding
from noria.server.fields import known_fields

T = TypeVar("T")
LARGE = 1 << 18  # bytes of a body that takes milliseconds to decode
MANY_PARTS = 1000  # of a reply that takes milliseconds to make
# Characters that stand between the parts of JSON → how many a body may have, beside twice the tokens of the context.
# They are counted within texts as well, where they are tokens, or most of one.
_MARKS = ((b",", 1 << 18), (b"[{", 1 << 15), (b":", 1 << 16))
_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def encode_text(text: str) -> bytes:
    """A string as JSON."""
    return _encoder.encode(text)


def text_template(value: Any, field: str) -> tuple[bytes, bytes]:
    """What stands before and after a text in an event, so that not every chunk need be made of objects.

    Args:
        value: the chunk, with an empty string as its only `field` of that name.
    """
    # A quote within a string is escaped in JSON, so that this can only be the field.
    place = f'"{field}":""'.encode()
    before, after = event(value).split(place)
    return before + place[:-2], after


def json_response(value: Any, status: int = 200) -> Response:
    """A reply in JSON."""
    return Response(_encoder.encode(value), status, media_type="application/json")


async def large_response(make: Callable[[], Any], parts: int) -> Response:
    """A reply in JSON of what `make` makes: in a thread if it has many parts, so that others need not wait for it."""
    if parts <= MANY_PARTS:
        return json_response(make())
    return await asyncio.to_thread(lambda: json_response(make()))


def noted(response: Response, stream: RequestStream) -> Response:
    """A whole answer, of which it is noted when it has been sent."""

    async def note() -> None:  # not one that is run in a thread
        stream.course.note_sent()

    response.background = BackgroundTask(note)
    return response


class Bodies:
    """Reads bodies, each at most `limit` bytes, and all that are being read together at most MANY times that.

    What a body is made of is bounded too, before anything is made of it: eight megabytes of empty lists would be three
    million objects, and take the event loop seconds.

    Args:
        limit: bytes.
        tokens: of the model's context: no more marks than a prompt that it holds can have are needed.
    """

    MANY = 32

    def __init__(self, limit: int, tokens: int = 0) -> None:
        self._limit = limit
        self._tokens = tokens
        self._held = 0
        self._turn = asyncio.Lock()

    async def read(self, request: Request) -> bytearray:
        """The body of a request; a longer one is refused before it has been read."""
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large()
        body, counts = bytearray(), [0] * len(_MARKS)
        try:
            async for piece in request.stream():
                body += piece
                self._held += len(piece)
                if len(body) > self._limit:
                    raise self._too_large()
                if self._held > self._limit * self.MANY:
                    raise QueueFullError("too many large requests at once; try again later", retry_after=1.0)
                self._count(piece, counts)
        finally:
            self._held -= len(body)
        return body

    @contextlib.asynccontextmanager
    async def turn(self, body: bytearray) -> AsyncIterator[None]:
        """While a body is decoded: the large ones one after the other, with room for others between them."""
        if len(body) < LARGE:
            yield
            return
        async with self._turn:
            await asyncio.sleep(0)
            yield

    def _count(self, piece: bytes, counts: list[int]) -> None:
        for i, (marks, least) in enumerate(_MARKS):
            counts[i] += sum(map(piece.count, marks))
            if counts[i] > (most := least + 2 * self._tokens):
                what = f"more than {most} of {' '.join(map(chr, marks))}"
                raise InvalidRequestError(f"the body has too many parts: {what}. Send less at once")

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the request is larger than {self._limit} bytes, the limit of this server")


@contextlib.contextmanager
def _without_collector(body: bytearray) -> Iterator[None]:
    """A large body makes many objects, all alive: the collector would look at them again and again for nothing."""
    if len(body) < LARGE or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def decode(body: bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """A body's JSON, checked for its types. Raises InvalidRequestError that names the field."""
    try:
        with _without_collector(body):
            return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise from_decoding(error, body, decoder.type) from None
    except RecursionError:
        raise from_decoding(msgspec.DecodeError("nested too deeply")) from None
    except UnicodeDecodeError as error:
        raise from_decoding(msgspec.DecodeError(f"not UTF-8: {error}")) from None


_names = msgspec.json.Decoder(dict[str, msgspec.Raw])


def other_fields(body: bytearray, struct: type[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    """Names in a body, decoded before, that the struct does not have, with their values as they were written."""
    known = known_fields(struct)
    return {name: value for name, value in decode(body, _names).items() if name not in known}


class Watch:
    """Waits for a client to go away, from the moment its body was read. Leaving `with` stops watching.

    `gone` tells whether it has; `callback`, if set, is called once when it goes.
    """

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self.callback: Callable[[], None] | None = None
        self._receive = receive
        self._task = asyncio.get_running_loop().create_task(self._wait())

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.callback = None
        self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.callback is not None:
            self.callback()


class Events(Protocol):
    """Writes an answer as server-sent events. Each method returns events, whole ones, or nothing."""

    def opening(self) -> bytes:
        """Before anything is known."""
        ...

    def news(self, increments: list[Increment]) -> bytes:
        """More of the answer. Raises EngineError if the engine gave up on it."""
        ...

    def closing(self) -> bytes:
        """After all of it."""
        ...

    def failure(self, error: Exception) -> bytes:
        """Instead of the rest."""
        ...


class EventStream(Response):
    """An answer as server-sent events, until it ends or the client goes; `stream` is closed in either case."""

    media_type = "text/event-stream"

    def __init__(self, stream: RequestStream, events: Events) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with Watch(receive) as watch:
                watch.callback = self._stream.close
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if opening := self._events.opening():
                    await send({"type": "http.response.body", "body": opening, "more_body": True})
                end = await self._forward(send) + DONE
                await send({"type": "http.response.body", "body": end, "more_body": False})
                self._stream.course.note_sent()
        except StreamClosedError:
            return  # the watch closed it: nobody is there to read on
        finally:
            self._stream.close()

    async def _forward(self, send: Send) -> bytes:
        """Sends all that the engine yields; returns what remains to be said."""
        news, course = self._events.news, self._stream.course
        deliver = cast("Callable[[Message], Coroutine[Any, Any, None]]", send)  # an async function, as they all are

        def write(increments: list[Increment]) -> Coroutine[Any, Any, None] | None:
            body = news(increments)
            if not body:
                return None
            course.note_opened()
            return deliver({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await self._stream.forward(write)
            return self._events.closing()
        except StreamClosedError:
            raise
        except Exception as error:
            return self._events.failure(error)


__all__ = [
    "DONE",
    "Bodies",
    "ClientDisconnect",
    "EventStream",
    "Events",
    "Watch",
    "decode",
    "event",
    "json_response",
    "large_response",
    "noted",
    "other_fields",
]
