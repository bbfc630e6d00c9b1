"""The grammars of a server: compiled in a process of their own, kept for whoever asks for the same again.

Owns that process. One specification at a time is compiled there; one that takes too long or too much memory costs that
process, which is replaced, and the request, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec

from noria.errors import EngineError, InvalidRequestError, QueueFullError, UnavailableError
from noria.frontend.grammar import Spec
from noria.frontend.grammar_worker import Verdict
from noria.guidance import BYTES
from noria.messages import Vocabulary
from noria.observe.logging import get_logger
from noria.wire import Frames, frame

log = get_logger(__name__)
COMPILE_SECONDS = 10.0  # for one specification
MEMORY_MEGABYTES = 2048  # of address space, for the process
MAX_WAITING = 64  # specifications that wait to be compiled
START_SECONDS = 60.0  # for the process to be ready
_KEPT = 1024  # specifications, and what became of them
_KEPT_CHARACTERS = 1 << 20  # of them and their grammars together
_RETRY_SECONDS = 60.0  # before one that took too much is tried again
_PIECE = 1 << 16  # bytes read at a time


class WorkerGoneError(Exception):
    """The process ended while it was needed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a specification. `until`: when it may be tried again, `time.monotonic()`."""

    verdict: Verdict
    until: float | None = None

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.verdict.grammar or "") + len(self.verdict.error or "")


class Compiler:
    """The process, started when it is first needed. Its methods but `close` belong to one thread, and block it.

    Args:
        vocabulary: makes the vocabulary that grammars are tried with.
        seconds, megabytes: what one specification may take.
        command: the program, to which both are appended; the worker's own if not given.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary] = lambda: BYTES,
        seconds: float = COMPILE_SECONDS,
        megabytes: int = MEMORY_MEGABYTES,
        command: tuple[str, ...] | None = None,
    ) -> None:
        self.seconds = seconds
        self._vocabulary = vocabulary
        self._command = command or (sys.executable, "-m", "noria.frontend.grammar_worker")
        self._limits = (f"{seconds:g}", f"{megabytes}")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        return self._process.pid if self._process else None

    def compile(self, spec: Spec) -> Outcome:
        """What becomes of a specification. Raises EngineError if the process cannot be started."""
        process = self._ready()
        try:
            reply = _exchange(process, msgspec.msgpack.encode(spec), self.seconds)
            return Outcome(msgspec.msgpack.decode(reply, type=Verdict))
        except TimeoutError:
            message = f"it took longer than {self.seconds:g} s to compile; make it simpler"
        except WorkerGoneError:
            message = "it could not be compiled within the memory there is; make it simpler"
        log.warning("a grammar of %d characters (%s): %s", len(spec.text), spec.kind, message)
        self._end()
        return Outcome(Verdict(None, message), time.monotonic() + _RETRY_SECONDS)

    def close(self) -> None:
        """Ends the process for good, from any thread; whoever waits for it hears that it is gone."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def _ready(self) -> subprocess.Popen[bytes]:
        """The process; another one if it has ended while nobody needed it."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._closed:
            raise UnavailableError("the server is stopping")
        if self._process is None:
            # No descriptor but these three is inherited: no socket that the server listens on.
            self._process = subprocess.Popen(
                [*self._command, *self._limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            try:
                _exchange(self._process, msgspec.msgpack.encode(self._vocabulary()), START_SECONDS)
            except (TimeoutError, WorkerGoneError):
                self._end()
                raise EngineError("the process that compiles grammars could not be started") from None
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _exchange(process: subprocess.Popen[bytes], message: bytes, seconds: float) -> bytes:
    """Sends a message and waits for the answer.

    Raises:
        TimeoutError: there was none in time.
        WorkerGoneError: there will be none.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    into, out = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(into, False)
    left, frames, deadline = memoryview(frame(message)), Frames(), time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ)
        selector.register(into, selectors.EVENT_WRITE)
        while (pause := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(pause):
                if key.fd == into:
                    left = _send_some(into, left)
                    if not left:
                        selector.unregister(into)
                    continue
                data = os.read(out, _PIECE)
                if not data:
                    raise WorkerGoneError
                for answer in frames.feed(data):
                    return answer
    raise TimeoutError


def _send_some(into: int, left: memoryview) -> memoryview:
    try:
        return left[os.write(into, left) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        raise WorkerGoneError from None


@dataclass(slots=True)
class _Pending:
    """A specification that is compiled, or will be. `waiting`: how many wait for it."""

    work: Future[Outcome]
    waiting: int = 0


class Grammars:
    """Compiled grammars, by what they were made of. Belongs to one event loop, but for `close`."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        self.compiler = compiler or Compiler()
        self._thread = ThreadPoolExecutor(1, "noria-grammar")
        self._kept: OrderedDict[Spec, Outcome] = OrderedDict()
        self._size = 0  # characters of what is kept
        self._pending: dict[Spec, _Pending] = {}

    async def of(self, spec: Spec, field: str) -> str:
        """The serialised grammar of a specification.

        Args:
            field: the request's field that asks for it.

        Raises:
            InvalidRequestError: it cannot be served.
            QueueFullError: too many wait to be compiled.
        """
        outcome = self._known(spec) or await self._made(spec)
        if outcome.verdict.grammar is None:
            raise InvalidRequestError(f"{field}: {outcome.verdict.error}", field)
        return outcome.verdict.grammar

    def close(self) -> None:
        """Ends the process."""
        self.compiler.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _known(self, spec: Spec) -> Outcome | None:
        outcome = self._kept.get(spec)
        if outcome is None or (outcome.until is not None and time.monotonic() > outcome.until):
            return None
        self._kept.move_to_end(spec)
        return outcome

    async def _made(self, spec: Spec) -> Outcome:
        """Compiles it, once however many wait for it, and not at all if they all have left before it began."""
        pending = self._pending.get(spec)
        if pending is None:
            if len(self._pending) >= MAX_WAITING:
                raise QueueFullError("too many grammars wait to be compiled; try again later", retry_after=1.0)
            pending = self._pending[spec] = _Pending(self._thread.submit(self.compiler.compile, spec))
            pending.work.add_done_callback(partial(self._done, asyncio.get_running_loop(), spec))
        pending.waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(pending.work))
        finally:
            pending.waiting -= 1
            if not pending.waiting and pending.work.cancel():
                self._pending.pop(spec, None)

    def _done(self, loop: asyncio.AbstractEventLoop, spec: Spec, work: Future[Outcome]) -> None:
        """Runs on the thread that compiled it."""
        if not work.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._take, spec, work)

    def _take(self, spec: Spec, work: Future[Outcome]) -> None:
        self._pending.pop(spec, None)
        if work.exception() is None:
            self._keep(spec, work.result())

    def _keep(self, spec: Spec, outcome: Outcome) -> None:
        if (before := self._kept.pop(spec, None)) is not None:
            self._size -= len(spec.text) + before.size
        self._kept[spec] = outcome
        self._size += len(spec.text) + outcome.size
        while len(self._kept) > _KEPT or self._size > _KEPT_CHARACTERS:
            oldest, gone = self._kept.popitem(last=False)
            self._size -= len(oldest.text) + gone.size
