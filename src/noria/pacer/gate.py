"""Whether a request would meet the objectives: what has been measured of late, and a decision.

Told of steps, starts and ends; asked of each request as it comes, and of those that have waited long. Each costs
constant time. Knows no requests and no scheduler.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from noria.pacer.base import Objectives, Sizes, StepShape
from noria.pacer.outlook import (
    SOONEST,
    Miss,
    Scene,
    Speed,
    first_token_seconds,
    further_token_seconds,
    late_first_token,
    late_further_tokens,
    speed_of,
)

_LEAST_STEPS = 8  # before anything is predicted
_KEEP = 0.98  # per step: what is left of those before
_KEEP_ENDED = 0.95  # per request that has ended
_REFRESH = 0.1  # seconds after which the model is asked again
_REOPEN = 0.9  # share of the objective below which requests are taken again, once some were refused
_RELEVANT = 0.2  # share of the objective: where less was expected, what was taken says nothing of expectations
_LEAST_STRETCH, _MOST_STRETCH = 0.5, 4.0
_STRETCH_RATE = 0.1  # per request of which something was expected


class StepTimes(Protocol):
    """A model of what steps take (`StepTimeModel`)."""

    @property
    def trusted(self) -> bool: ...

    def seconds(self, shape: StepShape) -> float | None: ...


class Measured:
    """Step times of late, as a straight line: for when there is no model that can be trusted."""

    def __init__(self) -> None:
        self.steps = 0
        self._single = [0.0] * 5  # faded sums over steps of single tokens: steps, rows, seconds, rows², rows · seconds
        self._mixed = [0.0] * 4  # over others: steps, rows of one token, tokens of prompts, seconds

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step has taken so long."""
        self.steps += 1
        rows = float(shape.decode_rows)
        if shape.prefill_tokens:
            self._mixed = _faded(self._mixed, (1.0, rows, float(shape.prefill_tokens), seconds))
        else:
            self._single = _faded(self._single, (1.0, rows, seconds, rows * rows, rows * seconds))

    def speed(self) -> Speed | None:
        """None while too little is known."""
        if self.steps < _LEAST_STEPS:
            return None
        base = row = 0.0
        steps, rows, seconds, squares, products = self._single
        if steps:
            spread = squares / steps - (rows / steps) ** 2
            if spread > 1e-9 * squares / steps:
                row = max(0.0, (products / steps - rows * seconds / steps**2) / spread)
            row = min(row, seconds / rows)  # or a step of no row would be quicker than nothing
            base = seconds / steps - row * rows / steps
        steps, rows, tokens, seconds = self._mixed
        token = max(0.0, seconds - steps * base - row * rows) / tokens if tokens else 0.0
        return Speed(base, row, token)


def _faded(sums: list[float], values: tuple[float, ...]) -> list[float]:
    return [_KEEP * before + value for before, value in zip(sums, values, strict=True)]


@dataclass(slots=True)
class Quantile:
    """The value that a share of what is seen stays below, followed step by step (a stochastic approximation, in
    logarithms: values are above 0)."""

    share: float
    value: float = 1.0

    def see(self, value: float) -> None:
        """One more."""
        up = self.share if value > self.value else self.share - 1.0
        self.value = min(_MOST_STRETCH, max(_LEAST_STRETCH, self.value * math.exp(_STRETCH_RATE * up)))


