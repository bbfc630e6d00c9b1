"""How fast requests end, and what that says to those who are told to come back later."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from noria.pacer.outlook import LATEST, SOONEST

_MEMORY = 30.0  # seconds after which what was counted weighs 1/e


class Pace:
    """The rate at which requests have ended lately, each weighing less the longer ago it was."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._at = clock()
        self._weight = 0.0

    def ended(self, count: int = 1) -> None:
        """So many have."""
        self._weight = self._faded() + count

    @property
    def rate(self) -> float:
        """Requests per second; 0 while none has ended lately."""
        weight, age = self._faded(), max(1.0, self._at - self._began)
        return weight / (_MEMORY * (1.0 - math.exp(-age / _MEMORY)))

    def seconds(self, count: int) -> float:
        """Until `count` more have ended, at this rate: within SOONEST and LATEST, SOONEST if nothing is known."""
        if self._weight == 0.0:
            return SOONEST
        rate = self.rate
        return min(LATEST, max(SOONEST, count / rate)) if rate > 0.0 else LATEST

    def _faded(self) -> float:
        now = self._clock()
        self._weight *= math.exp((self._at - now) / _MEMORY)
        self._at = now
        return self._weight
