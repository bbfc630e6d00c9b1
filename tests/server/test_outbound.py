"""The server fetches nothing for a request, whatever is in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes import serving

from noria.config import ServerOptions

URL = "http://elsewhere.example/thing"
CALLS: list[tuple[str, Any]] = []
WATCHING: list[bool] = []


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if not WATCHING:
        return
    if event == "socket.connect":
        CALLS.append((event, arguments[1]))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        CALLS.append((event, arguments[0]))


@pytest.fixture
def watch() -> Iterator[list[tuple[str, Any]]]:
    """Looks for names and connections that this process makes."""
    sys.addaudithook(note)  # stays, and does nothing more
    CALLS.clear()
    WATCHING.append(True)
    yield CALLS
    WATCHING.clear()


BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": URL}}]}]},
    {"messages": [{"role": "user", "content": f"fetch {URL}"}], "documents": [{"url": URL}]},
    {"messages": [{"role": "user", "content": "a"}], "web_search_options": {"url": URL}},
    {"messages": [{"role": "user", "content": "a"}], "chat_template": URL},
    {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": URL}}},
    },
    {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {"$schema": URL, "$ref": URL}}}],
        "tool_choice": "required",
    },
]


def test_nothing_is_fetched_for_a_request(watch: list[tuple[str, Any]]) -> None:
    options = ServerOptions(trust_request_chat_template=True)
    with serving(options=options) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        for body in BODIES:
            reply = http.post("/v1/chat/completions", json=body | {"max_tokens": 2})
            assert reply.status_code in (200, 400), reply.text
    assert any(event == "socket.connect" for event, _ in watch)  # the client's own are seen
    assert not [call for call in watch if "127.0.0.1" not in str(call[1])]
