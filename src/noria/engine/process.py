"""The engine process: `python -m noria.engine.process ADDRESS`, with EngineOptions as msgpack on standard input.

The main thread is the step loop. A socket thread beside it receives into an inbox and sends from an outbox, so that a
long step never keeps a message waiting; idle, the main thread sleeps on the inbox and costs no CPU.

The first message sent is EngineInfo or Refused. It ends when told to (`shutdown`), when drained (`drain`, SIGTERM), or
with its parent. The parent must start it from a thread that lives as long as it shall: the kernel's signal at the
parent's death goes by thread.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import queue
import signal
import sys
import threading
from typing import Any

import msgspec
import zmq

from noria.cache.checks import CacheCheckError
from noria.config import EngineOptions
from noria.engine.core import EngineCore
from noria.errors import ConfigError, NoriaError
from noria.messages import Control, FromEngine, Hello, Refused, ToEngine
from noria.observe.logging import setup_logging_from

_log = logging.getLogger("noria.engine")
_PARENT_CHECK_MS = 1000
_LINGER_MS = 2000
_CHECK_AFTER_SECONDS = 1.0  # of idleness
_PR_SET_PDEATHSIG = 1
# How long Python's lock is kept from a thread that wants it. The worker's thread needs it between two kernels while the
# main thread plans the step after: the default of 5 ms would be a tenth of a step.
_SWITCH_SECONDS = 0.0001


class HandshakeError(NoriaError):
    """The client is of another build."""


class Mailbox:
    """A socket thread with an inbox and an outbox.

    Only that thread touches the socket to the client. What the main thread sends goes through an in-process socket,
    which both wakes the thread and, when the client does not read, holds the main thread back.
    """

    def __init__(self, address: str, parent: int) -> None:
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._parent = parent
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._client = self._context.socket(zmq.PAIR)
        self._client.linger = _LINGER_MS
        self._client.connect(address)
        self._receiving_end = self._context.socket(zmq.PAIR)
        self._receiving_end.bind("inproc://outbox")
        self._sending_end = self._context.socket(zmq.PAIR)
        self._sending_end.connect("inproc://outbox")
        self._thread = threading.Thread(target=self._run, name="noria-socket", daemon=True)
        self._thread.start()

    def send(self, message: FromEngine) -> None:
        """Encodes and sends. Called from the main thread only."""
        self._sending_end.send(self._encoder.encode(message))

    def close(self) -> None:
        """Returns when all that was sent is on its way, or nobody has read it for two seconds."""
        self._sending_end.send(b"")
        self._thread.join(2 * _LINGER_MS / 1000)
        self._sending_end.close()
        self._context.term()

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        poller = zmq.Poller()
        poller.register(self._client, zmq.POLLIN)
        poller.register(self._receiving_end, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_PARENT_CHECK_MS))
            if os.getppid() != self._parent:
                os._exit(1)
            if self._client in ready:
                self._receive(decoder)
            if self._receiving_end in ready and not self._forward():
                break
        self._receiving_end.close()
        self._client.close()

    def _receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        while True:
            try:
                data = self._client.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self.inbox.put(decoder.decode(data))
            except (msgspec.MsgspecError, NoriaError) as error:
                # Both sides are one build, so this is a defect of ours; it must not take the others' requests along.
                _log.error("a message that cannot be read was dropped: %s", error)

    def _forward(self) -> bool:
        """Sends one message on; False: it was the last."""
        data = self._receiving_end.recv()
        if not data:
            return False
        while not self._client.poll(_PARENT_CHECK_MS, zmq.POLLOUT):
            if os.getppid() != self._parent:
                os._exit(1)
        self._client.send(data)
        return True


def die_with_parent() -> int:
    """Asks the kernel to kill this process when its parent dies; returns the parent's id, for those kernels that have
    no such call. Ends at once if the parent is dead already."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    return parent


def run(core: EngineCore, mailbox: Mailbox) -> None:
    """The step loop. Returns when drained or told to stop.

    Raises:
        EngineError: the executor failed.
        HandshakeError: the client is of another build.
    """
    unchecked = False  # steps have run since the last check of the cache
    while not core.stopped and not (core.draining and not core.has_work):
        if core.has_work:
            wait: float | None = core.idle_seconds
        else:
            wait = _CHECK_AFTER_SECONDS if unchecked else None
        heard = _receive(core, mailbox.inbox, wait)
        if core.has_work and not core.stopped:
            if heard and core.idle_seconds > 0.0:
                continue  # there may be more to hear before the next step
            unchecked = True
            outputs = core.step()
            if outputs is not None:
                _receive(core, mailbox.inbox, 0.0)
                if not core.stopped:
                    core.launch()
                mailbox.send(outputs)
        elif unchecked and not heard:
            unchecked = False
            _check(core)


def _receive(core: EngineCore, inbox: queue.SimpleQueue[ToEngine], wait: float | None) -> bool:
    """Hands over all messages that are there, after sleeping up to `wait` seconds (None: forever) for the first.
    Returns whether there was any."""
    heard = False
    try:
        if wait != 0.0:
            _deliver(core, inbox.get(timeout=wait))
            heard = True
        while True:
            _deliver(core, inbox.get_nowait())
            heard = True
    except queue.Empty:
        return heard


def _deliver(core: EngineCore, message: ToEngine) -> None:
    if isinstance(message, Hello):
        if message.build_id != core.info.build_id:
            raise HandshakeError(f"the client is of build {message.build_id}, the engine of {core.info.build_id}")
    else:
        core.handle(message)


def _check(core: EngineCore) -> None:
    """When idle, every block must be accounted for. If not, say so: requests still run."""
    try:
        core.check()
    except CacheCheckError as error:
        _log.error("cache check failed: %s", error)


def _start(options: EngineOptions) -> tuple[Any, EngineCore]:
    from noria.executor.local import LocalExecutor

    executor = LocalExecutor(options)
    cache = msgspec.structs.replace(options.cache, block_size=executor.info.block_size)
    core = EngineCore(executor, cache, options.scheduler)
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not look at it again
    return executor, core


def _refusal(error: Exception) -> Refused:
    """What the user reads. An error that Noria does not raise on purpose is logged whole, for whoever looks into it."""
    if not isinstance(error, NoriaError):
        _log.critical("engine cannot start: %s", error, exc_info=error)
        return Refused(f"{type(error).__name__}: {error}")
    return Refused(str(error), error.field if isinstance(error, ConfigError) else None)


def main(address: str) -> int:
    """Runs an engine process; returns its exit status."""
    setup_logging_from(os.environ)
    sys.setswitchinterval(_SWITCH_SECONDS)
    parent = die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API process decides what to do
    mailbox = Mailbox(address, parent)
    signal.signal(signal.SIGTERM, lambda *_: mailbox.inbox.put(Control("drain")))
    try:
        options = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineOptions)
        executor, core = _start(options)
    except Exception as error:
        mailbox.send(_refusal(error))
        mailbox.close()
        return 1
    mailbox.send(core.info)
    try:
        run(core, mailbox)
    except HandshakeError as error:
        mailbox.send(Refused(str(error)))
        mailbox.close()
        return 1
    except Exception as error:
        # Whatever failed, the state is unknown now: a new process that resumes the requests is the remedy.
        _log.critical("engine stops: %s", error, exc_info=error)
        mailbox.close()
        return 1
    executor.close()
    mailbox.close()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a failed executor's threads must not keep the process
