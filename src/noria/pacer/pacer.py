"""The pacer: asks the predictors for the best sizes from moment to moment, and remembers what it decided and why.

Between steps: the engine tells it what has happened, and asks now and then whether sizes have changed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from noria.config import PacerOptions
from noria.messages import PacerStats
from noria.pacer.adjuster import Adjuster
from noria.pacer.base import Decision, Learner, Load, Prediction, Predictor, Sizes, StepShape, Threshold, Who
from noria.pacer.monitor import Census, Monitor

if TYPE_CHECKING:  # an engine that does not need them does not load kernels
    from noria.pacer.leisure import Limits, Memory

DECISIONS = 1000  # kept


class Pacer:
    """What sets batch size and token budget.

    Args:
        options: as configured. Not enabled: it measures, and sets nothing.
        most: what the worker was made for.
        monitor: measures the load.
        rules: predictor by rules.
        learned: predictor that learns; None: rules alone.
        wall: seconds, `time.time()`.
        limits, memory: what there is to do besides, in an idle moment; None: nothing.

    Attributes:
        decisions: the last ones, oldest first.
    """

    def __init__(
        self,
        options: PacerOptions,
        most: Sizes,
        monitor: Monitor,
        rules: Predictor,
        learned: Learner | None,
        wall: Callable[[], float] = time.time,
        limits: Limits | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.monitor = monitor
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self._options = options
        self._most = most
        self._rules = rules
        self._learned = learned
        self._was_trusted = False
        self._adjuster = Adjuster(options.smoothing_factor, options.min_batch_size, most)
        self._wall = wall
        self._limits, self._memory = limits, memory
        self._number = 0
        self._last: float | None = None  # when it decided last
        self._next = -math.inf  # when it decides next
        self.stats = PacerStats(batch=most.batch, budget=most.budget)

    @property
    def sizes(self) -> Sizes:
        """In force."""
        return self._adjuster.sizes

    @property
    def learned(self) -> Learner | None:
        """The predictor that learns."""
        return self._learned

    def arrived(self, prompt: int, now: float) -> None:
        """A request was submitted. `prompt`: tokens."""
        self.monitor.arrived(prompt, now)

    def stepped(self, shape: StepShape, seconds: float, now: float) -> None:
        """A step has come to its end, so long after its turn began. Time without work is not part of it."""
        self.monitor.stepped(shape, now)
        if self._learned is not None:
            self._learned.learn(shape, seconds)

    def ended(self, count: int, tokens: int) -> None:
        """So many requests have come to their ends, with so many tokens of output together."""
        self.monitor.ended(count, tokens)

    def is_due(self, now: float) -> bool:
        """Whether `turn` has something to do."""
        return now >= self._next or now >= self.monitor.due

    def turn(self, census: Census, now: float) -> Sizes:
        """Takes a sample and decides, each if it is time; returns the sizes in force."""
        self.monitor.sample(census, now)
        if now >= self._next:
            load = self.monitor.load(census, now)
            if self._options.enabled:
                self._decide(load, now)
            else:
                self.stats = _stats(load, self._most)
            if self._memory is not None:
                self._memory.keep(now)
            self._last = now
            self._next += self._options.adjustment_interval  # late ones do not add up
            if self._next <= now:  # there was a silence, or a long step
                self._next = now + self._options.adjustment_interval
        return self.sizes

    def rest(self, now: float) -> bool:
        """A few milliseconds of what is to be done while the engine is idle; returns whether there is more."""
        if self._limits is not None and self._limits.piece(now):
            return True
        self._limits = None
        if self._memory is not None:
            self._memory.keep(now)
        return False

    def wake(self) -> None:
        """The engine is idle no longer."""
        if self._limits is not None:
            self._limits.give_up()

    def give_up(self) -> None:
        """It has failed: nothing of what it has learned is kept, nothing is done besides."""
        self.wake()
        self._limits = self._memory = None
        self.stats = PacerStats(batch=self._most.batch, budget=self._most.budget, decisions=self._number)

    def close(self) -> None:
        """No step will follow."""
        self.wake()
        if self._memory is not None:
            self._memory.close()

    def _decide(self, load: Load, now: float) -> None:
        before, options = self.sizes, self._options
        who, prediction = self._ask(load, before)
        reached = self._reached(load)
        target = prediction.sizes
        if reached and target.batch > before.batch:
            target = Sizes(before.batch, min(target.budget, before.budget))
        elapsed = options.adjustment_interval if self._last is None else now - self._last
        after = self._adjuster.move(target, elapsed / options.adjustment_interval)
        self._number += 1
        error = None if self._learned is None else self._learned.error
        decision = Decision(
            number=self._number,
            at=now,
            time=self._wall(),
            load=load,
            predictor=who,
            prediction=prediction,
            error=error,
            trusted=who == "learned",
            before=before,
            after=after,
            reached=reached,
            reason=_reason(prediction, target, before, after, reached),
        )
        self.decisions.append(decision)
        self.stats = _stats(load, after, decision)

    def _ask(self, load: Load, now: Sizes) -> tuple[Who, Prediction]:
        """The learned predictor once it is trusted. Until then the most that may be set; if it lost trust, rules."""
        learned = self._learned
        if learned is not None and learned.trusted:
            self._was_trusted = True
            return "learned", learned.predict(load, now, self._most, self._options.min_batch_size)
        if learned is not None and not self._was_trusted:
            return "most", Prediction(self._most, "step times are not known well enough yet")
        return "rules", self._rules.predict(load, now, self._most, self._options.min_batch_size)

    def _reached(self, load: Load) -> tuple[Threshold, ...]:
        reached: list[Threshold] = []
        if load.device is not None and load.device > self._options.device_threshold:
            reached.append("device")
        if load.memory > self._options.memory_threshold:
            reached.append("memory")
        return tuple(reached)


def _reason(prediction: Prediction, target: Sizes, before: Sizes, after: Sizes, reached: tuple[Threshold, ...]) -> str:
    """Why the sizes are what they are."""
    parts = [prediction.reason]
    if target != prediction.sizes:
        parts.append(f"does not grow: {' and '.join(reached)} beyond the threshold")
    if after == before and target.batch != after.batch:
        parts.append(f"stays at {after.batch} until it is sure that {target.batch} is no stray")
    elif after.batch != target.batch:
        parts.append(f"{after.batch} on the way to {target.batch}")
    return "; ".join(parts)


def _stats(load: Load, sizes: Sizes, decision: Decision | None = None) -> PacerStats:
    measured = PacerStats(
        batch=sizes.batch,
        budget=sizes.budget,
        device=load.device,
        cpu=load.cpu,
        memory=load.memory,
        arrival_rate=load.arrival_rate,
    )
    if decision is None:
        return measured
    return replace(
        measured,
        step_seconds=decision.prediction.step_seconds,
        model_error=decision.error,
        trusted=decision.trusted,
        predictor=decision.predictor,
        device_reached="device" in decision.reached,
        memory_reached="memory" in decision.reached,
        decisions=decision.number,
    )
