"""The learned predictor: the sizes that a model of step times expects most of.

In the steady state each running request yields a token per step, and its place costs its successor's prompt: a batch
of B computes B · prompt / output tokens of prompts per step. So a batch has a mean step time, which is what a further
token takes (TPOT), and a rate at which requests end. With objectives: the largest rate whose latencies hold. Without:
the knee, where a further request no longer buys throughput.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from noria.pacer.base import Load, Objectives, Prediction, Sizes, StepShape
from noria.pacer.steptime import StepTimeModel

Floats = NDArray[np.float64]

_BATCHES = 128  # candidates
_BUDGETS = (0.125, 0.25, 0.5, 1.0)  # candidates, shares of the most
_LEAST_CHUNK = 16  # tokens of a prompt that a step must have room for
_KNEE = 0.99  # share of the best throughput that is as good
_STAY = 0.975  # share of the best rate that the sizes in force need to stay: what is learned is not more exact
_WIDE = 1.25  # most that a batch which buys no throughput may be larger than need be, to stay
_UNKNOWN_PROMPT, _UNKNOWN_OUTPUT = 128.0, 128.0  # tokens, before there was a request
_SURE = 8.0  # waiting requests that say as much of prompts to come as all that came before


@dataclass(slots=True, frozen=True)
class Outlook:
    """What candidates are expected to do, in the steady state. All [candidates].

    Attributes:
        batch, budget: the sizes. rate: requests that end per second.
        used: whether the budget lets prompts in as fast as the batch ends requests.
        step: mean seconds of a step. tpot, ttft: seconds, at the percentile of the objectives; `ttft` of a request
            that need not wait for a place.
    """

    batch: Floats
    budget: Floats
    rate: Floats
    used: NDArray[np.bool_]
    step: Floats
    tpot: Floats
    ttft: Floats


class LearnedPredictor:
    """See the module.

    Args:
        model: is told of each step by `learn`.
    """

    def __init__(self, model: StepTimeModel, objectives: Objectives) -> None:
        self.model = model
        self._objectives = objectives
        self._deviations = NormalDist().inv_cdf(objectives.percentile / 100.0)

    @property
    def trusted(self) -> bool:
        return self.model.trusted

    @property
    def error(self) -> float | None:
        error = self.model.error
        return error if np.isfinite(error) else None

    def learn(self, shape: StepShape, seconds: float) -> None:
        self.model.learn(shape, seconds)

    def predict(self, load: Load, now: Sizes, most: Sizes, least: int) -> Prediction:
        batch, budget = (column.copy() for column in _candidates(most, least))
        may_stay = least <= now.batch <= most.batch and now.budget <= max(most.budget, most.batch)
        # The last candidate is what is in force.
        batch[-1], budget[-1] = (now.batch, now.budget) if may_stay else (batch[0], budget[0])
        outlook = self._outlook(load, batch, budget)
        best, reason, good = self._best(outlook)
        if may_stay and good[-1] and outlook.rate[-1] >= _STAY * outlook.rate[best]:
            best = -1  # among sizes that are about as good, none is worth a change
        sizes = Sizes(int(outlook.batch[best]), int(outlook.budget[best]))
        return Prediction(sizes, reason, float(outlook.step[best]))

    def _best(self, outlook: Outlook) -> tuple[int, str, NDArray[np.bool_]]:
        """The best candidate, why, and which ones could take its place if their rate is about as large."""
        if self._objectives.ttft is None and self._objectives.tpot is None:
            best, reason = _knee(outlook), "a larger batch buys no throughput"
        else:
            within = self._within(outlook)
            if within is not None:
                return within
            best, reason = _knee(outlook), "no size keeps the objectives: the most throughput"
        return best, reason, outlook.batch <= _WIDE * outlook.batch[best]

    def _within(self, outlook: Outlook) -> tuple[int, str, NDArray[np.bool_]] | None:
        """The candidate of the largest rate whose latencies hold, why, and which ones hold; None: none does."""
        ttft, tpot, every = self._objectives.ttft, self._objectives.tpot, outlook.used
        fast = every if tpot is None else every & (outlook.tpot <= tpot)
        soon = every if ttft is None else every & (outlook.ttft <= ttft)
        choices = [(fast & soon, "the largest rate within the objectives")]
        if tpot is not None and ttft is not None:
            choices.append((fast, "the largest rate within the TPOT objective; TTFT cannot be kept"))
            choices.append((soon, "the largest rate within the TTFT objective; TPOT cannot be kept"))
        for holding, reason in choices:
            if holding.any():
                return int(np.argmax(np.where(holding, outlook.rate, -1.0))), reason, holding
        return None

    def _outlook(self, load: Load, batch: Floats, budget: Floats) -> Outlook:
        prompt, output = _lengths(load)
        # Where prompts take the whole budget, fewer rows than the batch are decoding.
        rows = np.minimum(batch, budget / (1.0 + prompt / output))
        running = np.minimum(batch, load.running)
        context = (running * load.running_context + (batch - running) * (prompt + 0.5 * output)) / batch
        fresh = rows * (prompt / output)  # tokens of prompts per step, in the mean
        chunk = np.minimum(np.maximum(budget - rows, 1.0), np.maximum(prompt, fresh))
        mixed = np.minimum(1.0, fresh / chunk)  # share of the steps that compute such a chunk
        shapes = np.zeros((2, len(rows), 5))  # without such a chunk, and with it
        shapes[:, :, 0], shapes[:, :, 1] = rows, rows * context
        shapes[1, :, 2], shapes[1, :, 3], shapes[1, :, 4] = np.ceil(chunk / prompt), chunk, chunk * (0.5 * prompt)
        decode, chunked = self.model.predict(shapes)
        step = decode + mixed * (chunked - decode)
        # Who sees more chunks than others waits longer for a token.
        spread = (chunked - decode) * np.sqrt(mixed * (1.0 - mixed) / output)
        margin = self.model.margin(self._objectives.percentile, output)
        late = self.model.margin(self._objectives.percentile)
        return Outlook(
            batch,
            budget,
            rows / (output * step),
            batch <= rows + 1.0,
            step,
            margin * (step + self._deviations * spread),
            late * (0.5 * step + np.ceil(prompt / chunk) * chunked),
        )


def _lengths(load: Load) -> tuple[float, float]:
    """Tokens of the prompt and of the output of requests to come."""
    known = load.mean_prompt or _UNKNOWN_PROMPT
    prompt = (_SURE * known + load.waiting * load.waiting_prompt) / (_SURE + load.waiting)
    return max(1.0, prompt), max(1.0, load.mean_output or _UNKNOWN_OUTPUT)


@lru_cache(maxsize=4)
def _candidates(most: Sizes, least: int) -> tuple[Floats, Floats]:
    """[candidates] batch sizes and token budgets, each budget with room for the batch and a part of a prompt. The last
    is free for another."""
    least = max(1, min(least, most.batch))
    batches = np.unique(np.round(np.geomspace(least, most.batch, _BATCHES)))
    budgets = np.unique(np.floor(np.array(_BUDGETS) * most.budget))
    batch, budget = (axis.ravel() for axis in np.meshgrid(batches, budgets, indexing="ij"))
    budget = np.minimum(np.maximum(budget, batch + _LEAST_CHUNK), max(most.budget, most.batch))
    return np.append(batch, 0.0), np.append(budget, 0.0)


def _knee(outlook: Outlook) -> int:
    """The smallest candidate that is as good as the best."""
    good = outlook.rate >= _KNEE * outlook.rate.max()
    return int(np.lexsort((-outlook.budget, outlook.batch, ~good))[0])
