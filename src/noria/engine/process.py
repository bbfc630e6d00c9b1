"""The engine process: `python -m noria.engine.process ADDRESS`, with EngineOptions as msgpack on standard input.

The main thread is the step loop, and reads and writes the socket to the client between steps. Idle, it sleeps on the
socket and costs no CPU.

The first message sent is EngineInfo or Refused. It ends when told to (`shutdown`), or with its parent. The parent must
start it from a thread that lives as long as it shall: the kernel's signal at the parent's death goes by thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
from typing import Any, Protocol

import msgspec

from noria.cache.checks import CacheCheckError
from noria.config import EngineOptions
from noria.engine.core import EngineCore
from noria.engine.mailbox import Mailbox
from noria.errors import ConfigError, NoriaError
from noria.messages import FromEngine, Hello, Refused, ToEngine
from noria.observe.logging import setup_logging_from
from noria.observe.memory import bound_memory, give_memory_back

_log = logging.getLogger("noria.engine")
_CHECK_AFTER_SECONDS = 1.0  # of idleness
_LARGE = 1 << 20  # bytes of memory that go back to the system as soon as they are free; more than a step takes anew
_PR_SET_PDEATHSIG = 1
# How long Python's lock is kept from a thread that wants it. The worker's thread needs it between two kernels while the
# main thread plans the step after: the default of 5 ms would be a tenth of a step.
_SWITCH_SECONDS = 0.0001


class HandshakeError(NoriaError):
    """The client is of another build."""


class Messages(Protocol):
    """What the step loop needs of the way to the client; see `Mailbox`."""

    def receive(self, wait: float | None) -> list[ToEngine]: ...

    def send(self, message: FromEngine) -> None: ...


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies, if it is one that can; others make do with the end of
    the socket. Ends at once if the parent is dead already."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def run(core: EngineCore, mailbox: Messages) -> None:
    """The step loop. Returns when told to stop.

    Raises:
        EngineError: the executor failed.
        HandshakeError: the client is of another build.
    """
    unchecked = False  # steps have run since the last check of the cache
    while not core.stopped:
        if core.has_work:
            wait: float | None = core.idle_seconds
        else:
            wait = _CHECK_AFTER_SECONDS if unchecked else None
        heard = _receive(core, mailbox, wait)
        if core.has_work and not core.stopped:
            if heard and core.idle_seconds > 0.0:
                continue  # there may be more to hear before the next step
            unchecked = True
            outputs = core.step()
            if outputs is not None:
                if core.may_launch:
                    _receive(core, mailbox, 0.0)
                    if not core.stopped:
                        core.launch()
                mailbox.send(outputs)
        elif unchecked and not heard:
            unchecked = False
            core.tidy()
            _check(core)
            give_memory_back()
            _rest(core, mailbox)


def _rest(core: EngineCore, mailbox: Messages) -> None:
    """Does what had better be done while there is no work, until there is some."""
    while core.rest():
        if _receive(core, mailbox, 0.0):
            core.wake()
            return


def _receive(core: EngineCore, mailbox: Messages, wait: float | None) -> bool:
    """Hands over all messages that are there, after sleeping up to `wait` seconds (None: forever) for the first.
    Returns whether there was any."""
    messages = mailbox.receive(wait)
    for message in messages:
        _deliver(core, message)
    return bool(messages)


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
    from noria.pacer.start import make_gate, make_pacer

    executor = LocalExecutor(options)
    cache = msgspec.structs.replace(options.cache, block_size=executor.info.block_size)
    pacer = make_pacer(options, executor.info)
    core = EngineCore(executor, cache, options.scheduler, pacer=pacer, gate=make_gate(options.pacer, pacer))
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
    bound_memory(_LARGE)
    die_with_parent()
    for sign in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the API process decides what to do
        signal.signal(sign, signal.SIG_IGN)
    mailbox = Mailbox(address)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it stands, for whoever finds that it does not go on
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
    core.close()
    executor.close()
    mailbox.close()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a failed executor's threads must not keep the process
