from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
from fakes import wait_until

from noria.errors import EngineError, InvalidRequestError, QueueFullError
from noria.frontend import grammar, grammars
from noria.frontend.grammar import Spec
from noria.frontend.grammars import Compiler, Grammars
from noria.guidance import BYTES, make_tokenizer, vocabulary_of

# Workers that begin as the real one does and then do what their name says.
_BEGIN = """
import os, sys, time
def read():
    size = int.from_bytes(os.read(0, 4), "little")
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data))
    return data
def answer(data):
    os.write(1, len(data).to_bytes(4, "little") + data)
read()
answer(b"")
"""
SLEEPER = _BEGIN + "read(); time.sleep(600)"
DEAD = _BEGIN + "read(); os.kill(os.getpid(), 9)"


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


@pytest.fixture
def make() -> Iterator[Callable[..., Grammars]]:
    made: list[Grammars] = []

    def one(**how: Any) -> Grammars:
        made.append(Grammars(Compiler(**how)))
        return made[-1]

    yield one
    for each in made:
        each.close()


def refusal(work: Awaitable[str]) -> str:
    async def run() -> str:
        with pytest.raises(InvalidRequestError) as caught:
            await work
        assert caught.value.param == "response_format"
        return caught.value.message

    return asyncio.run(run())


def test_a_process_that_is_kept_compiles(make: Callable[..., Grammars]) -> None:
    made = make()
    assert made.compiler.pid is None

    async def run() -> None:
        first = await made.of(grammar.any_object(), "response_format")
        assert first == grammar.compile_spec(grammar.any_object(), make_tokenizer(BYTES))
        pid = made.compiler.pid
        for text in ("a+", "b+", "a+"):
            assert text in await made.of(grammar.regex(text), "structured_outputs")
        with pytest.raises(InvalidRequestError, match=r"unclosed group"):
            await made.of(grammar.regex("("), "structured_outputs")
        assert made.compiler.pid == pid

    asyncio.run(run())


