"""The way to an engine: in a process of its own behind a Unix socket, or in this process on a thread.

Owns sockets, the engine's process and its handshake. Knows nothing of requests: it carries messages.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import msgspec

from noria.config import EngineOptions
from noria.errors import ConfigError, EngineError
from noria.messages import (
    Control,
    EngineInfo,
    FromEngine,
    Hello,
    Refused,
    StepOutputs,
    ToEngine,
    build_id,
)
from noria.wire import Frames, frame

CLOSE_TIMEOUT = 5.0  # seconds that an engine has to exit once told to
_PIECE = 1 << 16  # bytes read at a time


class Transport(Protocol):
    """What a client needs of the way to its engine. All methods belong to one event loop."""

    async def start(self) -> EngineInfo:
        """Waits until the engine is ready. Raises ConfigError if it refused, EngineError if it died."""
        ...

    def send(self, message: ToEngine) -> None:
        """Hands a message over; never blocks. Messages to a dead engine are dropped: `receive` tells."""
        ...

    async def receive(self) -> StepOutputs:
        """The next outputs. Raises EngineError once the engine is dead and all it sent was received."""
        ...

    async def close(self) -> None:
        """Stops the engine. May be called again."""
        ...

    def dump(self) -> None:
        """Asks the engine to log where its threads are, if it can."""
        ...

    def end(self) -> None:
        """Kills the engine, if it can be: `receive` tells."""
        ...


class _Line(asyncio.Protocol):
    """The connection to the engine: what came over it and has not been taken, and what shall go once it is there."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.frames: deque[bytes] = deque()
        self.lost = False
        self.transport: asyncio.Transport | None = None
        self._changed = changed
        self._cutter = Frames()
        self._early: list[bytes] = []
        self._socket: socket.socket | None = None

    async def connect(self, connection: socket.socket) -> None:
        """Takes a connection over."""
        connection.setblocking(False)
        self._socket = connection.dup()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        # No limit here: the client bounds what is in flight.
        self.transport.writelines(self._early)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        self.frames += self._cutter.feed(data)
        self._changed()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost:
            self._read_rest()
        self.lost = True
        self._changed()

    def send(self, message: bytes) -> None:
        if self.transport is None:
            self._early.append(frame(message))
        elif not self.lost:
            self.transport.write(frame(message))

    def close(self) -> None:
        self.lost = True
        if self.transport is not None:
            self.transport.abort()
        if self._socket is not None:
            self._socket.close()

    def _read_rest(self) -> None:
        """An event loop gives a connection up when it cannot write, whatever there is to be read."""
        assert self._socket is not None
        try:
            while data := self._socket.recv(_PIECE):
                self.frames += self._cutter.feed(data)
        except OSError:
            pass
        self._socket.close()


