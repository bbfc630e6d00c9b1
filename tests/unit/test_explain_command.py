"""`noria explain`, against a server that says what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from noria.cli.main import main

PHASES = [
    {"what": "reading", "at_ms": 0.0, "ms": 1.0},
    {"what": "waiting", "cause": "cap", "at_ms": 1.0, "ms": 80.0, "steps": 7, "batch": 64, "running": 64, "waiting": 3},
    {"what": "running", "at_ms": 81.0, "ms": 18.0, "steps": 2, "first_step": 9, "tokens": 12},
    {"what": "delivering", "at_ms": 99.0, "ms": 1.0},
]
SUMS = {
    "total_ms": 100.0,
    "before_ms": 1.0,
    "waiting_ms": 80.0,
    "waited": {"cap": 80.0},
    "ran_ms": 18.0,
    "steps": 2,
    "own_ms": 3.0,
    "others_ms": 0.0,
    "delivery_ms": 1.0,
    "lost_ms": 0.0,
}
CHOICE = {
    "index": 0,
    "ahead": 5,
    "preemptions": 2,
    "phases": PHASES,
    "sums": SUMS,
    "steps": [{"step": 9, "at_ms": 81.0, "ms": 9.0, "tokens": 11, "rows": 4, "step_tokens": 14}],
    "steps_left_out": 1,
}
ACCOUNT = {
    "id": "cmpl-a[b]",
    "state": "finished",
    "total_ms": 100.0,
    "ttft_ms": 90.0,
    "choices": [CHOICE],
    "choices_left_out": 0,
    "advice": "It waited 80 % of its time for the batch cap of 64.",
    "notes": ["an engine died"],
}
LIST = {
    "data": [
        {
            "id": "cmpl-1",
            "total_ms": 12.5,
            "ttft_ms": None,
            "prompt_tokens": 3,
            "tokens": 0,
            "choices": 1,
            "finish_reasons": [None],
        }
    ]
}


class Stub(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, Any]]] = {}
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        status, body = self.answers.get(self.path, (404, {"error": {"message": "there is no such request"}}))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("COLUMNS", "200")
    Stub.answers = {"/debug/requests/cmpl-1": (200, ACCOUNT), "/debug/requests": (200, LIST)}
    Stub.asked = []
    server = HTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def explain(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What it prints, on whichever stream."""
    with pytest.raises(SystemExit) as end:
        main(["explain", *arguments])
    assert end.value.code == status
    said = capsys.readouterr()
    return " ".join((said.err if status else said.out).split())


def test_it_tells_where_the_time_went(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = explain(capsys, "cmpl-1", "--url", url + "/v1", "--api-key", "k")
    assert Stub.asked == [("/debug/requests/cmpl-1", "Bearer k")]
    for part in (
        "cmpl-a[b] 100.0 ms, first token after 90.0 ms",
        "waiting for a place in the batch, 7 steps",
        "running: 2 steps from 9 on, 12 tokens",
        "waited 80.0 ms (for a place in the batch 80.0)",
        "in 2 steps, of which its own share 3.0 ms",
        "It waited 80 % of its time for the batch cap of 64.",
        "5 waited when it came · preempted 2 times",
        "! an engine died",
    ):
        assert part in said, said
    assert "earlier steps" not in said


def test_steps_are_shown_when_asked_for(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = explain(capsys, "cmpl-1", "--url", url, "--steps")
    assert "1 earlier steps are left out" in said
    assert "9 81.00 9.00 11 14 4" in said


def test_json_is_what_the_server_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(explain(capsys, "cmpl-1", "--url", url, "--json")) == ACCOUNT


def test_without_an_id_the_last_ones_are_listed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = explain(capsys, "--url", url)
    assert "cmpl-1 running 12.5 – 3 0 1" in said
    Stub.answers["/debug/requests"] = (200, {"data": []})
    assert "No request has been made yet" in explain(capsys, "--url", url)


def test_a_choice_and_an_id_with_odd_letters(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    explain(capsys, "a/b?c", "--choice", "3", "--url", url, status=2)
    assert Stub.asked[-1][0] == "/debug/requests/a%2Fb%3Fc?choice=3"


def test_what_goes_wrong_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such request" in explain(capsys, "nobody", "--url", url, status=2)
    Stub.answers["/debug/requests/cmpl-1"] = (401, {})
    assert "--api-key" in explain(capsys, "cmpl-1", "--url", url, status=2)
    Stub.answers["/debug/requests/cmpl-1"] = (500, b"<html>")
    assert "is no Noria server" in explain(capsys, "cmpl-1", "--url", url, status=2)
    assert "--url" in explain(capsys, "cmpl-1", "--url", "localhost:1", status=2)
    assert "no server answers" in explain(capsys, "cmpl-1", "--url", "http://127.0.0.1:1", status=2)


def test_another_server_that_answers_everything(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Stub.answers = dict.fromkeys(("/debug/requests/cmpl-1", "/debug/requests"), (200, {"status": "ok"}))
    assert "is no Noria server" in explain(capsys, "cmpl-1", "--url", url, status=2)
    assert "is no Noria server" in explain(capsys, "--url", url, status=2)
