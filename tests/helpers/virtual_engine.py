"""An engine in virtual time, whose steps take what a made-up machine takes: what the pacer does to latencies, exactly
and at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from helpers.fake_executor import FakeExecutor
from helpers.step_times import truth
from noria.config import CacheOptions, SchedulerOptions
from noria.engine.core import EngineCore
from noria.engine.pacing import shape_of
from noria.messages import Submit
from noria.pacer.base import Sizes
from noria.pacer.pacer import Pacer
from noria.params import SamplingParams
from noria.plan import StepPlan, StepResult

SLOTS, BUDGET = 256, 512


class MadeUp(FakeExecutor):
    """Tokens are all the same and their content is not checked."""

    def __init__(self, seconds: Callable[..., float], noise: float, seed: int) -> None:
        super().__init__(num_blocks=16_000, slots=SLOTS, max_model_len=1024, block_size=16)
        self.now = 0.0
        self.steps: list[float] = []
        self._seconds, self._noise, self._random = seconds, noise, np.random.default_rng(seed)
        self._costs: deque[float] = deque()

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        cost = self._seconds(shape_of(plan)) * float(self._random.lognormal(0.0, self._noise))
        self._costs.append(cost)
        sampled = plan.slots[plan.sample]
        self.results.append(StepResult(plan.step, sampled, np.ones(len(sampled), np.int32)))

    def collect(self) -> StepResult:
        self.now += self._costs.popleft()
        return self.results.popleft()


@dataclass
class Served:
    """One request. Seconds on the virtual clock."""

    at: float
    prompt: int
    output: int
    first: float = 0.0
    last: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.output - 1)


@dataclass
class Run:
    """What came of it: requests in order of arrival; and (time, sizes, running) after each step."""

    served: list[Served]
    sizes: list[tuple[float, Sizes, int]]
    decisions: list

    def between(self, start: float, end: float) -> list[Served]:
        """Requests that came in that time."""
        return [one for one in self.served if start <= one.at < end]

    def batches(self, start: float, end: float) -> list[int]:
        return [sizes.batch for at, sizes, _ in self.sizes if start <= at < end]


def arrivals(phases: Sequence[tuple[float, float]], prompt=(64, 192), output=(32, 96), seed=0) -> list[Served]:
    """Requests at random, `rate` a second for `seconds`, phase after phase."""
    random, now, end, made = np.random.default_rng(seed), 0.0, 0.0, []
    for seconds, rate in phases:
        end += seconds
        while (now := now + random.exponential(1.0 / rate)) < end:
            made.append(Served(now, int(random.integers(*prompt)), int(random.integers(*output))))
        now = end
    return made


def drive(
    requests: list[Served],
    make_pacer: Callable[[Callable[[], float]], Pacer | None],
    seconds: Callable[..., float] = truth,
    noise: float = 0.03,
    concurrency: int | None = None,
) -> Run:
    """Runs all requests to their end. `concurrency`: callers of a closed loop; None: each request comes at its time."""
    executor = MadeUp(seconds, noise, 1)
    options = SchedulerOptions(max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET, in_flight_depth=1)
    clock = lambda: executor.now  # noqa: E731
    core = EngineCore(executor, CacheOptions(block_size=16), options, clock, make_pacer(clock))
    run, waiting, live = Run(requests, [], []), deque(range(len(requests))), 0
    while waiting or core.has_work:
        while waiting and (live < concurrency if concurrency else requests[waiting[0]].at <= executor.now):
            index = waiting.popleft()
            live += 1
            if concurrency:
                requests[index].at = executor.now
            core.handle(_submit(index, requests[index]))
        if not core.has_work:
            executor.now = requests[waiting[0]].at
            continue
        outputs = core.step()
        run.sizes.append((executor.now, core._scheduler.sizes, len(core._scheduler.running)))
        if outputs is None:
            continue
        for index in np.frombuffer(outputs.request_ids, "<i8").tolist():
            one = requests[index]
            one.first, one.last = one.first or executor.now, executor.now
        live -= len(outputs.finished)
    if core._pacing is not None:
        run.decisions = list(core._pacing.pacer.decisions)
    return run


def _submit(index: int, one: Served) -> Submit:
    random = np.random.default_rng(index)
    prompt = random.integers(2, 60, one.prompt).astype("<i4").tobytes()
    params = SamplingParams(max_tokens=one.output, seed=0, temperature=0.0)
    return Submit(request_id=index, prompt_ids=prompt, params=params, arrival=one.at)
