"""Plain HTTP/1.1 over a socket, for clients that do what no library would: half a request, a byte a second."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD_LIMIT = 1 << 20  # bytes of a reply's head or of one line, before it is taken for nonsense


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; `headers` in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def head(method: str, path: str, headers: Mapping[str, object]) -> bytes:
    """The head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(path: str, body: bytes | dict[str, Any], **headers: object) -> bytes:
    """A whole request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, {"Content-Type": "application/json", "Content-Length": len(data), **headers}) + data


class Wire:
    """One connection to the server. Leaving `async with` cuts it off, whatever is on its way."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self._port = port
        self._receive_buffer = receive_buffer

    async def __aenter__(self) -> Wire:
        connection = socket.socket()
        connection.setblocking(False)
        if self._receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        except BaseException:
            connection.close()
            raise
        limit = HEAD_LIMIT if self._receive_buffer is None else 64  # asyncio must not read ahead for a slow reader
        self.reader, self.writer = await asyncio.open_connection(sock=connection, limit=limit)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Returns when the system has taken most of it."""
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> Reply:
        """The next answer, whole. Raises IncompleteReadError or ConnectionError if the server hangs up."""
        status, headers = await self.head()
        if "chunked" in headers.get("transfer-encoding", ""):
            pieces = []
            while piece := await self._chunk():
                pieces.append(piece)
            return Reply(status, headers, b"".join(pieces))
        if "content-length" in headers:
            return Reply(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        return Reply(status, headers, await self.reader.read())

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def _chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]
