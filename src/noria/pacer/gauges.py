"""What can be read of the machine at any moment: processors, memory, and a GPU where there is one.

Each reading is a share from 0 to 1. No history, no decisions.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from noria.observe.cgroup import MEMBERSHIP, ROOT, memory_groups, processors
from noria.pacer.base import StepShape

_SECOND = 1.0  # of the engine's clock, over which a device's share is averaged


class Faded:
    """A sum whose parts weigh less the longer ago they came: exp(-age / memory). Right at any moment that it is read,
    however long nothing has come.

    Args:
        memory: seconds. began: when counting began.
    """

    __slots__ = ("_at", "_began", "_memory", "_sum")

    def __init__(self, memory: float, began: float) -> None:
        self._memory = memory
        self._began = self._at = began
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        """So much has come."""
        self._sum = self._at_time(now) + amount
        self._at = max(self._at, now)

    def rate(self, now: float) -> float:
        """How much comes per second, lately. At first as if counting had begun a second ago at least."""
        age = max(_SECOND, now - self._began)
        return self._at_time(now) / (self._memory * (1.0 - math.exp(-age / self._memory)))

    def _at_time(self, now: float) -> float:
        return self._sum * math.exp(min(0.0, (self._at - now) / self._memory))


class Processors:
    """Share of the processors that this process may use that it does use, all its threads together.

    Args:
        count: processors' worth of time; None: as affinity and control groups allow.
        used: seconds of processor time so far.
    """

    def __init__(self, count: float | None = None, used: Callable[[], float] = time.process_time) -> None:
        self._count = processors() if count is None else count
        self._used = used
        self._last: tuple[float, float] | None = None  # when, and used by then
        self._share = 0.0

    def share(self, now: float) -> float:
        """Since the last reading."""
        used, last = self._used(), self._last
        if last is None:
            self._last = (now, used)
        elif now > last[0]:
            self._share = min(1.0, max(0.0, (used - last[1]) / ((now - last[0]) * self._count)))
            self._last = (now, used)
        return self._share


class Memory:
    """Share of the memory that this process may use that is taken, by whomever: of the machine's, or of the tightest
    control group's. Read anew once a second, which is more than the price of a reading bears."""

    def __init__(
        self,
        machine: Callable[[], Any] | None = None,
        root: Path = ROOT,
        membership: Path = MEMBERSHIP,
    ) -> None:
        self._machine = machine or _machine_memory
        self._groups = memory_groups(root, membership)
        self._read = -math.inf
        self._share = 0.0

    def share(self, now: float) -> float:
        """As of a second ago at most."""
        if now - self._read >= _SECOND:
            self._read = now
            machine = self._machine()
            shares = [1.0 - machine.available / machine.total]
            for group in self._groups:
                if (left := group.left) is not None:
                    shares.append(1.0 - left / group.limit)
            self._share = min(1.0, max(0.0, *shares))
        return self._share


def _machine_memory() -> Any:
    import psutil  # which refuses to be loaded on systems that it does not know

    return psutil.virtual_memory()


class Device(Protocol):
    """How much of what the device can do is done."""

    def stepped(self, shape: StepShape, now: float) -> None:
        """A step has come to its end."""
        ...

    def share(self, now: float) -> float | None:
        """Of late; None: not known (yet)."""
        ...

    def memory(self) -> float | None:
        """Share of its own memory that is taken; None: it has none of its own."""
        ...


class Least(Protocol):
    """The least seconds that steps can take on a device."""

    def __call__(self, shape: StepShape, steps: int = 1) -> float:
        """Of so many steps, the sum of which is `shape`."""
        ...


class _Sum:
    """Steps, summed up."""

    __slots__ = ("columns", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.columns = [0, 0, 0, 0, 0]

    def add(self, shape: StepShape) -> None:
        self.steps += 1
        columns = self.columns
        columns[0] += shape.decode_rows
        columns[1] += shape.decode_context
        if shape.prefill_rows:
            columns[2] += shape.prefill_rows
            columns[3] += shape.prefill_tokens
            columns[4] += shape.prefill_context

    def seconds(self, least: Least) -> float:
        return least(StepShape(*self.columns), self.steps) if self.steps else 0.0


class Processing:
    """A CPU as device: the share of what it can do at its measured limits, not of its time, which the kernels' threads
    take whole at any batch.

    Steps are only summed up as they come, those with prompts apart: what they could have taken at least is worked out
    when the share is read.

    Args:
        least: at the device's limits; None: they are not known (yet).
        began: when counting began.
    """

    def __init__(self, least: Least | None, began: float) -> None:
        self._least = least
        self._work = Faded(_SECOND, began)
        self._plain, self._mixed = _Sum(), _Sum()

    def know(self, least: Least, now: float) -> None:
        """From now on the limits are known."""
        self._least, self._work = least, Faded(_SECOND, now)
        self._plain, self._mixed = _Sum(), _Sum()

    def stepped(self, shape: StepShape, now: float) -> None:
        (self._mixed if shape.prefill_rows else self._plain).add(shape)

    def share(self, now: float) -> float | None:
        if self._least is None:
            return None
        if self._plain.steps or self._mixed.steps:
            self._work.add(self._plain.seconds(self._least) + self._mixed.seconds(self._least), now)
            self._plain, self._mixed = _Sum(), _Sum()
        return min(1.0, self._work.rate(now))

    def memory(self) -> float | None:
        return None


class Nvidia:
    """A GPU, by its management library. Its share is that of the time in which any kernel ran: the library knows no
    better one."""

    def __init__(self, library: Any, index: int = 0) -> None:
        self._library = library
        library.nvmlInit()
        self._handle = library.nvmlDeviceGetHandleByIndex(index)

    def stepped(self, shape: StepShape, now: float) -> None:
        pass

    def share(self, now: float) -> float | None:
        try:
            return float(self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100.0
        except self._library.NVMLError:  # the driver may be busy, or unable to say
            return None

    def memory(self) -> float | None:
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(self._handle)
        except self._library.NVMLError:
            return None
        return float(memory.used) / float(memory.total) if memory.total else None


def find_nvidia(name: str = "pynvml") -> Nvidia | None:
    """The first GPU that the management library sees; None if there is no library, no driver or no GPU."""
    try:
        library = importlib.import_module(name)
    except ImportError:
        return None
    try:
        return Nvidia(library)
    except library.NVMLError:
        return None
