"""An engine in virtual time: the real scheduler over an executor that computes nothing and says how long it would take.

A run of minutes takes seconds, is the same on every machine, and can be repeated under another scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from noria.bench.trace import Row
from noria.bench.workloads import BenchRequest
from noria.config import EngineOptions
from noria.engine.core import EngineCore
from noria.engine.pacing import shape_of
from noria.errors import EngineError
from noria.messages import Vocabulary
from noria.pacer.base import Objectives, Sizes, StepShape
from noria.pacer.gauges import Memory, Processing, Processors
from noria.pacer.learned import LearnedPredictor
from noria.pacer.monitor import Monitor
from noria.pacer.pacer import Pacer
from noria.pacer.rules import RulePredictor
from noria.pacer.steptime import StepTimeModel
from noria.plan import StepPlan, StepResult, StepTimings, WorkerInfo

StepTime = Callable[[StepShape], float]
# SmolLM2-135M in int8 with an int8 cache on two cores with AVX-512: milliseconds of a step of so many rows, and of what
# comes on top for each token of a prompt and each cache position that is attended to.
_ROWS = ((0, 1.9), (1, 2.5), (8, 3.5), (16, 4.9), (32, 8.8), (64, 15.4), (100, 21.5), (256, 54.0))
_PROMPT_TOKEN = 0.125
_DECODE_CONTEXT = 0.00014
_PREFILL_CONTEXT = 0.00005
_VOCABULARY = 32_000
_NOWHERE = Path("nowhere")  # there is no control group
_NOON = 1_800_000_000.0


class VirtualClock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self._now = 1000.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def small_machine(shape: StepShape) -> float:
    """Seconds of a step on the machine of the tables above."""
    rows, milliseconds = zip(*_ROWS, strict=True)
    several = _PROMPT_TOKEN * shape.prefill_tokens + _PREFILL_CONTEXT * shape.prefill_context
    return 1e-3 * (float(np.interp(shape.decode_rows, rows, milliseconds)) + several + _context(shape))


def _context(shape: StepShape) -> float:
    return _DECODE_CONTEXT * shape.decode_context


def numbered_requests(rows: Sequence[Row], unit: float = 1.0) -> list[BenchRequest]:
    """Requests of known times and lengths, with prompts of different numbers instead of text.

    Args:
        rows: time of arrival, prompt tokens, output tokens. unit: seconds that a time of 1 stands for.
    """
    made, number = [], 0
    for at, tokens, output in rows:
        ids = tuple((number + index) % (_VOCABULARY - 1) + 1 for index in range(tokens))
        made.append(BenchRequest("", ids, output, at * unit))
        number += tokens
    return made


class SimulatedExecutor:
    """Steps one after the other on a clock; every token is 0.

    Args:
        seconds: what a step takes.
        noise: spread of a step's time, as a share of it; 0: none.
    """

    def __init__(
        self,
        options: EngineOptions,
        clock: VirtualClock,
        seconds: StepTime = small_machine,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._noise = noise
        self._random = Random(seed)
        self._free = 0.0  # when the device will be
        self._steps: deque[tuple[StepPlan, float, float]] = deque()  # with duration, and when it ends
        self.info = WorkerInfo(
            vocab_size=_VOCABULARY,
            max_model_len=4096,
            num_blocks=options.cache.num_blocks or 16384,
            block_size=options.cache.block_size,
            num_slots=options.scheduler.max_num_seqs,
            backend="simulated",
            isa="none",
            threads=0,
            weights="none",
            cache_dtype="none",
            weight_bytes=0,
            cache_bytes=0,
        )

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Nothing is ever read."""

    def compile_grammar(self, grammar: str) -> Future[Any]:
        """Raises EngineError: there is nothing to be sampled from."""
        raise EngineError("a simulated engine knows no grammars")

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        spread = self._random.lognormvariate(0.0, self._noise) if self._noise else 1.0
        lasts = self._seconds(shape_of(plan)) * spread if len(plan.slots) else 0.0
        self._free = max(self._free, self._clock.now()) + lasts
        self._steps.append((plan, lasts, self._free))

    def collect(self) -> StepResult:
        plan, lasts, ends = self._steps.popleft()
        self._clock.sleep(max(0.0, ends - self._clock.now()))
        slots = plan.slots[plan.sample]
        return StepResult(plan.step, slots, np.zeros(len(slots), np.int32), timings=StepTimings(forward=lasts))

    def close(self) -> None:
        """Nothing is held."""


def simulated_engine(
    options: EngineOptions, clock: VirtualClock, seconds: StepTime = small_machine, noise: float = 0.0
) -> EngineCore:
    """An engine whose steps take virtual time, with a pacer if the options want one."""
    executor = SimulatedExecutor(options, clock, seconds, noise)
    pacer = _pacer(options, clock) if options.pacer.enabled and options.scheduler.continuous else None
    return EngineCore(executor, options.cache, options.scheduler, clock.now, pacer)


@dataclass(frozen=True, slots=True)
class _Bytes:
    total: int = 2
    available: int = 2


def _pacer(options: EngineOptions, clock: VirtualClock) -> Pacer:
    """As `noria.pacer.start` makes it, but on a machine that is never short of anything, and without a memory."""
    wanted, began = options.pacer, clock.now()
    ttft, tpot = (None if value is None else value / 1e3 for value in (wanted.slo_ttft_ms, wanted.slo_tpot_ms))
    idle, empty = Processors(1.0, lambda: 0.0), Memory(_Bytes, _NOWHERE, _NOWHERE)
    learned = wanted.predictor == "learned"
    return Pacer(
        wanted,
        Sizes(options.scheduler.max_num_seqs, options.scheduler.max_num_batched_tokens),
        Monitor(wanted.monitoring_interval, Processing(None, began), began, idle, empty, lambda: _NOON),
        RulePredictor(wanted.rules, wanted.device_threshold, wanted.memory_threshold),
        LearnedPredictor(StepTimeModel(), Objectives(ttft, tpot, wanted.slo_percentile)) if learned else None,
        wall=lambda: _NOON,
    )
