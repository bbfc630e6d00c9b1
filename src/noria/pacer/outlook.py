"""When a request that comes now would have its first token, and how fast its answer would come: what a promise of
latency can be held against.

Plain functions of plain numbers, each in constant time. Knows no requests, no scheduler and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SOONEST, LATEST = 1.0, 60.0  # seconds: what anyone is told to wait


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
    return Miss("first", predicted, objective, min(LATEST, max(SOONEST, predicted - objective)))