class EngineTransport:
    """An engine in a process of its own.

    The socket lies in a directory that only this user can enter. The engine is started by `spawn`, which needs no
    event loop, so that it can load its model while this process imports and binds what it needs itself.

    Args:
        options: what the engine is started with.
        command: the program, to which the socket's address is appended; the engine's own if not given.
        environment: variables set for it beside this process's.
    """

    def __init__(
        self,
        options: EngineOptions,
        command: tuple[str, ...] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._options = options
        self._environment = environment or {}
        self._command = command or (sys.executable, "-m", "noria.engine.process")
        self._directory: str | None = None
        self._listener: socket.socket | None = None
        self._line = _Line(self._wake)
        self._process: subprocess.Popen[bytes] | None = None
        self._waiter: asyncio.Future[None] | None = None  # of `start` or `receive`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead = False  # the process has ended
        self._stopped = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid if self._process else None

    def spawn(self) -> None:
        """Binds the socket and starts the process. Does nothing if it was started."""
        if self._process is not None:
            return
        self._directory = tempfile.mkdtemp(prefix="noria-")  # mode 0700
        address = f"{self._directory}/engine"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(1)
        self._listener.setblocking(False)
        # A session of its own: Ctrl-C in the terminal reaches this process only, which lets accepted requests finish.
        self._process = subprocess.Popen(
            [*self._command, address],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | self._environment,
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._encoder.encode(self._options))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; `start` reports it

    async def start(self) -> EngineInfo:
        self.spawn()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, name="noria-engine-watch", daemon=True).start()
        await self._line.connect(await self._accept())
        self.send(Hello(build_id()))
        message = await self._next()
        if isinstance(message, Refused):
            await self.close()
            raise ConfigError(_without_field(message), message.field)
        if not isinstance(message, EngineInfo):
            raise EngineError(f"the engine began with an unexpected message: {type(message).__name__}")
        if message.build_id != build_id():
            await self.close()
            raise EngineError(f"the engine is another build ({message.build_id}) than this server ({build_id()})")
        return message

    def send(self, message: ToEngine) -> None:
        if not self._dead:
            self._line.send(self._encoder.encode(message))

    async def receive(self) -> StepOutputs:
        message = await self._next()
        if isinstance(message, StepOutputs):
            return message
        if isinstance(message, Refused):
            raise EngineError(f"the engine gave up: {message.message}")
        raise EngineError("the engine sent a second greeting")

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                self.send(Control("shutdown"))
                await _ended(process, CLOSE_TIMEOUT)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                await _ended(process, CLOSE_TIMEOUT)
        self._dead = self._stopped = True
        self._line.close()
        self._wake()
        self.kill()

    def dump(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def kill(self) -> None:
        """Ends the engine without asking it and removes the socket's directory. Needs no event loop."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(CLOSE_TIMEOUT)
        if self._listener is not None:
            self._listener.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _accept(self) -> socket.socket:
        """The engine's connection, be it that of one that is dead by now."""
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        number = listener.fileno()  # `close` may close it meanwhile
        while not self._stopped:
            try:
                return listener.accept()[0]
            except BlockingIOError:
                if self._dead:
                    raise self._death() from None
            loop.add_reader(number, self._wake)
            try:
                await self._changed()
            finally:
                loop.remove_reader(number)
        raise EngineError("the engine was stopped")

    async def _next(self) -> FromEngine:
        """The next message; those that the engine sent before it died come first."""
        while not self._line.frames:
            if self._stopped:
                raise EngineError("the engine was stopped")
            if self._dead and self._line.lost:
                raise self._death()
            await self._changed()
        return self._decoder.decode(self._line.frames.popleft())

    async def _changed(self) -> None:
        """Sleeps until something has happened."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _watch(self) -> None:
        process, loop = self._process, self._loop
        if process is None or loop is None:
            return
        process.wait()
        try:
            loop.call_soon_threadsafe(self._died)
        except RuntimeError:
            pass  # the loop is closed

    def _died(self) -> None:
        self._dead = True
        self._wake()

    def _death(self) -> EngineError:
        code = self._process.poll() if self._process else None
        if code is not None and code < 0:
            try:
                how = f"killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"killed by signal {-code}"
        else:
            how = f"exit code {code}"
        return EngineError(f"the engine process died ({how})")


def _without_field(message: Refused) -> str:
    """ConfigError puts the field before its message itself."""
    return message.message.removeprefix(f"{message.field}: ") if message.field else message.message


async def _ended(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Waits for a process without blocking the loop, for at most `timeout` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout
    while process.poll() is None and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)


class Core(Protocol):
    """What the in-process transport needs of an engine core."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def idle_seconds(self) -> float: ...

    def handle(self, message: ToEngine, /) -> None: ...

    def step(self) -> StepOutputs | None: ...


class InProcessTransport:
    """An engine in this process, stepping on a thread of its own, which also makes it.

    Args:
        make_core: makes the core; runs on the engine's thread.
        on_close: called on that thread when the engine stops (to close an executor).
    """

    def __init__(self, make_core: Callable[[], Core], on_close: Callable[[], None] | None = None) -> None:
        self._make_core = make_core
        self._on_close = on_close
        self._inbox: deque[ToEngine] = deque()
        self._bell = threading.Condition()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._outbox: asyncio.Queue[StepOutputs | Exception] | None = None
        self._error: Exception | None = None

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._outbox = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, args=(loop, ready), name="noria-engine", daemon=True)
        self._thread.start()
        return await ready

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Hello):
            return
        with self._bell:
            self._inbox.append(message)
            self._bell.notify()

    async def receive(self) -> StepOutputs:
        if self._error is not None:
            raise self._error
        assert self._outbox is not None, "start() first"
        message = await self._outbox.get()
        if isinstance(message, Exception):
            self._error = EngineError(f"the engine failed: {message}")
            raise self._error from message
        return message

    async def close(self) -> None:
        with self._bell:
            self._stop = True
            self._bell.notify()
        thread, self._thread = self._thread, None
        if thread is not None:
            # Not in an executor: while the interpreter exits, none takes work any more.
            deadline = time.monotonic() + CLOSE_TIMEOUT
            while thread.is_alive() and time.monotonic() < deadline:
                await asyncio.sleep(0.005)

    def dump(self) -> None:
        """Whoever waits for it is in this process and can see for himself."""

    def end(self) -> None:
        """A thread cannot be killed."""

    def _run(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[EngineInfo]) -> None:
        assert self._outbox is not None
        try:
            core = self._make_core()
        except Exception as error:
            _call(loop, _set_exception, ready, error)
            return
        _call(loop, _set_result, ready, core.info)
        try:
            while self._turn(core):
                outputs = core.step() if core.has_work else None
                if outputs is not None:
                    _call(loop, self._outbox.put_nowait, outputs)
        except Exception as error:  # the reader gets it; this thread has nobody to tell
            _call(loop, self._outbox.put_nowait, error)
        finally:
            if self._on_close is not None:
                self._on_close()

    def _turn(self, core: Core) -> bool:
        """Sleeps until there is something to do and hands over what has come. False: stop."""
        with self._bell:
            while not (self._inbox or self._stop):
                pause = core.idle_seconds if core.has_work else None  # a static batch may be filling
                if pause is not None and pause <= 0:
                    break
                self._bell.wait(pause)
            if self._stop:
                return False
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            core.handle(message)
        return True


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Runs a function on the loop; nothing if it is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        pass


def _set_result(future: asyncio.Future[EngineInfo], value: EngineInfo) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[EngineInfo], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
