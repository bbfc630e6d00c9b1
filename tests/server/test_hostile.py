"""Clients that hang up, do not read, or send what would take long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import httpx
import pytest
from fakes import ReciterCore, Running, serving, wait_until
from test_app import error_of

from noria.server.connection import Connection


def raw(server: Running, data: bytes, receive_buffer: int | None = None) -> socket.socket:
    """A connection over which that was sent."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect((host, int(port)))
    connection.sendall(data)
    return connection


def completion(**body: Any) -> bytes:
    data = json.dumps({"prompt": "a", **body}).encode()
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def test_a_client_that_leaves_others_behind_it_is_aborted() -> None:
    core = ReciterCore(pause=0.01)
    with serving(core) as server:
        connection = raw(server, completion(max_tokens=190) + completion(max_tokens=180) + completion(max_tokens=170))
        wait_until(lambda: core.rows)
        connection.close()
        wait_until(lambda: not core.rows)
        assert [submit.params.max_tokens for submit in core.submitted] == [190]
        assert len(core.aborted) == 1
        assert server.state.client.unfinished == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    made, lost = Connection.connection_made, Connection.connection_lost
    gone: list[str] = []

    def note(connection: Connection, error: Exception | None) -> None:
        gone.append(connection.scope["path"])
        lost(connection, error)

    def narrow(connection: Connection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(connection, transport)

    monkeypatch.setattr(Connection, "connection_lost", note)
    monkeypatch.setattr(Connection, "connection_made", narrow)  # or the system would take megabytes for the client
    monkeypatch.setattr("noria.server.connection.STALL_SECONDS", 0.2)
    with serving() as server:
        stalled = raw(server, completion(max_tokens=190, n=4, stream=stream, logprobs=10), receive_buffer=4096)
        wait_until(lambda: server.core.submitted)
        with httpx.Client(base_url=server.url) as http:
            assert http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}).is_success
        wait_until(lambda: "/v1/completions" in gone)
        assert server.state.client.unfinished == 0
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := stalled.recv(1 << 20):
                got += piece
        assert got.startswith(b"HTTP/1.1 200 ")
        assert not {part for part in (b'"usage":{', b"[DONE]") if part in got}  # the ends of both forms


@pytest.mark.parametrize("many", [b"[],", b'{"a":0},', b"1,", b'"":1,'])
def test_what_a_body_is_made_of_is_bounded(http: httpx.Client, many: bytes) -> None:
    for body in (b'{"prompt": [%s1]}', b'{"prompt": "a", "metadata": [%s1]}', b'{"prompt": "a", %s"b": 1}'):
        error = error_of(http.post("/v1/completions", content=body % (many * 300_000)), 400)
        assert "too many parts" in error["message"]


def test_text_that_would_take_too_long_to_encode(http: httpx.Client) -> None:
    long = "a" * ((1 << 20) + 1)
    for path, body in (("/tokenize", {}), ("/v1/completions", {"truncate_prompt_tokens": 5})):
        error = error_of(http.post(path, json={"prompt": long, **body}), 400)
        assert "1048577 characters; at most 1048576" in error["message"]
    assert http.post("/tokenize", json={"prompt": long[1:]}).json()["count"] == 1 + (1 << 20)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_its_first_token_is_aborted(path: str, stream: bool) -> None:
    core = ReciterCore(pause=0.01, seats=0)  # all wait
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps({**asked, "n": 3, "stream": stream}).encode()
    with serving(core) as server:
        connection = raw(
            server, f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        wait_until(lambda: len(core.rows) == 3)
        connection.close()
        wait_until(lambda: not core.rows)
        assert server.state.client.unfinished == 0
        page = httpx.get(f"{server.url}/metrics").text
        assert 'noria_request_accepted_total{model_name="wheel"} 3.0' in page
        assert 'noria_request_success_total{finished_reason="abort",model_name="wheel"} 3.0' in page
