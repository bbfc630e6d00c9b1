"""What the pacer had better do while the engine has nothing to do: measure the machine's limits once, and keep what it
has learned for the next start."""

from __future__ import annotations

import logging
import math

from noria.pacer.gauges import Processing
from noria.pacer.limits import KnownLimits, Measuring, least_seconds
from noria.pacer.steptime import StepTimeModel
from noria.pacer.store import Key, save
from noria.plan import StepWork

_log = logging.getLogger("noria.pacer")
_WORTH = 32  # steps that make a model worth keeping anew
_EVERY = 60.0  # seconds after which one is kept though the engine is never idle


class Limits:
    """Finds the limits of the machine, and tells the device.

    Args:
        measuring: measures them.
        known: where they are kept. machine: name there.
    """

    def __init__(
        self, measuring: Measuring, known: KnownLimits, machine: str, work: StepWork, device: Processing
    ) -> None:
        self._measuring = measuring
        self._known = known
        self._machine = machine
        self._work = work
        self._device = device

    def piece(self, now: float) -> bool:
        """Does a small piece of it; returns whether there is more to do. Nothing that goes wrong here is worth an
        engine: it goes on without limits, and measures again at the next start."""
        try:
            found = self._measuring.piece()
        except Exception as error:  # no thread to be had, no memory
            _log.warning("the machine's limits cannot be measured: %s", error)
            return False
        if found is None:
            return True
        best = self._known.keep(self._machine, found)
        self._device.know(least_seconds(self._work, best), now)
        return False

    def give_up(self) -> None:
        """There is work; it begins anew when there is none."""
        self._measuring.give_up()


class Memory:
    """Keeps what a model of step times has learned."""

    def __init__(self, model: StepTimeModel, key: Key) -> None:
        self._model = model
        self._key = key
        self._steps = model.steps
        self._at = -math.inf

    def keep(self, now: float) -> None:
        """If there is enough that is new, once a minute at most."""
        if self._model.steps < self._steps:  # it has begun anew
            self._steps = 0
        if now - self._at >= _EVERY and self._model.steps >= self._steps + _WORTH:
            self._at, self._steps = now, self._model.steps
            save(self._key, self._model.fit)

    def close(self) -> None:
        """Keeps what there is, as nothing will follow."""
        self._at = -math.inf
        self.keep(0.0)
