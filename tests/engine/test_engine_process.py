"""The engine process: start, handshake, refusal, death, and what it costs when idle."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from helpers.engine_driver import Driver, submit
from helpers.fake_executor import alone
from noria.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from noria.engine import process
from noria.messages import Abort, Control, EngineInfo, FromEngine, Hello, Refused, build_id
from noria.params import SamplingParams
from noria.wire import Frames, frame

ENTRY = Path(__file__).parent.parent / "helpers" / "fake_engine.py"
PATH = {"PYTHONPATH": str(Path(__file__).parent.parent.parent / "src")}
PROMPT = list(range(20))
# Gives an engine its options, in a program of its own.
OPTIONS = """
import msgspec
from noria.config import CacheOptions, EngineOptions, ModelOptions
options = EngineOptions(model=ModelOptions(model="fake"), cache=CacheOptions(block_size=16))
engine.stdin.write(msgspec.msgpack.encode(options))
engine.stdin.close()
"""


class Engine:
    """The API process's end."""

    def __init__(self, folder, model="fake", **scheduling) -> None:
        address = f"{folder}/engine"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(20)
        options = EngineOptions(
            model=ModelOptions(model=model),
            cache=CacheOptions(block_size=16),
            scheduler=SchedulerOptions(max_num_seqs=4, **scheduling),
        )
        self.process = subprocess.Popen(
            [sys.executable, str(ENTRY), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=False,
            env=os.environ | PATH,
        )
        self.process.stdin.write(msgspec.msgpack.encode(options))
        self.process.stdin.close()
        self.decoder = msgspec.msgpack.Decoder(FromEngine)
        self.frames, self.heard = Frames(), []
        with listener:
            self.socket, _ = listener.accept()

    def receive(self, seconds=20.0):
        self.socket.settimeout(seconds)
        while not self.heard:
            data = self.socket.recv(9999)
            assert data, f"nothing more will come; the engine's status is {self.process.wait()}"
            self.heard += self.frames.feed(data)
        return self.decoder.decode(self.heard.pop(0))

    def send(self, message) -> None:
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, data) -> None:
        self.socket.sendall(frame(data))

    def tokens_until_end(self, request_id) -> list[int]:
        tokens = []
        while True:
            outputs = self.receive()
            if request_id in np.frombuffer(outputs.request_ids, "<i8").tolist():
                row = np.frombuffer(outputs.request_ids, "<i8").tolist().index(request_id)
                tokens.append(int(np.frombuffer(outputs.tokens, "<i4")[row]))
            if any(end.request_id == request_id for end in outputs.finished):
                return tokens

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()
        self.socket.close()


