"""When a request that comes now would have its first token, and how fast its answer would come: what an objective can
be held against.

Plain functions of plain numbers, each in constant time; what is predicted never falls as the queue, the prompts in it
or the request's own prompt grow. Knows no requests, no scheduler and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from noria.pacer.base import Sizes, StepShape

SOONEST, LATEST = 1.0, 60.0  # seconds: what anyone is told to wait


@dataclass(slots=True, frozen=True)
class Speed:
    """What a step takes: so many seconds, and so many for each row of one token and for each token of a prompt. None is
    below 0."""

    base: float
    row: float
    token: float

    def step(self, rows: float) -> float:
        """Seconds of a step of so many rows of one token."""
        return self.base + self.row * rows


@dataclass(slots=True, frozen=True)
class Scene:
    """What a request finds that comes now.

    Attributes:
        running: requests. ahead: of those that wait, how many come before it.
        tokens: of the prompts of all these, those that have yet to be computed.
        batch: most that run at once. budget: most tokens of a step.
        under_way: steps that were planned without it.
        output: mean tokens of an answer; None: not known. prompt: mean tokens of a prompt that have to be computed.
    """

    running: int
    ahead: int
    tokens: float
    batch: int
    budget: int
    under_way: int = 0
    output: float | None = None
    prompt: float = 0.0

    @property
    def rows(self) -> int:
        """How many will run, with it."""
        return max(1, min(self.batch, self.running + self.ahead + 1))

    @property
    def lacking(self) -> int:
        """How many must have ended before there is a place for it."""
        return max(0, self.running + self.ahead + 1 - self.batch)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits before it."""
        return not self.running and not self.ahead


def speed_of(seconds: Callable[[StepShape], float | None], sizes: Sizes, context: float) -> Speed | None:
    """The straight line through a model of step times: from one row to a full batch, and to a full budget.

    Args:
        seconds: the model; None where it knows nothing.
        context: mean cache positions that a row attends to.
    """
    rows, room = sizes.batch, max(1, sizes.budget - sizes.batch)
    per_row = int(context)
    one = seconds(StepShape(1, per_row))
    many = seconds(StepShape(rows, rows * per_row))
    full = seconds(StepShape(rows, rows * per_row, 1, room, room * per_row))
    if one is None or many is None or full is None:
        return None
    row = max(0.0, many - one) / max(1, rows - 1)
    return Speed(max(0.0, one - row), row, max(0.0, full - many) / room)


def further_token_seconds(scene: Scene, speed: Speed) -> float:
    """Mean time per token of its answer: a step with all who will run beside it, and, as the load stays what it is, a
    new prompt for each answer that ends meanwhile."""
    each = speed.step(scene.rows)
    if scene.output is None:
        return each
    return each + scene.rows * scene.prompt * speed.token / max(1.0, scene.output)


def wait_seconds(scene: Scene, speed: Speed) -> float:
    """Until its prompt's turn comes: those ahead must have left it a place, and their prompts must have been computed.

    Of a batch, answers of mean length end evenly. Both happen at the same time, so that the longer one counts.
    """
    places = 0.0
    if scene.lacking and scene.output is not None:
        places = scene.lacking * scene.output * further_token_seconds(scene, speed) / scene.rows
    steps = scene.tokens / max(1, scene.budget - scene.rows)
    prompts = scene.tokens * speed.token + steps * speed.step(scene.rows)
    return scene.under_way * speed.step(scene.rows) + max(places, prompts)


def first_token_seconds(scene: Scene, speed: Speed, prompt: float, stretch: float = 1.0) -> float:
    """Until its first token.

    Args:
        prompt: tokens of its own to compute, 1 at least.
        stretch: factor on what a straight line predicts.
    """
    # Its last step is waited for whole; where there is a queue, other prompts fill that.
    steps = max(1.0, prompt / max(1, scene.budget - scene.rows))
    tokens = max(prompt, scene.budget) if scene.ahead else prompt
    return stretch * (wait_seconds(scene, speed) + tokens * speed.token + steps * speed.step(scene.rows))


@dataclass(slots=True, frozen=True)
class Miss:
    """An objective that would not be kept. Seconds.

    Attributes:
        what: the first token, or each further one.
    """

    what: Literal["first", "further"]
    predicted: float
    objective: float
    retry_after: float

    @property
    def message(self) -> str:
        """For whoever is refused."""
        what = "the first token would come in" if self.what == "first" else "each further token would take"
        predicted, objective = _spoken(self.predicted), _spoken(self.objective)
        again = math.ceil(self.retry_after)
        return f"{what} about {predicted}, the objective is {objective}; try again in {again} s"


def _spoken(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{seconds * 1e3:.0f} ms"


def late_first_token(predicted: float, objective: float) -> Miss:
    """A first token that would come too late: by as much as the request should come later, if nothing else comes."""
    return Miss("first", predicted, objective, _bounded(predicted - objective))


def late_further_tokens(predicted: float, objective: float, scene: Scene) -> Miss:
    """Tokens that would come too slowly: until one of those that run has ended."""
    leaves = predicted * scene.output / scene.rows if scene.output is not None else SOONEST
    return Miss("further", predicted, objective, _bounded(leaves))


def _bounded(seconds: float) -> float:
    return min(LATEST, max(SOONEST, seconds))
