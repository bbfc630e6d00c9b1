"""Engines that are up: a server behind a URL, or a driver process that takes requests as files. How runs are judged."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from serving import StartError, running, stop

from noria.bench.http import Record
from noria.bench.report import summarise
from peers.base import Load, Outcome, Unavailable

MARK = "@@ "  # begins a driver's lines to the runner; libraries print to the same stream

# ------------------------------------------------------------------------------------------------ servers


@dataclass(frozen=True, slots=True)
class Served:
    """An OpenAI-compatible server. `bench`: the load generator's command; `tokenizer`: the model that cuts prompts."""

    seconds: float
    pid: int
    url: str
    bench: tuple[str, ...]
    tokenizer: str

    def measure(self, load: Load, scratch: Path) -> Outcome:
        report = scratch / "report.json"
        report.unlink(missing_ok=True)
        command = [*self.bench, "--url", self.url, "--tokenizer", self.tokenizer, *as_flags(load)]
        with (scratch / "bench.log").open("w", encoding="utf-8") as log:
            generator = subprocess.Popen([*command, "--json", str(report)], stdout=log, stderr=subprocess.STDOUT)
            watch = MemoryWatch(self.pid)
            try:
                watch.until(lambda: generator.poll() is not None, load.limit)
            finally:
                generator.kill()
                generator.wait()
        if generator.returncode < 0:
            return Outcome(None, f"no end within {load.limit:g} s", watch.peak_mb)
        if not report.exists():
            tail = (scratch / "bench.log").read_text(encoding="utf-8", errors="replace").strip()[-300:]
            return Outcome(None, f"the load generator failed: {tail}", watch.peak_mb)
        figures: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["median"]
        return judged(figures, load, watch.peak_mb)


@contextmanager
def served(
    command: Sequence[str],
    port: int,
    log: Path,
    bench: tuple[str, ...],
    tokenizer: str,
    timeout: float = 300.0,
    env: dict[str, str] | None = None,
) -> Iterator[Served]:
    """A server's command as a session. Raises Unavailable when it does not come up."""
    url = f"http://127.0.0.1:{port}"
    try:
        with running(command, url, log, timeout, env) as started:
            yield Served(started.seconds, started.pid, url, bench, tokenizer)
    except StartError as error:
        raise Unavailable(str(error)) from None


# ------------------------------------------------------------------------------------------------ in process


@dataclass(slots=True)
class Driven:
    """A driver of `drivers/`: takes the paths of requests and records on its input, one measurement a line."""

    process: subprocess.Popen[bytes]
    seconds: float = 0.0
    _rest: bytes = field(default=b"", repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def measure(self, load: Load, scratch: Path) -> Outcome:
        watch = MemoryWatch(self.pid)
        answer = self._ask(as_asked(load), scratch, load.limit, watch)
        watch.last_look()
        if isinstance(answer, str):
            return Outcome(None, answer, watch.peak_mb)
        return judged(summarise([Record(**values) for values in answer]), load, watch.peak_mb)

    def score(self, windows: Sequence[Sequence[int]], scratch: Path, limit: float) -> list[list[float]]:
        """Log-probabilities of the tokens of windows, of all but each one's first. Raises Unavailable."""
        answer = self._ask({"windows": [list(window) for window in windows]}, scratch, limit)
        if isinstance(answer, str):
            raise Unavailable(answer)
        return answer

    def _ask(self, what: Any, scratch: Path, limit: float, watch: MemoryWatch | None = None) -> Any:
        """The driver's answer, or in a string why there is none."""
        asked, answered = scratch / "requests.json", scratch / "records.json"
        answered.unlink(missing_ok=True)
        asked.write_text(json.dumps(what), encoding="utf-8")
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([str(asked.resolve()), str(answered.resolve())]).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return "the driver has ended"
        word = self.hear(limit, watch)
        if word != "done":
            return word or f"no end within {limit:g} s"
        return json.loads(answered.read_text(encoding="utf-8"))

    def hear(self, seconds: float, watch: MemoryWatch | None = None) -> str | None:
        """The driver's next line for us; None when it stays silent for so long."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                *lines, self._rest = self._rest.split(b"\n")
                for index, line in enumerate(lines):
                    if line.startswith(MARK.encode()):
                        self._rest = b"\n".join([*lines[index + 1 :], self._rest])
                        return line.decode(errors="replace").removeprefix(MARK)
                if selector.select(min(left, MemoryWatch.PERIOD)):
                    read = os.read(self.process.stdout.fileno(), 1 << 16)
                    if not read:
                        return "the driver has ended, see its log"
                    self._rest += read
                elif watch is not None:
                    watch.look()
            return None


@contextmanager
def driven(
    command: Sequence[str], log: Path, timeout: float = 300.0, env: dict[str, str] | None = None
) -> Iterator[Driven]:
    """A driver's command as a session. Raises Unavailable when it does not become ready."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            session = Driven(process)
            if (word := session.hear(timeout)) != "ready":
                tail = log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
                raise Unavailable(f"{word or 'not ready in time'}: {tail}")
            session.seconds = time.perf_counter() - began
            yield session
        finally:
            stop(process)


def as_flags(load: Load) -> list[str]:
    """What `noria bench serve` is told, so that it draws `load.requests`."""
    spec = load.spec
    values = {
        "--preset": load.preset,
        "--num-requests": spec.requests,
        "--concurrency": load.callers,
        "--input-len": spec.input if isinstance(spec.input, int) else f"{spec.input[0]}:{spec.input[1]}",
        "--output-len": spec.output if isinstance(spec.output, int) else f"{spec.output[0]}:{spec.output[1]}",
        "--shared-len": spec.shared,
        "--dataset": load.text,
        "--seed": load.seed,
    }
    return [text for flag, value in values.items() for text in (flag, str(value))]


def as_asked(load: Load) -> dict[str, Any]:
    """What a driver reads."""
    return {"concurrency": load.callers, "requests": [asdict(request) for request in load.requests]}


# ------------------------------------------------------------------------------------------------ checks and memory


def judged(figures: dict[str, Any], load: Load, memory_mb: float | None) -> Outcome:
    """An outcome; a run in which requests failed or answers were short is not one to compare."""
    wanted = sum(request.output_tokens for request in load.requests)
    prompted = sum(len(request.prompt_ids) for request in load.requests)
    error = None
    if figures["completed"] < figures["requests"]:
        error = f"{figures['completed']} of {figures['requests']} completed: {next(iter(figures['errors']), '')}"
    elif figures["output_tokens"] != wanted:
        error = f"{figures['output_tokens']} output tokens instead of {wanted}"
    elif abs(figures["prompt_tokens"] - prompted) > 0.05 * prompted:
        error = f"{figures['prompt_tokens']} prompt tokens instead of {prompted}"
    return Outcome(figures, error, memory_mb)


class MemoryWatch:
    """Proportional set size of a process and all below it, looked at now and then: a look costs milliseconds."""

    PERIOD = 2.0  # seconds

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._next = 0.0
        self.peak_mb: float | None = None

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        total = 0
        try:
            top = psutil.Process(self._pid)
            for process in [top, *top.children(recursive=True)]:
                total += process.memory_full_info().pss
        except psutil.Error:
            return
        self.peak_mb = max(self.peak_mb or 0.0, total / 1e6)
        self._next = time.monotonic() + self.PERIOD

    def last_look(self) -> None:
        self._next = 0.0
        self.look()

    def until(self, over: Callable[[], bool], seconds: float) -> None:
        """Looks until `over()` or for so many seconds."""
        deadline = time.monotonic() + seconds
        while not over() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.look()
        self.last_look()
