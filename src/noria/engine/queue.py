"""Requests that wait: an ordered queue, and beside it those that wait for a prefix that another one is computing.

Kept incrementally: a request costs O(log n) when it comes and goes, and nothing while it waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from noria.engine.history import Cause, History, Ring
from noria.engine.policy import Key, OrderKey
from noria.engine.request import Request, State

_COMPACT_FROM = 64
Entry = tuple[Key, Request]  # keys are unique, so requests are never compared


class Line(Protocol):
    """Requests in an order. Those that ended while they stood in it may stay until they surface."""

    def __len__(self) -> int:
        """Entries, those of ended requests too."""
        ...

    def push(self, key: Key, request: Request) -> None: ...

    def first(self) -> Request | None:
        """The first that has not ended."""
        ...

    def pop(self) -> Request:
        """Takes it out, right after `first` returned it."""
        ...

    def compact(self) -> None:
        """Drops the entries of ended requests."""
        ...


class Watcher(Protocol):
    """Hears of who waits."""

    def joined(self, request: Request) -> None:
        """It waits from now on, maybe again."""
        ...

    def left(self, request: Request) -> None:
        """It does not wait any more: it runs, or has ended."""
        ...

    def ended(self, request: Request) -> None:
        """It has ended, wherever it was."""
        ...


class OneLine:
    """All in the order of their keys."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, key: Key, request: Request) -> None:
        heapq.heappush(self._heap, (key, request))

    def first(self) -> Request | None:
        return heap_first(self._heap)

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def compact(self) -> None:
        self._heap = heap_compact(self._heap)


def heap_first(heap: list[Entry]) -> Request | None:
    """The first of a heap that waits; drops ended ones before it."""
    while heap:
        request = heap[0][1]
        if request.state is State.WAITING:
            return request
        heapq.heappop(heap)
    return None


def heap_compact(heap: list[Entry]) -> list[Entry]:
    """A heap of those that wait."""
    kept = [entry for entry in heap if entry[1].state is State.WAITING]
    heapq.heapify(kept)
    return kept


class WaitingQueue:
    """All waiting requests. Removed ones stay in the line until they surface or outnumber the others.

    Args:
        key: order of requests.
        line: keeps those in line in that order; None: one line for all.
        history: is told who waits for a prefix.

    Attributes:
        watcher: is told of who comes and goes.
    """

    def __init__(self, key: OrderKey, line: Line | None = None, history: History | None = None) -> None:
        self._key = key
        self._line: Line = OneLine() if line is None else line
        self._history = history or History(ring=Ring(1, 1))
        self.watcher: Watcher | None = None
        self._all: dict[int, Request] = {}  # by id, in the order in which they came
        self._parked: dict[int, deque[tuple[int, Request]]] = {}  # owner's id → (tokens it must compute first, request)
        self._parked_ids: dict[int, int] = {}  # id → owner's id

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all.values())

    @property
    def parked(self) -> int:
        return len(self._parked_ids)

    @property
    def oldest(self) -> float:
        """Submission time of the request that came first; only while there is one."""
        return next(iter(self._all.values())).submitted

    def push(self, request: Request) -> None:
        self._all[request.id] = request
        self._line.push(self._key(request), request)
        if self.watcher is not None:
            self.watcher.joined(request)

    def first(self) -> Request | None:
        """The first in line that is not parked."""
        return self._line.first()

    def pop(self) -> None:
        """Takes `first` out of the queue."""
        request = self._line.pop()
        del self._all[request.id]
        if self.watcher is not None:
            self.watcher.left(request)

    def park(self, owner: int, tokens: int) -> None:
        """Lets `first` wait until request `owner` has computed `tokens` tokens, or runs no longer."""
        request = self._line.pop()
        self._parked.setdefault(owner, deque()).append((tokens, request))
        self._parked_ids[request.id] = owner
        self._history.paused(request, Cause.PREFIX if owner >= 0 else Cause.GRAMMAR)

    def wake(self, owner: int, tokens: int | None) -> None:
        """`owner` has computed `tokens`, or (None) runs no longer: those who waited for it are in line again."""
        parked = self._parked.get(owner)
        if not parked:
            return
        keep: deque[tuple[int, Request]] = deque()
        for needed, request in parked:
            if tokens is not None and needed > tokens:
                keep.append((needed, request))
                continue
            del self._parked_ids[request.id]
            self._line.push(self._key(request), request)
            self._history.resumed(request)
        if keep:
            self._parked[owner] = keep
        else:
            del self._parked[owner]

    def remove(self, request: Request) -> None:
        """Forgets a request that has just been finished."""
        del self._all[request.id]
        if self.watcher is not None:
            self.watcher.left(request)
        owner = self._parked_ids.pop(request.id, None)
        if owner is not None:
            rest = deque(entry for entry in self._parked[owner] if entry[1] is not request)
            self._parked[owner] = rest
            if not rest:
                del self._parked[owner]
        in_line = len(self._all) - len(self._parked_ids)
        if len(self._line) > _COMPACT_FROM and len(self._line) > 2 * in_line:
            self._line.compact()