class Gate:
    """See the module.

    Args:
        objectives: one of them at least.
        model: of step times, if there is one.
        wall: seconds, `time.time()`.
    """

    def __init__(
        self, objectives: Objectives, model: StepTimes | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self.objectives = objectives
        self._wall = wall
        self._last = 0.0  # seconds that the last step took
        self._model = model
        self._measured = Measured()
        self._speed: Speed | None = None
        self._speed_at = (-math.inf, Sizes(0, 0))
        self._ended = (0.0, 0.0)  # faded: requests, tokens of their answers
        self._prompts = (0.0, 0.0, 0.0)  # faded: requests, tokens that were thought to be computed, and that were
        share = objectives.percentile / 100.0
        self._stretch, self._drag = Quantile(share), Quantile(share)  # what was taken, to what was expected
        self._closed = False

    # ------------------------------------------------------------------------------------------------ what is told

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step has come to its end."""
        self._measured.learn(shape, seconds)
        self._last = seconds

    def ended(self, tokens: int, expected: float | None, taken: float | None) -> None:
        """A request has, with so many tokens of output. Seconds per further token: expected, and taken; None: not
        known."""
        count, total = self._ended
        self._ended = _KEEP_ENDED * count + 1.0, _KEEP_ENDED * total + tokens
        if expected is None or taken is None or expected <= _RELEVANT * (self.objectives.tpot or math.inf):
            return
        self._drag.see(taken / expected)

    def started(self, thought: float, computed: float) -> None:
        """A request has been given its place.

        Args:
            thought: tokens that it was to compute. computed: that it does, as others have computed the rest.
        """
        count, all_thought, all_computed = (_KEEP_ENDED * before for before in self._prompts)
        self._prompts = count + 1.0, all_thought + thought, all_computed + computed

    def first_token(self, expected: float, taken: float) -> None:
        """Seconds to the first token of a request: expected when it came, and taken, or at least so many."""
        if expected > _RELEVANT * (self.objectives.ttft or math.inf):
            self._stretch.see(taken / expected)

    # ------------------------------------------------------------------------------------------------ what is asked

    @property
    def output(self) -> float | None:
        """Mean tokens of answers that have ended of late."""
        count, total = self._ended
        return total / count if count else None

    @property
    def computed(self) -> float:
        """Share of the tokens of waiting prompts that will be computed, as it was of late."""
        _, thought, computed = self._prompts
        return min(1.0, computed / thought) if thought else 1.0

    @property
    def prompt(self) -> float:
        """Mean tokens of prompts that had to be computed, of late."""
        count, _, computed = self._prompts
        return computed / count if count else 0.0

    def speed(self, sizes: Sizes, context: Callable[[], float], now: float) -> Speed | None:
        """What steps take now; None: not known. Worked out a few times a second. `context`: see `speed_of`."""
        at, of = self._speed_at
        if self._speed is None or now - at >= _REFRESH or of != sizes:
            trusted = self._model is not None and self._model.trusted
            made = speed_of(self._model.seconds, sizes, context()) if self._model is not None and trusted else None
            self._speed = made or self._measured.speed()
            self._speed_at = now, sizes
        return self._speed

    def delivery(self, sent: float) -> float:
        """Seconds that a request was on its way, which was sent at this time of the wall clock: until the end of a step
        at most, whatever the clock says."""
        return min(max(0.0, self._wall() - sent), self._last)

    def full(self, scene: Scene, speed: Speed | None, waited: float) -> Miss | None:
        """What a request that comes would miss whatever its prompt is."""
        predicted, ttft, limit = self.outlook(scene, speed)
        if limit == 0.0 or waited + predicted <= limit:
            return None
        self._closed = True
        return late_first_token(waited + predicted, ttft)

    def refuses(self, scene: Scene, speed: Speed | None, prompt: float, waited: float) -> Miss | None:
        """Of a request that comes: what it would miss; None: it is to be taken. An idle engine takes everything.

        Args:
            prompt: tokens that it has to compute. waited: seconds since it was asked for.
        """
        if speed is None or scene.idle:
            self._closed = False
            return None
        ttft, tpot = self.objectives.ttft, self.objectives.tpot
        if ttft is not None:
            predicted = waited + first_token_seconds(scene, speed, prompt, self._stretch.value)
            self._closed = predicted > ttft * (_REOPEN if self._closed else 1.0)
            if self._closed:
                return late_first_token(predicted, ttft)
        if tpot is not None and (each := self._drag.value * further_token_seconds(scene, speed)) > tpot:
            return late_further_tokens(each, tpot, scene)
        return None

    def lost(self, scene: Scene, speed: Speed | None, prompt: float, waited: float) -> Miss | None:
        """Of one that has waited, and that nothing is ahead of: whether its first token will come too late whatever
        happens."""
        ttft = self.objectives.ttft
        if ttft is None or scene.idle:  # nothing holds it up any more
            return None
        rest = 0.0 if speed is None else first_token_seconds(scene, speed, prompt)
        return late_first_token(waited + rest, ttft) if waited + rest > ttft else None

    def later(self, scene: Scene, speed: Speed | None, prompt: float) -> float:
        """Seconds after which a request would be taken, if nothing else comes."""
        ttft = self.objectives.ttft
        if ttft is None or speed is None:
            return SOONEST
        return late_first_token(first_token_seconds(scene, speed, prompt, self._stretch.value), ttft).retry_after

    def expected(self, scene: Scene, speed: Speed | None, prompt: float) -> tuple[float, float] | None:
        """Seconds to the first token, and for each further one, before any correction; None: not known."""
        if speed is None:
            return None
        return first_token_seconds(scene, speed, prompt), further_token_seconds(scene, speed)

    def outlook(self, scene: Scene, speed: Speed | None) -> tuple[float, float, float]:
        """Seconds until the first token of the shortest prompt, the objective, and from when on nobody is taken now;
        zeros if they are unknown or of no concern."""
        ttft = self.objectives.ttft
        if ttft is None or speed is None or scene.idle:
            return 0.0, 0.0, 0.0
        limit = ttft * (_REOPEN if self._closed else 1.0)
        return first_token_seconds(scene, speed, 1.0, self._stretch.value), ttft, limit
