"""What a client may do with a connection: heads, bodies that come slowly, and how many connections there are."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes import Running, serving, wait_until

from noria.server.connection import MOST_AHEAD, MOST_HEADERS, Connection, Limits, unread_seconds


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(Connection, "limits", Limits(connections=5, header_bytes=4096, seconds=0.3))
    with serving() as server:
        yield server


def dial(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def say(server: Running, text: str) -> bytes:
    """Sends it and reads until the server closes."""
    with dial(server) as raw:
        with contextlib.suppress(OSError):  # it may have closed while more was on its way
            raw.sendall(text.encode())
        return read(raw)


def read(raw: socket.socket) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(1 << 16):
            got += piece
    return got


def error(reply: bytes, status: int) -> str:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), reply[:200]
    assert b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    message: str = json.loads(body)["error"]["message"]
    return message


GET = "GET /health HTTP/1.1\r\nhost: x\r\n"


class Told:
    """A transport whose socket tells what a test says."""

    def __init__(self, milliseconds: int, family: int = socket.AF_INET, length: int = 56) -> None:
        self.family = family
        self._told = (bytes(52) + milliseconds.to_bytes(4, sys.byteorder))[:length]

    def get_extra_info(self, name: str) -> Told:
        assert name == "socket"
        return self

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self._told[:length]


def test_what_lay_unread_is_part_of_a_requests_time() -> None:
    told: Any = Told(2504)
    assert unread_seconds(told) == (2.5 if sys.platform == "linux" else 0.0)  # others do not tell
    for nothing in (Told(3), Told(2504, family=socket.AF_UNIX), Told(2504, length=52)):
        told = nothing
        assert unread_seconds(told) == 0.0
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        client.sendall(b"x")
        told = SimpleNamespace(get_extra_info=lambda name: accepted)
        assert accepted.recv(1) == b"x"
        assert unread_seconds(told) >= 0.0
        accepted.close()
        assert unread_seconds(told) == 0.0


def test_heads_within_the_limits_are_served(limits: Running) -> None:
    headers = "".join(f"x-{number}: {'y' * 20}\r\n" for number in range(MOST_HEADERS - 2))
    assert say(limits, f"{GET}{headers}connection: close\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (GET + "x: y\r\n" * MOST_HEADERS + "\r\n", 431, f"more than {MOST_HEADERS} headers"),
        (GET + f"x: {'y' * 5000}\r\n\r\n", 431, "larger than 4096 bytes"),
        (GET + f"x: {'y' * 3000}\r\nz: {'y' * 3000}\r\n\r\n", 431, "larger than 4096 bytes"),
        (GET + f"x: {'y' * 200_000}", 431, "larger than 4096 bytes"),
        (GET + "y" * 200_000, 431, "larger than 4096 bytes"),
        (f"GET /{'y' * 9000} HTTP/1.1\r\nhost: x\r\n\r\n", 414, "path is longer than 8192 bytes"),
        ("\0\1\2\3 nonsense\r\n\r\n", 400, "not a valid HTTP request"),
        ("GET /health HTTP/9.9\r\n\r\n", 400, "not a valid HTTP request"),
        (GET, 408, "the head of a request"),
        ("", 408, "the head of a request"),
        ("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{", 408, "of its body"),
    ],
)
def test_other_heads_are_refused_in_json(limits: Running, text: str, status: int, message: str) -> None:
    assert message in error(say(limits, text), status)
    wait_until(lambda: limits.state.client.unfinished == 0)


def test_what_stands_behind_a_body_is_limited_too(limits: Running) -> None:
    head = "POST /v1/nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for rest in ("0\r\n" + "x: y\r\n" * 200_000, "0\r\nx: " + "y" * 300_000, "1;" + "y" * 300_000):
        with dial(limits) as raw:
            with contextlib.suppress(OSError):
                for at in range(0, len(head + rest), 1000):
                    raw.sendall((head + rest)[at : at + 1000].encode())
            read(raw)  # ends: the server has closed it


def test_a_body_that_comes_steadily_is_waited_for(limits: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2, "stop": "x" * 50_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with dial(limits) as raw:
        raw.sendall(head.encode())
        for at in range(0, len(body), 10_000):
            raw.sendall(body[at : at + 10_000])
            with contextlib.suppress(TimeoutError):
                raw.settimeout(0.1)
                raw.recv(1, socket.MSG_PEEK)
        raw.settimeout(10)
        assert read(raw).startswith(b"HTTP/1.1 400 ")  # the stop string is too long: the body was read


@pytest.mark.parametrize("pieces", [1, 20])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_head_that_asks_for_another_protocol_is_served_as_it_is(limits: Running, pieces: int, chunked: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    if chunked:
        body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    upgrade = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    data = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{upgrade}{framing}\r\n\r\n".encode() + body
    with dial(limits) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = -(-len(data) // pieces)
        for at in range(0, len(data), size):
            raw.sendall(data[at : at + size])
            time.sleep(0.002)
        reply = read(raw)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b'"text":"Wat"' in reply
    assert say(limits, f"{GET}{upgrade}\r\n").startswith(b"HTTP/1.1 200 ")
    wrong = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{upgrade}transfer-encoding: chunked\r\n\r\nzz\r\n"
    assert "not a valid HTTP request" in error(say(limits, wrong), 400)


def test_the_rest_of_a_body_that_was_refused_is_not_read_for_ever(limits: Running) -> None:
    head = "POST /v1/nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    piece = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    closed = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                raw.sendall(piece)
        closed.set()

    with dial(limits) as raw:
        raw.sendall(head.encode())
        threading.Thread(target=send, daemon=True).start()
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        assert closed.wait(10)


def test_what_is_left_of_a_body_that_was_refused_may_come(limits: Running) -> None:
    body = b"x" * 100_000
    head = f"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with dial(limits) as raw:
        raw.sendall(head.encode() + body[:1])
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        raw.sendall(body[1:] + f"{GET}connection: close\r\n\r\n".encode())
        assert b"HTTP/1.1 200 " in read(raw)


def test_requests_sent_ahead_are_answered_in_turn_and_bounded(limits: Running) -> None:
    limits.core.pause = 0.02
    body = json.dumps({"prompt": "a", "max_tokens": 10}).encode()
    first = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    ahead = f"{GET}\r\n".encode()
    with dial(limits) as raw:
        raw.sendall(first + ahead * (MOST_AHEAD - 1) + f"{GET}connection: close\r\n\r\n".encode())
        assert read(raw).count(b"HTTP/1.1 200 ") == MOST_AHEAD + 1
    with dial(limits) as raw:
        raw.sendall(first + ahead * 10_000)
        assert "sent ahead" in error(read(raw), 400)
    wait_until(lambda: limits.state.client.unfinished == 0)


def test_a_client_that_leaves_with_more_behind_it_is_noticed(limits: Running) -> None:
    limits.core.pause = 0.05
    body = json.dumps({"prompt": "a", "max_tokens": 190}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with dial(limits) as raw:
        raw.sendall(head.encode() + body + f"{GET}\r\n".encode())
        wait_until(lambda: limits.core.rows)
        raw.sendall(f"{GET}\r\n".encode())
    wait_until(lambda: not limits.core.rows)


def test_a_connection_that_is_gone_leaves_no_timer(limits: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    lost = Connection.connection_lost

    def note(connection: Connection, error: Exception | None) -> None:
        lost(connection, error)
        left.append(connection.timeout_keep_alive_task)

    monkeypatch.setattr(Connection, "connection_lost", note)
    raw = dial(limits)
    raw.sendall(f"{GET}\r\n".encode())
    assert raw.recv(100).startswith(b"HTTP/1.1 200 ")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()  # with a reset
    wait_until(lambda: left)
    assert left == [None]


def test_an_answer_may_take_longer_than_a_head(limits: Running) -> None:
    limits.core.pause = 0.03
    reply = httpx.post(f"{limits.url}/v1/completions", json={"prompt": "a", "max_tokens": 30}, timeout=20)
    assert reply.status_code == 200


def test_connections_beyond_the_limit_are_told_so(limits: Running) -> None:
    held = [dial(limits) for _ in range(5)]
    try:
        assert "too many connections" in error(say(limits, GET + "\r\n"), 503)
    finally:
        for one in held:
            one.close()
    wait_until(lambda: say(limits, GET + "connection: close\r\n\r\n").startswith(b"HTTP/1.1 200 "))
