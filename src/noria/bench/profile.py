"""Where each millisecond of a run's steps goes: waiting for a plan, preparing the batch, every op, sampling.

The worker's thread is followed from the end of one step to the end of the next, so that its parts add up to the whole;
what the engine's thread did for a step is listed beside it. Kept per kind of step, since a step that prefills and one
that decodes have nothing in common.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from noria.backends.counts import op_shape
from noria.bench.tables import make_console, make_table
from noria.config import EngineOptions
from noria.engine.core import EngineCore
from noria.errors import ConfigError
from noria.executor.local import LocalExecutor
from noria.messages import StepOutputs
from noria.pacer.start import make_pacer
from noria.plan import StepPlan, StepResult
from noria.worker.worker import Worker

if TYPE_CHECKING:
    from noria.backends.cpu.program import CpuProgram

KINDS = ("prefill", "mixed", "decode")
WAITING, PREPARE, HEAD, SAMPLING, REST = "waiting for a plan", "preparing the batch", "head", "sampling", "the rest"


@dataclass(slots=True)
class KindProfile:
    """Sums over the steps of one kind, in seconds.

    Attributes:
        parts: of the worker's time, by name; they add up to all of it.
        schedule, update: on the engine's thread: making the plans, and taking in the results.
    """

    steps: int = 0
    tokens: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    schedule: float = 0.0
    update: float = 0.0

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def as_json(self) -> dict[str, Any]:
        """Milliseconds per step."""
        each = 1e3 / max(self.steps, 1)
        return {
            "steps": self.steps,
            "tokens_per_step": self.tokens / max(self.steps, 1),
            "step_ms": each * sum(self.parts.values()),
            "parts_ms": {name: each * seconds for name, seconds in self.parts.items()},
            "engine_schedule_ms": each * self.schedule,
            "engine_update_ms": each * self.update,
        }


class Profile:
    """Collects over any number of runs, each on an engine of `open_engine`."""

    def __init__(self) -> None:
        self.kinds = {kind: KindProfile() for kind in KINDS}

    def as_json(self) -> dict[str, Any]:
        """By kind of step, those that occurred."""
        return {kind: found.as_json() for kind, found in self.kinds.items() if found.steps}


def kind_of(plan: StepPlan) -> str:
    """prefill: more than half of the tokens belong to rows that compute several; decode: every row computes one."""
    several = int(plan.counts[plan.counts > 1].sum())
    return "decode" if not several else "prefill" if 2 * several > plan.tokens else "mixed"


class _ProfiledWorker:
    """A worker with the clocks on. The ops' times are fetched only where the kind of step changes, and at the end, so
    that looking costs next to nothing."""

    def __init__(self, options: EngineOptions, profile: Profile) -> None:
        self._worker = Worker(options)
        self._program = cast("CpuProgram", self._worker.program)
        self._profile = profile
        self._kind = KINDS[0]
        self._ended: float | None = None
        self.info = self._worker.info
        self.grammars = self._worker.grammars
        self._program.profile(True)

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        if not len(plan.slots):
            return self._worker.execute(plan)
        kind = kind_of(plan)
        if kind != self._kind:
            self.fetch()
            self._kind = kind
        result = self._worker.execute(plan)
        found, timings = self._profile.kinds[kind], result.timings
        found.steps += 1
        found.tokens += plan.tokens
        if self._ended is not None:
            found.add(WAITING, began - self._ended)
        found.add(PREPARE, timings.prepare)
        # Of these two the ops are taken out when their times are fetched.
        found.add(SAMPLING, timings.sample)
        self._ended = time.perf_counter()
        found.add(REST, self._ended - began - timings.prepare - timings.sample)
        return result

    def rest(self) -> None:
        self._worker.rest()

    def close(self) -> None:
        self._worker.close()

    def fetch(self) -> None:
        """Books the ops' times since the last call under the present kind of step."""
        found = self._profile.kinds[self._kind]
        for entry in self._program.times():
            index, seconds = entry["op"], float(entry["seconds"])
            if index is None:
                found.add(HEAD, seconds)
                found.add(SAMPLING, -seconds)
                continue
            op = self._program.graph.ops[index]
            found.add(op_shape(op) if entry["name"] != "convert" else f"convert {op.out.width}", seconds)
            found.add(REST, -seconds)
        self._program.profile(True)


