"""Policies: an order of requests, and a rule of when admission is open.

Pure functions of a request for the order; smaller runs first and is preempted last. Knows nothing of blocks or slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from noria.config import Policy, SchedulerOptions
from noria.engine.request import Request

Key = tuple[float, ...]
OrderKey = Callable[[Request], Key]


def fcfs(request: Request) -> Key:
    """By arrival. A resumed or preempted request keeps its place."""
    return (request.arrival, request.order)


def priority(request: Request) -> Key:
    """By the request's priority, smaller first, then by arrival."""
    return (request.priority, request.arrival, request.order)


KEYS: dict[Policy, OrderKey] = {"fcfs": fcfs, "priority": priority}


class Admission(Protocol):
    """When waiting requests may be admitted."""

    def quota(self, running: int, waiting: int, oldest: float, now: float) -> int:
        """How many may be admitted now. `oldest`: submission time of the request that has waited longest."""
        ...

    def admitted(self) -> None:
        """One was."""
        ...

    def preempted(self) -> None:
        """A running request went back to wait."""
        ...

    def blocked(self) -> None:
        """The first in line does not fit now."""
        ...

    def delay(self, running: int, waiting: int, oldest: float, now: float) -> float:
        """Seconds until `quota` may open by itself; 0 if it is open."""
        ...


class Continuous:
    """Requests join at every step."""

    def quota(self, running: int, waiting: int, oldest: float, now: float) -> int:
        return waiting

    def admitted(self) -> None:
        pass

    def preempted(self) -> None:
        pass

    def blocked(self) -> None:
        pass

    def delay(self, running: int, waiting: int, oldest: float, now: float) -> float:
        return 0.0


class Static:
    """The baseline: waits until a batch is full, or its oldest request has waited `timeout` seconds; then runs it until
    its last request has ended.

    A batch that does not fit the cache as a whole is cut off at the first request that does not.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self._size = size
        self._timeout = timeout
        self._left = 0  # members of the batch that have yet to be admitted

    def quota(self, running: int, waiting: int, oldest: float, now: float) -> int:
        self._left = min(self._left, waiting)  # members may have been aborted
        if running == 0 and self._left == 0 and self.delay(running, waiting, oldest, now) == 0.0:
            self._left = min(waiting, self._size)
        return self._left

    def admitted(self) -> None:
        self._left -= 1

    def preempted(self) -> None:
        self._left += 1

    def blocked(self) -> None:
        self._left = 0

    def delay(self, running: int, waiting: int, oldest: float, now: float) -> float:
        if running or self._left or waiting >= self._size:
            return 0.0
        return max(0.0, oldest + self._timeout - now)


def make_admission(options: SchedulerOptions, slots: int) -> Admission:
    return Continuous() if options.continuous else Static(slots, options.static_timeout)
