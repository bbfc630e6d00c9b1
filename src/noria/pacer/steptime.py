"""What a step takes on this machine, learned from the steps that have run.

A step's time is modelled as level × mood × θ·x(shape). θ, never negative, says what each feature costs; the features
grow with the shape, so that a larger step is never predicted to be quicker and what has not run yet is extrapolated
sanely. θ is fitted by recursive least squares with forgetting, on relative errors (steps take from 2 ms to 300 ms),
which a running scale clips (Huber), so that a page fault teaches little. What a feature has taught is forgotten only
while the feature is taught anew: hours of decoding do not forget what prefill costs. What no step has taught yet is
taken from a typical profile, stretched to the steps seen.

The mood of the machine, fast when a neighbour is gone and slow when one takes half of the processor, is one more
unknown of the same fit, and one that drifts: an error is put down to the mood where θ is sure of the shape, and taught
to θ where it is not. The level is what remains of moods.

Knows shapes and seconds; no clock, no engine.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noria.pacer.base import StepShape

Floats = NDArray[np.float64]

_COLUMNS = 5  # of a shape: decode rows and context, prefill rows, tokens and context
FEATURES = MOOD = 8
SIZES = 17  # powers of two, of the tokens of steps
_BLOCK_SECONDS = 0.25  # steps are taken in together when they took so long in all, or ...
_BLOCK_STEPS = 100  # ... are so many, so that 400 steps a second cost no more than a few
_WARM_UP = 32  # steps whose errors say more of the model than of the machine: they are not clipped, and set no level
_MEMORY = 0.998  # per step: what is left of what a feature has taught
_DRIFT = 0.13  # variance that a step adds to the mood's, in units of that of an error
_MOOD_BELIEF = 0.3  # steps that speak for no mood at all
_LEVEL_RATE = 0.05  # per step: share of the mood that the level takes over
_LEVEL_FADE = 0.01  # per step: share of the level that θ takes over
_SCALE_RATE = 0.05  # per step, of the running scale of errors
_LEAST_SCALE = 0.02
_STRETCH_RATE = 0.05  # per step, of the profile's stretch
_CLIP = 2.0  # errors beyond so many scales count as if they were as large
_MOST_LEVEL = math.log(16.0)  # of level and mood, each
_ABSURD = 50.0  # a mood that is none; natural logarithm
_FAR = 4.0  # a step is weighted by what it was expected to take, within this factor of what it took
_REMEMBERED = 256  # errors
_LEAST_STEPS = 64  # before the model is trusted
_LEAST_ALIKE = 8  # steps of a size, that it counts as seen
_LEAST_SIZES = 2  # powers of two that the numbers of tokens have to fall in, ...
_MANY_STEPS = 256  # ... but for so many steps: an engine that is full from its start sees no other size
_GOOD, _BAD = 0.25, 0.4  # median error below which the model becomes trusted, above which it ceases to be
_HOPELESS = 0.7  # median error of all that are remembered, above which the model is better forgotten
_SHORTEST, _LONGEST = 1e-6, 3600.0  # seconds that a step can take
_ERROR = (-1.0, 0)  # no percentile
# Seconds per feature: a least-squares fit to a model of 135M parameters on two cores, for batches of 1 to 256 and
# contexts of 128 to 8192 tokens, all within 10 %. Only the proportions matter.
_PROFILE = np.array((2.3, 0.75, 1.2, 5.2, 9.2, 0.4, 10.0, 2.0)) * 1e-3
# What it is believed for: each shape as much as one step.
_TYPICAL = np.array(
    (
        (1, 256, 0, 0, 0),
        (4, 4096, 0, 0, 0),
        (16, 4096, 0, 0, 0),
        (64, 16384, 0, 0, 0),
        (256, 65536, 0, 0, 0),
        (0, 0, 1, 128, 8192),
        (32, 8192, 2, 256, 16384),
        (0, 0, 4, 1024, 131072),
    ),
    np.float64,
)


class Fit(NamedTuple):
    """What a model has learned, to be stored and taken up again (`StepTimeModel.fit`)."""

    theta: list[float]  # [FEATURES] seconds
    information: list[list[float]]  # [FEATURES, FEATURES]
    stretch: float
    sizes: list[int]  # [SIZES] steps seen by power of two of their tokens
    steps: int


class StepTimeModel:
    """Learns one machine's step times for one model. See the module.

    Args:
        fit: what an earlier model has learned; taken with a small part of its certainty, as the machine may have
            another day.
    """

    def __init__(self, fit: Fit | None = None) -> None:
        self._pending: list[tuple[int, int, int, int, int, float]] = []
        self._begin()
        if fit is not None:
            self._take_up(fit)

    def _begin(self) -> None:
        """Knows nothing."""
        self.steps = 0
        self._theta = np.zeros(FEATURES)
        # Of θ, and of the mood as one more feature.
        self._information = np.zeros((FEATURES + 1, FEATURES + 1))
        self._rest = np.zeros(FEATURES + 1)  # gradient at θ and mood: what bounds leave
        self._stretch = 0.0  # of the profile to the steps seen, at level 1; natural logarithm
        self._level = self._mood = 0.0  # natural logarithms
        self._scale = 0.3  # mean absolute logarithm of taken / predicted
        self._sizes = np.zeros(SIZES, np.int64)
        # [steps, 2] seconds taken, and predicted before they were learned from; the latest first.
        self._past = np.zeros((0, 2))
        self._trusted = False
        self._told: dict[tuple[float, int], float] = {}  # errors and margins since the last steps were taken in
        self._pending_seconds = 0.0

    def _take_up(self, fit: Fit) -> None:
        self.steps = fit.steps
        self._theta = np.array(fit.theta)
        # Worth a few dozen steps, whatever it was: a different day on the machine is followed quickly.
        self._information[:FEATURES, :FEATURES] = np.array(fit.information) * min(1.0, _WARM_UP * (1.0 - _MEMORY))
        self._stretch = fit.stretch
        self._sizes = np.array(fit.sizes, np.int64)

    @property
    def fit(self) -> Fit:
        """What it has learned so far."""
        self.settle()
        factor = math.exp(self._level)  # the mood will be another
        return Fit(
            (factor * self._theta).tolist(),
            (self._information[:FEATURES, :FEATURES] / factor**2).tolist(),  # of rows divided by seconds, squared
            self._stretch + self._level,
            self._sizes.tolist(),
            self.steps,
        )

    @property
    def error(self) -> float:
        """Median absolute relative error of predictions made before the step ran, over the last few hundred steps;
        infinite before the first."""
        if not len(self._past):
            return math.inf
        error = self._told.get(_ERROR)
        if error is None:
            error = self._told[_ERROR] = float(np.median(np.abs(self._past[:, 1] / self._past[:, 0] - 1.0)))
        return error

    @property
    def trusted(self) -> bool:
        """Whether enough steps of enough different sizes were seen, and are predicted well. What was trusted stays so
        until its error is clearly too large."""
        several = int((self._sizes >= _LEAST_ALIKE).sum()) >= _LEAST_SIZES
        seen = self.steps >= (_LEAST_STEPS if several else _MANY_STEPS)
        self._trusted = seen and len(self._past) >= _WARM_UP and self.error <= (_BAD if self._trusted else _GOOD)
        return self._trusted

    def margin(self, percent: float, steps: float = 1.0) -> float:
        """Factor on a prediction that `percent` percent of the runs of so many successive steps, taken together, have
        kept within of late; 1 while unknown."""
        length = max(1, min(int(steps), len(self._past) // 4))
        if len(self._past) < length:
            return 1.0
        margin = self._told.get((percent, length))
        if margin is not None:
            return margin
        sums = np.cumsum(np.vstack((np.zeros(2), self._past)), axis=0)
        taken, predicted = (sums[length:] - sums[:-length]).T
        margin = self._told[percent, length] = float(np.percentile(taken / predicted, percent))
        return margin

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step has taken so long. What cannot be a step's time is left out."""
        if not _SHORTEST < seconds < _LONGEST:
            return
        self._pending.append(
            (
                shape.decode_rows,
                shape.decode_context,
                shape.prefill_rows,
                shape.prefill_tokens,
                shape.prefill_context,
                seconds,
            )
        )
        self._pending_seconds += seconds
        if self._pending_seconds >= _BLOCK_SECONDS or len(self._pending) >= _BLOCK_STEPS:
            self.settle()

    def seconds(self, shape: StepShape) -> float | None:
        """What a step of this shape will take; None while no step has been seen."""
        if not self.steps:
            return None
        columns = np.array(
            (
                shape.decode_rows,
                shape.decode_context,
                shape.prefill_rows,
                shape.prefill_tokens,
                shape.prefill_context,
            ),
            np.float64,
        )
        return float(self.predict(columns))

    def predict(self, columns: Floats) -> Floats:
        """What steps will take: [...] seconds for [..., 5] decode rows, decode context, prefill rows, prefill tokens,
        prefill context, which need not be whole numbers. Next to nothing while no step has been seen."""
        predicted: Floats = np.maximum(
            math.exp(self._level + self._mood) * (features(columns) @ self._theta), _SHORTEST
        )
        return predicted

    def settle(self) -> None:
        """Takes in the steps that are pending. Happens by itself, a few times a second.

        Steps that nothing fits (of a microsecond, then of an hour) leave a fit that has no solution, or none but zeros,
        or one that says nothing of the steps that follow: everything is learned anew then.
        """
        if not self._pending:
            return
        block = np.array(self._pending, np.float64)  # [steps, columns and seconds]
        self._pending.clear()
        self._pending_seconds = 0.0
        self._told.clear()
        try:
            self._take_in(block)
        except (np.linalg.LinAlgError, OverflowError):
            self._begin()
        if not self._sane:
            self._begin()

    @property
    def _sane(self) -> bool:
        """Whether it is worth going on with what was learned."""
        if self.steps and not (math.isfinite(self._theta.sum()) and self._theta.any() and abs(self._mood) < _ABSURD):
            return False
        return len(self._past) < _REMEMBERED or self.error < _HOPELESS

    def _take_in(self, block: Floats) -> None:
        """[steps, columns and seconds]. Raises LinAlgError if there is no solution."""
        x, taken = features(block[:, :_COLUMNS]), block[:, _COLUMNS]
        predicted = np.maximum(math.exp(self._level + self._mood) * (x @ self._theta), _SHORTEST)
        errors = np.log(taken / predicted)  # [steps]
        if self.steps:
            self._past = np.concatenate((np.column_stack((taken, predicted))[::-1], self._past))[:_REMEMBERED]
        self._fit(x, taken * math.exp(-self._level - self._mood), np.clip(errors, -_FAR, _FAR))
        self.steps += len(taken)
        powers = np.log2(np.clip(block[:, 0] + block[:, 3], 1.0, 65536.0)).astype(np.int64)
        self._sizes += np.bincount(powers, minlength=SIZES)

    def _judge(self, errors: Floats) -> Floats:
        """[steps] weight of each error: 1, or less beyond the clip. Moves the scale on."""
        if self.steps < _WARM_UP:
            return np.ones(len(errors))
        sizes = np.abs(errors)
        mean = float(np.minimum(sizes, 3.0 * self._scale).sum()) / len(errors)
        self._scale += (1.0 - (1.0 - _SCALE_RATE) ** len(errors)) * (mean - self._scale)
        self._scale = max(self._scale, _LEAST_SCALE)
        return np.minimum(1.0, _CLIP * self._scale / np.maximum(sizes, 1e-9))

    def _fit(self, x: Floats, taken: Floats, errors: Floats) -> None:
        """Recursive least squares over a block. `taken`: at level and mood 1; `errors`: its logarithm against θ·x."""
        share = max(1.0 / (1 + self.steps), 1.0 - (1.0 - _STRETCH_RATE) ** len(taken))
        self._stretch += share * (_middle(np.log(taken / (x @ _PROFILE))) - self._stretch)
        reference = np.maximum(x @ self._theta, _SHORTEST) if self.steps >= _WARM_UP else taken
        rows = np.ones((len(taken), FEATURES + 1))  # the mood's column stays
        rows[:, :FEATURES] = x / reference[:, None]
        residuals = errors if self.steps >= _WARM_UP else 1.0 - rows[:, :FEATURES] @ self._theta
        # A feature's information fades as often as the feature was there; that of pairs as the mean of both.
        fade = np.append(_MEMORY ** (0.5 * (x > 0.0).sum(axis=0)), 1.0)
        weighted = rows * self._judge(errors)[:, None]
        self._drift(len(taken))
        self._information *= np.multiply.outer(fade, fade)
        self._information += weighted.T @ rows
        self._rest = fade * self._rest + weighted.T @ residuals
        self._solve()
        moved = (1.0 - (1.0 - _LEVEL_RATE) ** len(taken)) * self._mood
        self._mood -= moved
        self._level = min(max(self._level + moved, -_MOST_LEVEL), _MOST_LEVEL)
        self._absorb((1.0 - (1.0 - _LEVEL_FADE) ** len(taken)) * self._level)

    def _absorb(self, share: float) -> None:
        """θ takes over so much of the level (a logarithm), which changes no prediction: a level that only ever rose
        while θ only ever fell would come to an end."""
        factor = math.exp(share)
        self._level -= share
        self._stretch += share
        self._theta *= factor
        self._rest[:FEATURES] /= factor
        self._information[:FEATURES] /= factor
        self._information[:, :FEATURES] /= factor

    def _drift(self, steps: int) -> None:
        """The mood may have become another one meanwhile: what was learned of it, and of θ given it, is worth less."""
        column = self._information[:, MOOD].copy()
        share = 1.0 / (1.0 / (_DRIFT * steps) + column[MOOD])
        self._rest -= column * (share * self._rest[MOOD])
        self._information -= np.multiply.outer(column, share * column)

    def _solve(self) -> None:
        """Moves θ and mood to the least squares, the profile's belief included; what would be negative is left out."""
        stretch = math.exp(self._stretch)
        belief = _BELIEF / stretch**2
        information = self._information.copy()
        information[:FEATURES, :FEATURES] += belief
        information[MOOD, MOOD] += _MOOD_BELIEF
        now = np.append(self._theta, self._mood)
        wanted = information[:, :FEATURES] @ self._theta + information[:, MOOD] * self._mood + self._rest
        wanted[:FEATURES] += belief @ (stretch * _PROFILE - self._theta)
        wanted[MOOD] -= _MOOD_BELIEF * self._mood
        found = np.zeros(FEATURES + 1)
        kept = np.arange(FEATURES + (self.steps >= _WARM_UP))
        while True:
            solved = np.linalg.solve(information[kept][:, kept], wanted[kept])
            good = (solved >= 0.0) | (kept == MOOD)
            if good.all():
                break
            kept = kept[good]
        found[kept] = solved
        self._rest -= self._information @ (found - now)
        self._theta, self._mood = found[:FEATURES], float(found[MOOD])