class ProfiledExecutor(LocalExecutor):
    """Knows besides when plans come and results go."""

    def __init__(self, options: EngineOptions, profile: Profile) -> None:
        self._workers: list[_ProfiledWorker] = []
        self._profile = profile
        self._kinds: deque[str] = deque()
        self._since = 0.0  # when the engine's turn began, or a result came within it
        self._collected = False

        def make(options: EngineOptions) -> _ProfiledWorker:
            self._workers.append(_ProfiledWorker(options, profile))
            return self._workers[-1]

        super().__init__(options, make)

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        self._kinds.append(kind_of(plan))
        self._profile.kinds[self._kinds[-1]].schedule += time.perf_counter() - self._since
        super().submit(plan, alone)

    def collect(self) -> StepResult:
        result = super().collect()
        self._since = time.perf_counter()
        self._collected = True
        return result

    def begin_turn(self) -> None:
        """The engine begins to plan."""
        self._since = time.perf_counter()

    def end_turn(self) -> None:
        """The engine has taken in the result of the oldest step, if it collected one."""
        if self._collected:
            self._profile.kinds[self._kinds.popleft()].update += time.perf_counter() - self._since
            self._collected = False

    def close(self) -> None:
        super().close()
        while self._workers:
            self._workers.pop().fetch()


class ProfiledCore(EngineCore):
    """An engine that tells its executor where its turns begin and end."""

    def __init__(self, executor: ProfiledExecutor, options: EngineOptions) -> None:
        super().__init__(executor, options.cache, options.scheduler, pacer=make_pacer(options, executor.info))
        self._clocked = executor

    def step(self) -> StepOutputs | None:
        self._clocked.begin_turn()
        outputs = super().step()
        self._clocked.end_turn()
        return outputs


@contextmanager
def open_engine(options: EngineOptions, profile: Profile | None = None) -> Iterator[EngineCore]:
    """An engine in this process, closed at the end, when the profile is complete.

    Raises:
        ConfigError: a backend without clocks is to be profiled; besides what loading a model raises.
    """
    if profile is None:
        executor = LocalExecutor(options)
    elif options.device.backend == "cpu":
        executor = ProfiledExecutor(options, profile)
    else:
        raise ConfigError("only the cpu backend has clocks for its ops", "--profile")
    try:
        if isinstance(executor, ProfiledExecutor):
            core: EngineCore = ProfiledCore(executor, options)
        else:
            pacer = make_pacer(options, executor.info)
            core = EngineCore(executor, options.cache, options.scheduler, pacer=pacer)
        yield core
        core.close()
    finally:
        executor.close()


def print_profile(profile: Profile) -> None:
    """A table per kind of step on standard output."""
    console = make_console()
    whole = sum(sum(found.parts.values()) for found in profile.kinds.values())
    for kind, found in profile.kinds.items():
        if not found.steps:
            continue
        total = sum(found.parts.values())
        title = (
            f"{kind}: {found.steps} steps of {found.tokens / found.steps:,.1f} tokens, "
            f"{1e3 * total / found.steps:,.2f} ms each, {total / whole:.0%} of the time"
        )
        console.print(title, style="italic", highlight=False)
        table = make_table("", "part", "ms", "of step")
        for name, seconds in sorted(found.parts.items(), key=lambda part: part[1], reverse=True):
            table.add_row(name, f"{1e3 * seconds / found.steps:,.3f}", f"{seconds / total:.1%}")
        console.print(table)
        console.print(
            f"on the engine's thread: {1e3 * found.schedule / found.steps:,.3f} ms to make a plan, "
            f"{1e3 * found.update / found.steps:,.3f} ms to take in a result"
        )
