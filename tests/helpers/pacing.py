"""Stand-ins around the pacer: a clock that is set, a machine that is made up, predictors that say what they are told.

Intervals are an eighth of a second, which floats hold exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from noria.config import PacerOptions
from noria.pacer.base import Load, Prediction, Sizes, StepShape
from noria.pacer.gauges import Memory, Processing, Processors
from noria.pacer.monitor import Monitor
from noria.pacer.pacer import Pacer

NOWHERE = Path("/nowhere")
EIGHTH = 0.125
NOON = 1_800_000_000.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Machine:
    """Memory in bytes, processor time in seconds."""

    total: int = 1000
    available: int = 900
    used: float = 0.0


@dataclass
class Told:
    """A predictor, and a learner, that says `sizes`."""

    sizes: Sizes
    trusted: bool = True
    error: float | None = 0.05
    learned: list[tuple[StepShape, float]] = field(default_factory=list)
    asked: list[Load] = field(default_factory=list)

    def learn(self, shape: StepShape, seconds: float) -> None:
        self.learned.append((shape, seconds))

    def predict(self, load: Load, now: Sizes, most: Sizes, least: int) -> Prediction:
        self.asked.append(load)
        return Prediction(self.sizes, "as told", 0.01)


def make_monitor(machine=None, interval=EIGHTH, least=None, began=0.0, processors=2.0) -> Monitor:
    machine = machine or Machine()
    return Monitor(
        interval,
        Processing(least, began),
        began,
        Processors(processors, lambda: machine.used),
        Memory(lambda: machine, root=NOWHERE, membership=NOWHERE),
        wall=lambda: NOON,
    )


def make_pacer(most=None, learned=None, rules=None, monitor=None, **options) -> Pacer:
    options.setdefault("adjustment_interval", EIGHTH)
    return Pacer(
        PacerOptions(**options),
        most or Sizes(256, 512),
        monitor or make_monitor(),
        rules or Told(Sizes(9, 99)),
        learned,
        wall=lambda: NOON,
    )
