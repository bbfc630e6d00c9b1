"""Policies: an order of requests, and a rule of when admission is open.

Pure functions of a request for the order; smaller runs first and is preempted last. Knows nothing of blocks or slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from noria.config import Policy, SchedulerOptions
from noria.engine.request import Request
from noria.plan import Float64, Int32

Key = tuple[float, ...]
OrderKey = Callable[[Request], Key]


def fcfs(request: Request) -> Key:
    """By arrival. A resumed or preempted request keeps its place."""
    return (request.arrival, request.order)


def priority(request: Request) -> Key:
    """By the request's priority, smaller first, then by arrival."""
    return (request.priority, request.arrival, request.order)


# `fair` is an order of tenants (`engine/fair.py`) and within one tenant that of `priority`.
KEYS: dict[Policy, OrderKey] = {"fcfs": fcfs, "priority": priority, "fair": priority}


@dataclass(slots=True, frozen=True)
class Turn:
    """Who takes part in a step, and who comes first in it.

    Attributes:
        served: [slots] what the tenant of each slot has been served; those served less come first. None: tenants are
            not told apart, and the order of requests is all.
        bound: tenants that have been served more take no part. inf: all take part.
        several: most tokens in rows of more than one token.
        kind: rows that may share the step: all, only those that decode, or only the others, which prefill.
    """

    served: Float64 | None = None
    bound: float = math.inf
    several: int = 2**31 - 1
    kind: Literal["any", "decode", "prefill"] = "any"

    @property
    def all(self) -> bool:
        """Whether all take part."""
        return self.bound == math.inf

    def order(self, slots: Int32) -> Int32:
        """Slots, given in the order of requests: by what their tenants have been served, then in that order."""
        return slots if self.served is None else slots[np.argsort(self.served[slots], kind="stable")]


EVERYONE = Turn()


class Kinds:
    """Whether prefill and decode share a step (`fusion`), or take turns while there is work of both kinds."""

    def __init__(self, fusion: bool) -> None:
        self._fusion = fusion
        self._decoded = False  # the last step

    def turns(self, turn: Turn) -> Iterator[Turn]:
        """What the next step may be, best first: the first that is not empty is taken, and no further one asked for."""
        for one in (turn,) if turn.all else (turn, EVERYONE):  # whose turn it is may not be able to use it
            if self._fusion:
                yield one
                continue
            for decode in (not self._decoded, self._decoded):
                self._decoded = decode
                # No tokens in rows of several: none is admitted either.
                yield replace(one, kind="decode", several=0) if decode else replace(one, kind="prefill")


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
    """Requests join at every step, but that an idle engine gathers them first.

    Args:
        interval: seconds that it does so from the first on.
        enough: as many need not wait for more.
    """

    def __init__(self, interval: float = 0.0, enough: int = 1) -> None:
        self._interval = interval
        self._enough = enough

    def quota(self, running: int, waiting: int, oldest: float, now: float) -> int:
        return 0 if self.delay(running, waiting, oldest, now) > 0.0 else waiting

    def admitted(self) -> None:
        pass

    def preempted(self) -> None:
        pass

    def blocked(self) -> None:
        pass

    def delay(self, running: int, waiting: int, oldest: float, now: float) -> float:
        if running or waiting >= self._enough or not self._interval:
            return 0.0
        return max(0.0, oldest + self._interval - now)


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
    if options.continuous:
        return Continuous(options.build_interval, slots)
    return Static(slots, options.static_timeout)
