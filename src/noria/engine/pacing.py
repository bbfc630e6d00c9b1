"""What the pacer is told of the engine, and what its word does to the scheduler.

Counts; decides nothing.
"""

from __future__ import annotations

import logging
from itertools import islice

import msgspec
import numpy as np

from noria.engine.request import Request
from noria.engine.scheduler import Scheduler
from noria.pacer.base import StepShape
from noria.pacer.monitor import Census
from noria.pacer.pacer import Pacer
from noria.plan import StepPlan

_log = logging.getLogger(__name__)
_ASKED = 32  # waiting requests whose prompts stand for those of all


class Pacing:
    """One engine's. Should the pacer fail, the engine goes on without it, at the most that may be set: whatever it has
    learned is no reason to end anyone's request.

    Args:
        pacer: decides.
        scheduler: is bound by it.
    """

    def __init__(self, pacer: Pacer, scheduler: Scheduler) -> None:
        self.pacer = pacer
        self._scheduler = scheduler
        self._failed = False
        self._most = scheduler.sizes
        self._ended = (0, 0)  # requests that had, and their tokens, when the pacer was told last
        scheduler.bind(pacer.sizes)

    def arrived(self, request: Request, now: float) -> None:
        """It was submitted. One that comes back from a dead engine is no new load."""
        if not request.output_length:
            self.pacer.arrived(request.prompt_length, now)

    def collected(self, shape: StepShape, seconds: float, now: float) -> None:
        """The results of the oldest step are there, so long after its turn began."""
        if self._failed:
            return
        try:
            self.pacer.stepped(shape, seconds, now)
        except Exception as error:
            self._fail(error)

    def turn(self, now: float, compiling: int) -> None:
        """To be called before each step is planned. `compiling`: requests that wait for their grammars."""
        if self._failed or not self.pacer.is_due(now):
            return
        try:
            self._turn(now, compiling)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.error("the pacer has failed; sizes are the most from now on: %s", error, exc_info=error)
        self._failed = True
        self._scheduler.bind(self._most)
        self.pacer.give_up()

    def _turn(self, now: float, compiling: int) -> None:
        counters = self._scheduler.counters
        ended, tokens = counters.ended - self._ended[0], counters.ended_tokens - self._ended[1]
        if ended:
            self.pacer.ended(ended, tokens)
            self._ended = (counters.ended, counters.ended_tokens)
        sizes = self.pacer.turn(self._census(now, compiling), now)
        self._scheduler.bind(sizes)

    def decisions(self) -> bytes:
        """Those that are remembered, as msgpack."""
        return msgspec.msgpack.encode(list(self.pacer.decisions))

    def _census(self, now: float, compiling: int) -> Census:
        scheduler = self._scheduler
        waiting, running, counters = scheduler.waiting, scheduler.running, scheduler.counters
        context, output = running.lengths()
        count = max(1, len(running))
        first = [len(request.tokens) for request in islice(waiting, _ASKED)]
        # What the prefix cache has spared others, it will spare these.
        computed = 1.0 - counters.prefix_hits / max(1, counters.prefix_queries)
        blocks = scheduler.manager.counts()
        return Census(
            running=len(running),
            waiting=len(waiting) + compiling,
            context=context / count,
            output=output / count,
            oldest_wait=max(0.0, now - waiting.oldest) if first else 0.0,
            waiting_prompt=computed * sum(first) / len(first) if first else 0.0,
            cache=blocks.held / max(1, blocks.total),
        )


class Shapes:
    """What the steps compute, one after the other. A step that repeats the one before it costs no look at its rows."""

    def __init__(self) -> None:
        self._last = StepShape()

    def next(self, plan: StepPlan) -> StepShape:
        """Of the next step. To be told of every step."""
        last = self._last
        if plan.repeats:
            self._last = StepShape(last.decode_rows, last.decode_context + last.decode_rows)
        else:
            self._last = shape_of(plan)
        return self._last


def shape_of(plan: StepPlan) -> StepShape:
    """What a step computes. A token attends to all before it and to itself."""
    starts, counts = plan.starts, plan.counts
    rows, tokens = len(counts), plan.tokens
    seen = int(np.add.reduce(starts, dtype=np.int64))
    if tokens == rows:
        return StepShape(rows, seen + rows)
    several = np.flatnonzero(counts > 1)
    before, many = starts[several].astype(np.int64), counts[several].astype(np.int64)
    prefill = int(np.add.reduce(many))
    context = int(np.add.reduce(many * before + many * (many + 1) // 2))
    singles = rows - len(several)
    return StepShape(singles, seen - int(np.add.reduce(before)) + singles, len(several), prefill, context)
