"""`noria chat`: the conversation, and its two kinds of partner."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from fakes import Running, recited

from noria.cli.chat import Conversation, Server
from noria.errors import NoriaError, RequestError


class Echo:
    """Answers with what it was told."""

    name = "echo"

    def __init__(self) -> None:
        self.heard: list[list[dict[str, str]]] = []
        self.fail: BaseException | None = None

    def answer(self, messages: list[dict[str, str]]) -> Iterator[tuple[str, int]]:
        self.heard.append(list(messages))
        yield "you said ", 2
        if self.fail is not None:
            raise self.fail
        yield messages[-1]["content"], 1

    def close(self) -> None:
        pass


def converse(monkeypatch: pytest.MonkeyPatch, partner: Echo, text: str, system: str | None = None) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    Conversation(partner, system).run()


def test_history_and_system(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    converse(
        monkeypatch,
        echo,
        "one\n\n/system be brief\ntwo \\\nlines\n/clear\n/system\nthree\n/retry\n/quit\nfour\n",
        "sys",
    )
    system = {"role": "system", "content": "sys"}
    one = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "you said one"}]
    assert echo.heard == [
        [system, one[0]],
        [{"role": "system", "content": "be brief"}, *one, {"role": "user", "content": "two \nlines"}],
        [{"role": "user", "content": "three"}],
        [{"role": "user", "content": "three"}],
    ]
    assert "you said one\n" in capsys.readouterr().out


def test_help_and_unknown_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    converse(monkeypatch, echo, "/help\n/nothing\n/retry\n")
    out = capsys.readouterr().out
    assert "/system TEXT" in out
    assert "There is no /nothing" in out
    assert "nothing to answer" in out
    assert not echo.heard


def test_an_interrupted_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    echo.fail = KeyboardInterrupt()
    converse(monkeypatch, echo, "one\ntwo\n")
    assert echo.heard[1][1] == {"role": "assistant", "content": "you said "}


def test_an_error_takes_the_message_back(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    echo.fail = NoriaError("the context is full")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, size: int = -1, /) -> str:
            if echo.heard:
                echo.fail = None
            return super().readline(size)

    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal("one\ntwo\n"))
    monkeypatch.setattr("sys.stdout", shown)
    Conversation(echo, None).run()
    assert "the context is full" in shown.getvalue()
    assert "you said two\n" in shown.getvalue()
    assert echo.heard[1] == [{"role": "user", "content": "two"}]


def test_a_script_does_not_take_an_error_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = Echo()
    echo.fail = NoriaError("the context is full")
    with pytest.raises(NoriaError, match="the context is full"):
        converse(monkeypatch, echo, "one\ntwo\n")
    assert "the context is full" not in capsys.readouterr().out


def test_a_server_as_partner(running: Running) -> None:
    partner = Server(running.url, None, None, {"max_tokens": 12, "temperature": 0.5})
    assert partner.name == "wheel"
    pieces = list(partner.answer([{"role": "user", "content": "hello"}]))
    assert "".join(text for text, _ in pieces) == recited(12)
    assert sum(count for _, count in pieces) == 12
    assert running.core.submitted[-1].params.temperature == 0.5
    with pytest.raises(RequestError, match="this template will not say that"):
        list(partner.answer([{"role": "user", "content": "unspeakable"}]))
    partner.close()
    mill = Server(f"{running.url}/v1/", None, "mill", {})
    with pytest.raises(RequestError, match="'mill' is not served here"):
        list(mill.answer([{"role": "user", "content": "hello"}]))
    mill.close()