@pytest.fixture
def start(tmp_path):
    engines = []

    def make(*args, **more) -> Engine:
        engines.append(Engine(tmp_path, *args, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_it_introduces_itself_answers_and_stops_when_told(start, depth):
    engine = start(in_flight_depth=depth)
    info = engine.receive()
    assert isinstance(info, EngineInfo)
    assert info.build_id == build_id()
    engine.send(Hello(build_id()))
    engine.send(submit(1, PROMPT, max_tokens=9))
    assert engine.tokens_until_end(1) == alone(PROMPT, SamplingParams(max_tokens=9, seed=0), (), 0, 1024)[0]
    engine.send(Control("shutdown"))
    assert engine.process.wait(10) == 0
    assert engine.process.stdout.read() == b"closed\n"


@pytest.mark.parametrize(
    ("model", "message", "field"),
    [("refused", "MODEL: no such model", "MODEL"), ("damaged", "the file is damaged", None)],
)
def test_what_cannot_start_says_why_in_a_line(start, model, message, field):
    engine = start(model)
    assert engine.receive() == Refused(message, field)
    assert engine.process.wait(10) == 1
    assert b"Traceback" not in engine.process.stderr.read()


def test_a_client_of_another_build_is_refused(start):
    engine = start()
    engine.receive()
    engine.send(Hello("another"))
    refused = engine.receive()
    assert isinstance(refused, Refused)
    assert "another" in refused.message
    assert engine.process.wait(10) == 1


def test_signals_to_the_group_are_not_its_business(start):
    engine = start()
    engine.receive()
    for sign in (signal.SIGINT, signal.SIGTERM):
        engine.process.send_signal(sign)
    time.sleep(0.2)
    assert engine.process.poll() is None
    engine.send(Control("shutdown"))
    assert engine.process.wait(10) == 0


def test_a_failed_step_ends_the_process(start):
    engine = start("crash")
    engine.receive()
    engine.send(submit(1, PROMPT, max_tokens=10))
    for _ in range(2):
        engine.receive()
    assert engine.process.wait(10) == 1
    assert b"the device caught fire" in engine.process.stderr.read()


def test_messages_that_cannot_be_read_take_nobody_along(start):
    engine = start("slow")
    engine.receive()
    engine.send(submit(1, PROMPT, max_tokens=4))
    engine.send_bytes(b"\xc1 nonsense")
    engine.send_bytes(msgspec.msgpack.encode(["unknown", 1]))
    assert len(engine.tokens_until_end(1)) == 4


def test_aborts_are_heard_during_a_long_answer(start):
    engine = start("slow")
    engine.receive()
    engine.send(submit(1, PROMPT, max_tokens=900))
    engine.receive()
    engine.send(Abort((1,)))
    for _ in range(3):
        stats = engine.receive(2).stats
        if stats.running == 0:
            break
    assert (stats.running, stats.held_blocks) == (0, 0)


def test_idle_it_costs_no_cpu(start):
    engine = start()
    engine.receive()
    engine.send(submit(1, PROMPT, max_tokens=4))
    engine.tokens_until_end(1)
    time.sleep(0.2)
    observed = psutil.Process(engine.process.pid)
    before = observed.cpu_times()
    time.sleep(1.0)
    after = observed.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.02


class Mailbox:
    """In the place of sockets."""

    def __init__(self):
        self.inbox = queue.SimpleQueue()
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def receive(self, wait):
        messages = []
        try:
            if wait != 0:
                messages.append(self.inbox.get(timeout=wait))
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return messages


@pytest.mark.parametrize("damaged", [False, True])
def test_when_idle_it_checks_that_every_block_is_accounted_for(damaged, monkeypatch, caplog):
    monkeypatch.setattr(process, "_CHECK_AFTER_SECONDS", 0.05)
    driver, mailbox = Driver(), Mailbox()
    if damaged:
        driver.core._manager.pool.allocate(1)
    mailbox.inbox.put(submit(1, PROMPT))
    threading.Timer(0.5, mailbox.inbox.put, [Control("shutdown")]).start()
    process.run(driver.core, mailbox)
    assert mailbox.sent[-1].finished
    assert ["cache check failed" in record.getMessage() for record in caplog.records] == [True] * damaged


def test_a_static_batch_that_fills_is_waited_for_without_turning(monkeypatch):
    driver, mailbox = Driver(continuous=False, static_timeout=0.3), Mailbox()
    steps = []
    monkeypatch.setattr(driver.core, "step", lambda turn=driver.core.step: steps.append(1) or turn())
    mailbox.inbox.put(submit(1, PROMPT, max_tokens=2))
    threading.Timer(0.6, mailbox.inbox.put, [Control("shutdown")]).start()
    process.run(driver.core, mailbox)
    assert mailbox.sent[-1].finished
    assert len(steps) <= 4


@pytest.mark.parametrize("how", ["signal", "socket"])
def test_it_dies_with_its_parent(tmp_path, how):
    """By the system's signal, and where there is none by the end of the socket."""
    without = "" if how == "signal" else "sys.platform = 'other';"
    program = f"""
import socket, subprocess, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind("{tmp_path}/engine")
listener.listen(1)
run = "import runpy, sys; {without} runpy.run_path(sys.argv.pop(1), run_name='__main__')"
engine = subprocess.Popen([sys.executable, "-c", run, {str(ENTRY)!r}, "{tmp_path}/engine"], stdin=subprocess.PIPE)
{OPTIONS}
line, _ = listener.accept()
line.recv(1)
print(engine.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | PATH)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlives its parent"
        time.sleep(0.02)


def test_it_starts_quickly_because_it_imports_little():
    program = "import sys, noria.engine.process; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | PATH
    ).stdout.split()
    assert not {"starlette", "uvicorn", "httpx", "typer", "rich", "tokenizers", "jinja2", "torch", "llguidance"} & set(
        loaded
    )
