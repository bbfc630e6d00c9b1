"""The way to an engine process, with small programs in its place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from fakes import ReciterCore

from noria.config import engine_options
from noria.errors import ConfigError, EngineError
from noria.frontend.transport import EngineTransport, InProcessTransport
from noria.messages import Abort, Control, Submit
from noria.params import SamplingParams

PREAMBLE = """
import msgspec, os, socket, sys
from noria.config import EngineOptions
from noria.messages import *
from noria.wire import Frames, frame
options = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineOptions)
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
frames, heard = Frames(), []
say = lambda message: line.sendall(frame(msgspec.msgpack.encode(message)))
def hear():
    while not heard:
        heard.extend(frames.feed(line.recv(9999)))
    return msgspec.msgpack.decode(heard.pop(0), type=ToEngine)
def ready(build=build_id()):
    say(EngineInfo(build_id=build, max_model_len=10, vocab_size=10, num_blocks=1, block_size=16, max_num_seqs=1,
        max_num_batched_tokens=1, backend=options.model.model, isa="", threads=1, weights="", cache_dtype="",
        weight_bytes=0, cache_bytes=0))
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a transport whose engine is the given program."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def make(program: str) -> EngineTransport:
        path = tmp_path / "engine.py"
        path.write_text(PREAMBLE + textwrap.dedent(program))
        return EngineTransport(engine_options("some-model"), (sys.executable, str(path)))

    return make


def test_greeting_outputs_and_shutdown(engine, tmp_path: Path) -> None:
    async def main() -> None:
        transport = engine(
            """
            assert hear() == Hello(build_id())
            ready()
            asked = hear()
            say(StepOutputs(step=asked.request_id))
            assert hear() == Control("shutdown")
            open(os.path.dirname(__file__) + "/asked to stop", "w").close()
            """
        )
        info = await transport.start()
        assert info.backend == "some-model"
        (folder,) = tmp_path.glob("noria-*")
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        transport.send(Submit(request_id=42, prompt_ids=b"", params=SamplingParams()))
        assert (await transport.receive()).step == 42
        await transport.close()
        await transport.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert (tmp_path / "asked to stop").exists()
    assert not list(tmp_path.glob("noria-*"))


def test_a_refusal_names_its_field_once(engine, tmp_path: Path) -> None:
    async def main() -> None:
        transport = engine('hear(); say(Refused("--num-blocks: too many", "--num-blocks"))')
        with pytest.raises(ConfigError) as raised:
            await transport.start()
        assert str(raised.value) == "--num-blocks: too many"
        assert raised.value.field == "--num-blocks"

    asyncio.run(asyncio.wait_for(main(), 20))
    assert not list(tmp_path.glob("noria-*"))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_refusal_is_heard_from_an_engine_that_is_gone(engine, run: Callable[..., Any]) -> None:
    async def main() -> None:
        transport = engine('say(Refused("no such model"))')
        transport.spawn()
        assert transport.pid is not None
        os.waitid(os.P_PID, transport.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ConfigError, match="no such model"):
            await transport.start()
        await transport.close()

    run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_engine_that_says_nothing_can_be_closed_while_it_starts(
    engine, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    monkeypatch.setattr("noria.frontend.transport.CLOSE_TIMEOUT", 0.2)

    async def main() -> None:
        transport = engine("")
        transport._command = (sys.executable, "-c", "import time; time.sleep(60)")  # never connects
        starting = asyncio.create_task(transport.start())
        await asyncio.sleep(0.05)
        await transport.close()
        with pytest.raises(EngineError):
            await starting

    run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    ("program", "message"),
    [("sys.exit(3)", "exit code 3"), ('hear(); ready("another")', "another build"), ("os.abort()", "SIGABRT")],
)
def test_an_engine_that_cannot_start(engine, program: str, message: str) -> None:
    async def main() -> None:
        transport = engine(program)
        with pytest.raises(EngineError, match=message):
            await transport.start()
        await transport.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_a_dying_engine_said_is_heard_first(engine) -> None:
    async def main() -> None:
        transport = engine(
            """
            hear(); ready()
            for step in range(3):
                say(StepOutputs(step=step))
            import time; time.sleep(0.2)
            os.kill(os.getpid(), 9)
            """
        )
        await transport.start()
        await asyncio.sleep(0.1)
        assert [(await transport.receive()).step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            await asyncio.wait_for(transport.receive(), 5)
        with pytest.raises(EngineError):
            await transport.receive()
        transport.send(Abort((1,)))
        await transport.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_an_engine_said_is_heard_though_it_hears_nothing_any_more(engine, run: Callable[..., Any]) -> None:
    async def main() -> None:
        transport = engine(
            """
            hear(); ready(); hear()
            for step in range(3):
                say(StepOutputs(step=step))
            """
        )
        await transport.start()
        transport.send(Abort((1,)))
        with contextlib.suppress(ChildProcessError):  # its end may be noted already, by a thread
            os.waitid(os.P_PID, transport.pid, os.WEXITED | os.WNOWAIT)  # the event loop reads nothing meanwhile
        transport.send(Abort((1,)))
        assert [(await transport.receive()).step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(EngineError, match="exit code 0"):
            await transport.receive()
        await transport.close()

    run(asyncio.wait_for(main(), 20))


def test_an_engine_that_does_not_stop_is_killed(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.frontend.transport.CLOSE_TIMEOUT", 0.2)

    async def main() -> None:
        transport = engine("hear(); ready()\nimport time; time.sleep(60)")
        await transport.start()
        pid = transport.pid
        assert pid is not None
        await transport.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_in_process_failures_reach_the_caller() -> None:
    def fail() -> ReciterCore:
        raise ConfigError("cannot be", "--threads")

    async def main() -> None:
        transport = InProcessTransport(fail)
        with pytest.raises(ConfigError, match="--threads: cannot be"):
            await transport.start()
        await transport.close()

        closed: list[bool] = []
        core = ReciterCore()
        transport = InProcessTransport(lambda: core, lambda: closed.append(True))
        await transport.start()
        transport.send(Control("stats"))
        assert (await transport.receive()).stats.total_blocks == 100
        core.broken = True
        transport.send(Control("stats"))
        for _ in range(2):
            with pytest.raises(EngineError, match="the wheel broke"):
                await transport.receive()
        await transport.close()
        assert closed == [True]

    asyncio.run(asyncio.wait_for(main(), 20))