def test_it_inherits_no_socket_and_ends_with_its_input(make: Callable[..., Grammars]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        made = make()
        asyncio.run(made.of(grammar.any_object(), "f"))
        pid = made.compiler.pid
        assert pid is not None
        open_files = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        assert not [name for name in open_files if name.startswith("socket:")]
        process = made.compiler._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def test_one_that_takes_too_long_costs_its_request_and_its_process(make: Callable[..., Grammars]) -> None:
    made = make(seconds=0.2, command=script(SLEEPER))
    assert "took longer than 0.2 s to compile" in refusal(made.of(grammar.any_object(), "response_format"))
    assert made.compiler.pid is None
    made.compiler._command = Compiler()._command  # the next one works
    made.compiler.seconds = 30

    async def run() -> None:
        assert await made.of(grammar.regex("a+"), "f")
        with pytest.raises(InvalidRequestError, match="took longer"):  # and is not tried again at once
            await made.of(grammar.any_object(), "response_format")

    asyncio.run(run())


def test_one_that_kills_the_process(make: Callable[..., Grammars]) -> None:
    made = make(command=script(DEAD))
    assert "could not be compiled within the memory" in refusal(made.of(grammar.any_object(), "response_format"))


def test_the_memory_of_the_process_is_bounded(make: Callable[..., Grammars]) -> None:
    body = "import sys; from noria.frontend.grammar_worker import bound; bound(int(sys.argv[2]))\n" + _BEGIN
    made = make(megabytes=300, command=script(body + "read(); held = bytearray(400 << 20); answer(held)"))
    assert "within the memory" in refusal(made.of(grammar.any_object(), "response_format"))


def test_one_that_ended_while_nobody_needed_it_is_replaced(make: Callable[..., Grammars]) -> None:
    made = make()

    async def run() -> None:
        await made.of(grammar.any_object(), "f")
        process = made.compiler._process
        assert process is not None
        process.kill()
        process.wait(10)
        assert await made.of(grammar.regex("a+"), "f")

    asyncio.run(run())


def test_a_model_without_an_end_token(make: Callable[..., Grammars]) -> None:
    made = make(vocabulary=lambda: vocabulary_of([b"a", b"b"], (), ()))
    assert "no end token" in refusal(made.of(grammar.any_object(), "response_format"))
    assert made.compiler.pid is not None


def test_a_process_that_cannot_start(make: Callable[..., Grammars]) -> None:
    made = make(command=script("raise SystemExit(3)"))
    for _ in range(2):
        with pytest.raises(EngineError, match="could not be started"):
            asyncio.run(made.of(grammar.any_object(), "f"))


class Counter(Compiler):
    """Counts what it compiles, and waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[Spec] = []
        self.go = False

    def compile(self, spec: Spec) -> grammars.Outcome:
        self.compiled.append(spec)
        wait_until(lambda: self.go)
        return grammars.Outcome(grammars.Verdict(spec.text))


def test_who_asks_for_the_same_shares_one_compilation(make: Callable[..., Grammars]) -> None:
    counter = Counter()
    made = Grammars(counter)

    async def run() -> list[str]:
        asking = [asyncio.ensure_future(made.of(grammar.regex(text), "f")) for text in "abababa"]
        await asyncio.sleep(0.01)
        asking.pop().cancel()  # whoever leaves takes nobody along
        counter.go = True
        answers = await asyncio.gather(*asking)
        answers.append(await made.of(grammar.regex("a"), "f"))
        return answers

    assert asyncio.run(run()) == [*"ababab", "a"]
    assert [spec.text for spec in counter.compiled] == ["a", "b"]
    made.close()


def test_what_waits_and_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter()
    made = Grammars(counter)
    monkeypatch.setattr(grammars, "MAX_WAITING", 2)
    monkeypatch.setattr(grammars, "_KEPT", 2)

    async def run() -> None:
        asking = [asyncio.ensure_future(made.of(grammar.regex(text), "f")) for text in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await made.of(grammar.regex("c"), "f")
        counter.go = True
        await asyncio.gather(*asking)
        for text in "cab":
            await made.of(grammar.regex(text), "f")

    asyncio.run(run())
    assert [spec.text for spec in counter.compiled] == [*"abcab"]
    assert made._size == 4
    monkeypatch.setattr(grammars, "_KEPT_CHARACTERS", 3)
    asyncio.run(made.of(grammar.regex("c"), "f"))
    assert made._size == 2
    made.close()


def test_what_nobody_waits_for_is_not_compiled() -> None:
    counter = Counter()
    made = Grammars(counter)

    async def run() -> None:
        asking = [asyncio.ensure_future(made.of(grammar.regex(text), "f")) for text in "abbc"]
        await asyncio.sleep(0.01)
        for one in asking[:3]:  # the first is being compiled by now
            one.cancel()
        await asyncio.sleep(0)
        again = asyncio.ensure_future(made.of(grammar.regex("b"), "f"))
        await asyncio.sleep(0)
        again.cancel()
        counter.go = True
        assert await asking[3] == "c"
        assert await made.of(grammar.regex("a"), "f") == "a"

    asyncio.run(run())
    assert [spec.text for spec in counter.compiled] == ["a", "c"]
    made.close()


def test_closing_ends_who_waits(make: Callable[..., Grammars]) -> None:
    made = make(seconds=60, command=script(SLEEPER))

    async def run() -> None:
        asking = asyncio.ensure_future(made.of(grammar.any_object(), "f"))
        while made.compiler.pid is None:
            await asyncio.sleep(0.005)
        made.close()
        with pytest.raises((InvalidRequestError, EngineError)):
            await asking

    asyncio.run(run())


def test_a_specification_survives_the_pipe() -> None:
    spec = grammar.schema({"type": "object"}, lenient=True, whitespace="")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=Spec) == spec
