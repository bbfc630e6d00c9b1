"""Runs a workload on an engine in this process: no HTTP, no sockets, no detokenising. What is left is the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from noria.bench.http import Record
from noria.bench.workloads import BenchRequest
from noria.engine.core import EngineCore
from noria.messages import StepOutputs, Submit
from noria.params import SamplingParams


def run_offline(
    core: EngineCore,
    requests: Sequence[BenchRequest],
    concurrency: int | None,
    on_done: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Greedy, exact output lengths. Returns the records in the order of `requests`.

    Args:
        concurrency: requests submitted at a time (closed loop); None submits each at its own time `at`.
    """
    run = _Run(core, requests, concurrency, on_done)
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
    ) -> None:
        self._core = core
        self._requests = requests
        self._concurrency = concurrency
        self._on_done = on_done
        self._start = time.perf_counter()
        self._waiting = deque(range(len(requests)))
        self._live = 0
        self.records: dict[int, Record] = {}

    @property
    def finished(self) -> bool:
        return not self._waiting and self._live == 0

    def submit_due(self) -> None:
        """Submits what the loop's rule allows now."""
        while self._waiting:
            item = self._requests[self._waiting[0]]
            now = time.perf_counter()
            if self._concurrency is None:
                if now - self._start < item.at:
                    return
            elif self._live >= self._concurrency:
                return
            index = self._waiting.popleft()
            self._live += 1
            self.records[index] = Record(start=now, prompt_tokens=len(item.prompt_ids))
            params = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, seed=0)
            ids = np.asarray(item.prompt_ids, dtype="<i4").tobytes()
            self._core.handle(Submit(request_id=index, prompt_ids=ids, params=params, group=index, arrival=time.time()))

    def wait(self) -> None:
        """Sleeps while there is nothing to compute (the next arrival is not due, or a static batch fills), at most a
        millisecond. A step that yields no token, such as a part of a prompt, is followed by the next at once."""
        pause = self._core.idle_seconds if self._core.has_work else 0.001
        if pause > 0:
            time.sleep(min(pause, 0.001))

    def take(self, outputs: StepOutputs) -> None:
        """Books the tokens and ends of a step."""
        now = time.perf_counter()
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