def _middle(values: Floats) -> float:
    """The (upper) median."""
    ordered: list[float] = sorted(values.tolist())
    return ordered[len(values) // 2]


def features(columns: Floats) -> Floats:
    """[..., FEATURES] of [..., 5] shapes, each of a size about 1 for a common step, none falling as a step grows.

    Products of matrices take up rows in tiles of 16 and cost hardly less below, as reading the weights takes as long:
    the first 16 tokens have a cost of their own. Beyond, a step is bound by arithmetic rather than memory, and a
    further token costs more. Rows that are sampled from cost the product with the vocabulary, contexts the attention.
    """
    decode, decode_context, prefill_rows, prefill, prefill_context = (columns[..., i] for i in range(_COLUMNS))
    tokens = decode + prefill
    made = np.empty((*columns.shape[:-1], FEATURES))
    made[..., 0] = 1.0
    made[..., 1] = np.minimum(tokens, 16.0) / 16.0
    made[..., 2] = np.maximum(tokens - 16.0, 0.0) / 64.0
    made[..., 3] = decode / 64.0
    made[..., 4] = decode_context / 16384.0
    made[..., 5] = prefill_rows / 4.0
    made[..., 6] = prefill / 128.0
    made[..., 7] = prefill_context / 32768.0
    return made


_TYPICAL_ROWS = features(_TYPICAL) / (features(_TYPICAL) @ _PROFILE)[:, None]
# Information of the profile where it is stretched by 1; the diagonal keeps it solvable.
_BELIEF = _TYPICAL_ROWS.T @ _TYPICAL_ROWS + np.diag(np.full(FEATURES, 1e-3))


def profile_id() -> str:
    """Changes whenever the features or their typical costs do."""
    return f"{zlib.crc32(np.concatenate((_PROFILE, _TYPICAL_ROWS.ravel())).round(9).tobytes()):08x}"
