"""Runs a workload on an engine in this process: no HTTP, no sockets, no detokenising. What is left is the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from noria.bench.http import Record
from noria.bench.workloads import BenchRequest
from noria.engine.core import EngineCore
from noria.messages import EngineStats, StepOutputs, Submit
from noria.params import SamplingParams

_PAUSE = 0.001  # longest sleep while nothing is to be computed


class Clock(Protocol):
    """Seconds that never go back, and a way to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Sample:
    """An engine at one moment of a run.

    Attributes:
        batch, budget: most running requests, most tokens of a step. arrival_rate: requests per second, as the pacer
            measures it; 0 without one.
    """

    at: float
    running: int
    waiting: int
    batch: int
    budget: int
    arrival_rate: float


class Sampler:
    """Keeps the state of an engine over time, often enough for a chart.

    Args:
        every: seconds between two samples, at least.
    """

    def __init__(self, every: float = 0.01) -> None:
        self._every = every
        self.samples: list[Sample] = []

    def take(self, now: float, stats: EngineStats) -> None:
        """Keeps what a step said unless the last sample is recent."""
        if not self.samples or now >= self.samples[-1].at + self._every:
            pacer = stats.pacer
            sizes = pacer.batch, pacer.budget, pacer.arrival_rate
            self.samples.append(Sample(now, stats.running, stats.waiting, *sizes))


def sizes(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Least, median and most of what was allowed and of what ran."""
    found = {}
    for name in ("batch", "budget", "running", "waiting"):
        values = [getattr(sample, name) for sample in samples]
        found[name] = {"least": min(values), "median": float(np.median(values)), "most": max(values)}
    return found


def run_offline(
    core: EngineCore,
    requests: Sequence[BenchRequest],
    concurrency: int | None,
    on_done: Callable[[Record], None] = lambda _: None,
    sampler: Sampler | None = None,
    clock: Clock | None = None,
) -> list[Record]:
    """Greedy, exact output lengths. Returns the records in the order of `requests`.

    Args:
        concurrency: requests submitted at a time (closed loop); None submits each at its own time `at`.
        sampler: is shown what each step says.
        clock: None: the machine's.
    """
    run = _Run(core, requests, concurrency, on_done, sampler, clock or WallClock())
    while not run.finished:
        run.submit_due()
        outputs = core.step() if core.has_work else None
        if outputs is not None:
            run.take(outputs)
        else:
            run.wait()
    return [run.records[index] for index in range(len(requests))]


class _Run:
    def __init__(
        self,
        core: EngineCore,
        requests: Sequence[BenchRequest],
        concurrency: int | None,
        on_done: Callable[[Record], None],
        sampler: Sampler | None,
        clock: Clock,
    ) -> None:
        self._core = core
        self._requests = requests
        self._concurrency = concurrency
        self._on_done = on_done
        self._sampler = sampler
        self._clock = clock
        self._start = clock.now()
        self._waiting = deque(range(len(requests)))
        self._live = 0
        self.records: dict[int, Record] = {}

    @property
    def finished(self) -> bool:
        return not self._waiting and self._live == 0

    def submit_due(self) -> None:
        """Submits what the loop's rule allows now. In an open loop a request counts from the time at which it is due,
        also where a step held it up."""
        while self._waiting:
            item = self._requests[self._waiting[0]]
            start = self._clock.now()
            if self._concurrency is None:
                if start - self._start < item.at:
                    return
                start = self._start + item.at
            elif self._live >= self._concurrency:
                return
            index = self._waiting.popleft()
            self._live += 1
            self.records[index] = Record(start=start, prompt_tokens=len(item.prompt_ids))
            params = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, seed=0)
            ids = np.asarray(item.prompt_ids, dtype="<i4").tobytes()
            self._core.handle(Submit(request_id=index, prompt_ids=ids, params=params, group=index, arrival=time.time()))

    def wait(self) -> None:
        """Sleeps while there is nothing to compute (the next arrival is not due, or a static batch fills), at most a
        millisecond. A step that yields no token, such as a part of a prompt, is followed by the next at once."""
        if self._core.has_work:
            pause = self._core.idle_seconds
        else:
            pause = _PAUSE
            if self._sampler is not None:
                self._sampler.take(self._clock.now(), self._core.stats)
        if pause > 0:
            self._clock.sleep(min(pause, _PAUSE))

    def take(self, outputs: StepOutputs) -> None:
        """Books the tokens and ends of a step."""
        now = self._clock.now()
        if self._sampler is not None:
            self._sampler.take(now, outputs.stats)
        ids = np.frombuffer(outputs.request_ids, "<i8").tolist()
        for index, count in zip(ids, np.frombuffer(outputs.counts, "<i4").tolist(), strict=True):
            self.records[index].chunks.append(now)
            self.records[index].output_tokens += count
        for end in outputs.finished:
            record = self.records[end.request_id]
            record.end = now
            record.cached_tokens = end.cached_tokens
            if end.reason == "error":
                record.error = end.message or "error"
            self._live -= 1
            self._on_done(record)
