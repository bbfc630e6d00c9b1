"""An engine in virtual time, under more load than it can bear: the real scheduler, steps that cost what a line says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np

from helpers.engine_driver import submit
from helpers.fake_executor import VOCAB, FakeExecutor
from noria.config import CacheOptions, PacerOptions, SchedulerOptions
from noria.engine.core import EngineCore
from noria.messages import Finished
from noria.pacer.pacer import Pacer
from noria.pacer.start import make_gate
from noria.plan import StepPlan, StepResult

BASE, ROW, TOKEN = 0.004, 0.0005, 0.0002  # seconds of a step, of a row that decodes, of a token of a prompt


class Timed(FakeExecutor):
    """Steps take time, and nothing else."""

    def __init__(self, slots: int, num_blocks: int, depth: int) -> None:
        super().__init__(num_blocks=num_blocks, slots=slots, max_model_len=4096, depth=depth)
        self.now = 0.0
        self._costs: list[float] = []

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        decoding = int((plan.counts == 1).sum())
        self._costs.append(BASE + ROW * decoding + TOKEN * (plan.tokens - decoding))
        sampled = plan.slots[plan.sample]
        self.results.append(StepResult(plan.step, sampled, np.ones(len(sampled), np.int32)))

    def collect(self) -> StepResult:
        self.now += self._costs.pop(0)
        return self.results.popleft()


@dataclass
class Asked:
    """A request, and what became of it. Seconds."""

    at: float
    prompt: int
    output: int
    priority: int = 0
    tenant: str = ""
    sheddable: bool = True
    tokens: int = 0
    first: float | None = None
    last: float = 0.0
    end: Finished | None = None

    @property
    def taken(self) -> bool:
        return self.end is None or self.end.shed is None

    @property
    def ttft(self) -> float:
        return np.inf if self.first is None else self.first - self.at

    @property
    def tpot(self) -> float:
        assert self.first is not None
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass
class World:
    """An engine and its clock."""

    slots: int = 32
    num_blocks: int = 8000
    budget: int = 512
    depth: int = 1
    policy: str = "fcfs"
    prefetch: bool = True
    options: PacerOptions = field(default_factory=PacerOptions)
    pacer: Pacer | None = None
    same_prompts: bool = False  # all begin alike
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executor = Timed(self.slots, self.num_blocks, self.depth)
        scheduling = SchedulerOptions(
            max_num_seqs=self.slots,
            max_num_batched_tokens=self.budget,
            in_flight_depth=self.depth,
            policy=self.policy,
            prefetch=self.prefetch,
        )
        gate = make_gate(self.options, self.pacer, wall=lambda: self.executor.now)
        self.core = EngineCore(
            self.executor,
            CacheOptions(block_size=8),
            scheduling,
            clock=lambda: self.executor.now,
            pacer=self.pacer,
            gate=gate,
        )
        self._random = Random(0)

    def send(self, one: Asked) -> None:
        self.asked.append(one)
        words = [7 if self.same_prompts else self._random.randrange(VOCAB) for _ in range(one.prompt)]
        more = {"priority": one.priority, "tenant": one.tenant, "salt": one.tenant, "sheddable": one.sheddable}
        self.core.handle(submit(len(self.asked), words, max_tokens=one.output, arrival=one.at, **more))

    def step(self) -> None:
        self.executor.now += 0.0 if self.core._flights else self.core.idle_seconds  # while a static batch fills
        outputs = self.core.step()
        if outputs is None:
            return
        for request_id in np.frombuffer(outputs.request_ids, "<i8").tolist():
            one = self.asked[request_id - 1]
            assert one.end is None
            one.first = self.executor.now if one.first is None else one.first
            one.last = self.executor.now
            one.tokens += 1
        for end in outputs.finished:
            one = self.asked[end.request_id - 1]
            assert one.end is None
            assert end.shed is None or one.first is None
            one.end = end

    def run(self, load: Iterator[Asked], until: float) -> None:
        """Sends what is asked when it is due, for so long; then nothing more, until all has ended."""
        due = next(load)
        while True:
            while due.at <= self.executor.now and due.at < until:
                self.send(due)
                due = next(load)
            if self.core.has_work:
                self.step()
            elif due.at < until:
                self.executor.now = due.at
            else:
                return


def poisson(rate: float, seed: int = 0, prompt: int = 200, output: int = 60) -> Iterator[Asked]:
    """Requests at random moments, so many per second, with lengths around the given ones."""
    random, at = Random(seed), 0.0
    while True:
        at += random.expovariate(rate)
        yield Asked(at, random.randint(prompt // 2, 3 * prompt // 2), random.randint(output // 2, 3 * output // 2))
