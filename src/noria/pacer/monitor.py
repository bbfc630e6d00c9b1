"""The load monitor: what is asked of the engine, what that does to the machine, and where both are going.

It is told of requests and steps, and reads the rest itself. Between two readings nothing is woken: what a silence
means is worked out when the next one is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noria.messages import ARRIVALS_MEMORY
from noria.pacer.base import Load, StepShape
from noria.pacer.gauges import Device, Faded, Memory, Processors

SAMPLES = 1000  # kept
_LATELY = 32  # requests after which one weighs 1/e in the mean lengths
_WINDOW = 5.0  # seconds that trends are taken over
_LEAST = 4  # samples that make a trend
# Columns of the history.
_AT, _DEVICE, _MEMORY, _WAITING, _ARRIVING, _CPU, _RUNNING = range(7)
_TRENDS = slice(_DEVICE, _ARRIVING + 1)


@dataclass(slots=True, frozen=True)
class Census:
    """The requests that an engine has at one moment.

    Attributes:
        running, waiting: how many. context: mean tokens of a running one. output: mean tokens that those have made.
        oldest_wait: seconds; 0 if none waits. waiting_prompt: mean tokens that a waiting one has yet to compute before
            its first token.
        cache: share of the blocks that they hold.
    """

    running: int = 0
    waiting: int = 0
    context: float = 0.0
    output: float = 0.0
    oldest_wait: float = 0.0
    waiting_prompt: float = 0.0
    cache: float = 0.0


class Mean:
    """A mean in which values count less the more have come since."""

    __slots__ = ("_sum", "_weight")

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, total: float, count: int = 1) -> None:
        """So many more values, which are so much together."""
        keep = math.exp(-count / _LATELY)
        self._sum = keep * self._sum + (1.0 - keep) * total / count
        self._weight = keep * self._weight + 1.0 - keep

    def value(self, otherwise: float = 0.0) -> float:
        """`otherwise`: while there is none."""
        return self._sum / self._weight if self._weight else otherwise


class History:
    """The last SAMPLES samples, and the trends of the latest.

    Each is stored twice, SAMPLES rows apart, so that any number of the last ones lie together.
    """

    def __init__(self) -> None:
        self._rows = np.zeros((2 * SAMPLES, 7))
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, SAMPLES)

    def add(self, row: tuple[float, ...]) -> None:
        """One more, in the order of the columns. Its time is later than that of all before."""
        place = self._count % SAMPLES
        self._rows[place] = self._rows[place + SAMPLES] = row
        self._count += 1

    def rows(self, most: int = SAMPLES) -> NDArray[np.float64]:
        """[samples, 7] the last ones, oldest first: time, device, memory, waiting, arrival rate, CPU, running. Not to
        be kept: the next sample may change it."""
        end = (self._count - 1) % SAMPLES + SAMPLES + 1 if self._count else 0
        return self._rows[end - min(most, len(self)) : end]

    def trends(self, interval: float) -> tuple[float, float, float, float]:
        """Change per second of device, memory, waiting and arrival rate: the slope of the straight line with the least
        squares through the samples of the last seconds; 0 while there are too few.

        Args:
            interval: seconds between two samples, if there is no silence.
        """
        rows = self.rows(max(_LEAST, int(_WINDOW / interval) + 1))
        if not len(rows):
            return (0.0, 0.0, 0.0, 0.0)
        at = rows[:, _AT]
        first = int(at.searchsorted(at[-1] - max(_WINDOW, _LEAST * interval)))
        if len(rows) - first < _LEAST:
            return (0.0, 0.0, 0.0, 0.0)
        times = at[first:] - at[first:].mean()
        device, memory, waiting, arriving = (times @ rows[first:, _TRENDS] / (times @ times)).tolist()
        return (device, memory, waiting, arriving)


class Monitor:
    """All that is known of the load.

    Attributes:
        due: when the next sample is to be taken.

    Args:
        interval: seconds between two samples.
        device: what the steps run on.
        began: now, on the engine's clock.
        cpu, memory: readings of the machine.
        wall: seconds, `time.time()`.
    """

    def __init__(
        self,
        interval: float,
        device: Device,
        began: float,
        cpu: Processors | None = None,
        memory: Memory | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.history = History()
        self.device = device
        self._interval = interval
        self._cpu = cpu or Processors()
        self._memory = memory or Memory()
        self._wall = wall
        self.due = began
        self._arrivals = Faded(ARRIVALS_MEMORY, began)
        self._prompts, self._outputs = Mean(), Mean()
        self._trends = (0.0, 0.0, 0.0, 0.0)
        self._cpu.share(began)

    def arrived(self, prompt: int, now: float) -> None:
        """A request was submitted. `prompt`: tokens."""
        self._arrivals.add(1.0, now)
        self._prompts.add(prompt)

    def stepped(self, shape: StepShape, now: float) -> None:
        """A step has come to its end."""
        self.device.stepped(shape, now)

    def ended(self, count: int, tokens: int) -> None:
        """So many requests have come to their ends, with so many tokens of output together."""
        self._outputs.add(tokens, count)

    def sample(self, census: Census, now: float) -> None:
        """Takes a sample into the history, if it is time for one."""
        if now < self.due:
            return
        self.due += self._interval  # late ones do not add up
        if self.due <= now:  # there was a silence, or a long step
            self.due = now + self._interval
        device, memory = self.device.share(now), self._taken(now)
        self.history.add(
            (
                now,
                device or 0.0,
                memory,
                float(census.waiting),
                self._arrivals.rate(now),
                self._cpu.share(now),
                float(census.running),
            )
        )
        self._trends = self.history.trends(self._interval)

    def load(self, census: Census, now: float) -> Load:
        """What is known now. Processors, memory and trends are as of the last sample; the rest as of now."""
        rows = self.history.rows(1)
        device_trend, memory_trend, waiting_trend, arrival_trend = self._trends
        # A running request that is met at a random moment is half done on average.
        output = self._outputs.value(2.0 * census.output)
        return Load(
            at=now,
            time_of_day=self._time_of_day(),
            running=census.running,
            waiting=census.waiting,
            running_context=census.context,
            oldest_wait=census.oldest_wait,
            waiting_prompt=census.waiting_prompt,
            mean_prompt=self._prompts.value(),
            mean_output=output,
            arrival_rate=self._arrivals.rate(now),
            device=self.device.share(now),
            cpu=float(rows[-1, _CPU]) if len(rows) else 0.0,
            memory=float(rows[-1, _MEMORY]) if len(rows) else self._taken(now),
            cache=census.cache,
            device_trend=device_trend,
            memory_trend=memory_trend,
            waiting_trend=waiting_trend,
            arrival_trend=arrival_trend,
        )

    def _taken(self, now: float) -> float:
        """Share of the memory, the device's own if it has any."""
        own = self.device.memory()
        return self._memory.share(now) if own is None else own

    def _time_of_day(self) -> float:
        wall = self._wall()
        local = time.localtime(wall)
        return 3600.0 * local.tm_hour + 60.0 * local.tm_min + local.tm_sec + wall % 1.0
