"""The load generator's HTTP side: one streaming completion per call, as lean as it can be, because on most machines it
shares the processor with the server that it measures. What a stream brings is put away with the time at which it came,
and read once the answer has ended. Speaks to any OpenAI-compatible server over HTTP/1.1."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from noria.bench.workloads import BenchRequest
from noria.errors import ConfigError


@dataclass(slots=True)
class Record:
    """What one request experienced. Times are seconds on `time.perf_counter`'s clock.

    `start`: before it connects; `sent`: when it has, and hands its request over; `chunks`: arrival of each piece of
    output; `output_tokens`: as the server's usage says; `id`: of the reply.
    """

    start: float
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    id: str = ""
    sent: float = 0.0

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with a single token."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)
_LAST_CHUNK = b"0\r\n\r\n"  # ends a chunked body
_MOST_PIECES = 4096  # put away before they are read, so that an endless answer is not kept whole


@dataclass(frozen=True, slots=True)
class Target:
    """A server: `url` is its base, with or without /v1. `ignore_eos` is sent so that lengths are exact; servers that
    do not know the field ignore it."""

    url: str
    model: str
    api_key: str | None = None
    chat: bool = False
    timeout: float = 600.0

    def request(self, item: BenchRequest) -> bytes:
        """The HTTP request for one item."""
        parts = urlsplit(self.url)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": item.prompt}]
        else:
            body["prompt"] = item.prompt
        content = msgspec.json.encode(body)
        path = parts.path.rstrip("/").removesuffix("/v1") + ("/v1/chat/completions" if self.chat else "/v1/completions")
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n{key}\r\n"
        )
        return head.encode() + content

    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"must look like http://HOST:PORT, got {self.url!r}", "--url")
        return parts.hostname, parts.port or 80


class _Exchange(asyncio.Protocol):
    """One request and its streamed response."""

    def __init__(self, payload: bytes, record: Record, done: asyncio.Future[None]) -> None:
        self._payload = payload
        self._record = record
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[tuple[float, bytes]] = []  # when they came, and what
        self._streaming = False  # a chunked answer: its end can be told without parsing
        self._rest = b""
        self._now = 0.0  # when the piece came that is being read
        self._finished = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._record.sent = time.perf_counter()
        self._transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        pieces = self._pieces
        pieces.append((time.perf_counter(), data))
        # A piece shorter than the last chunk may be the end of it.
        ended = data.endswith(_LAST_CHUNK) or len(data) < len(_LAST_CHUNK)
        if ended or not self._streaming or len(pieces) >= _MOST_PIECES:
            self._read()

    def _read(self) -> None:
        """Parses what has been put away."""
        pieces, self._pieces = self._pieces, []
        try:
            for self._now, data in pieces:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._read()
        self._now = time.perf_counter()
        self._end(None if self._finished else f"connection closed early ({exc or 'no reason given'})")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"transfer-encoding" and value.lower() == b"chunked":
            self._streaming = self._parser.get_status_code() == 200

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self._finished = True
        status = self._parser.get_status_code()
        self._end(None if status == 200 else f"HTTP {status}: {self._rest[:300].decode(errors='replace')}")

    def _event(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            return
        try:
            chunk = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            self._record.error = f"not a completion chunk: {error}"
            return
        if chunk.error:
            self._record.error = str(chunk.error)
        self._record.id = self._record.id or chunk.id
        if any(
            choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning))
            for choice in chunk.choices
        ):
            self._record.chunks.append(self._now)
        if chunk.usage:
            self._record.prompt_tokens = chunk.usage.prompt_tokens
            self._record.output_tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details:
                self._record.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens

    def _end(self, error: str | None) -> None:
        if self._done.done():
            return
        self._record.end = self._now
        if error and not self._record.error:
            self._record.error = error
        if not self._record.error and not self._record.chunks:
            # Every token may be invisible (a control token): the answer's end is the first sign of it.
            self._record.chunks.append(self._record.end)
        self._done.set_result(None)
        if self._transport:
            self._transport.close()


async def ask(target: Target, item: BenchRequest) -> Record:
    """Sends one request and follows its stream to the end. Errors are in the record, never raised."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    host, port = target.address()
    payload = target.request(item)
    record = Record(start=time.perf_counter())
    try:
        transport, _ = await loop.create_connection(lambda: _Exchange(payload, record, done), host, port)
    except OSError as error:
        record.error = f"cannot connect to {target.url}: {error.strerror or error}"
        record.end = time.perf_counter()
        return record
    try:
        await asyncio.wait_for(done, target.timeout)
    except asyncio.TimeoutError:
        record.error = f"no end within {target.timeout:g} s"
        record.end = time.perf_counter()
    finally:
        transport.close()
    return record
