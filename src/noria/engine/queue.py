"""Requests that wait: an ordered queue, and beside it those that wait for a prefix that another one is computing.

Kept incrementally: a request costs O(log n) when it comes and goes, and nothing while it waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from noria.engine.policy import Key, OrderKey
from noria.engine.request import Request, State

_COMPACT_FROM = 64


class WaitingQueue:
    """All waiting requests. Removed ones stay in the heap until they surface or outnumber the others."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._heap: list[tuple[Key, Request]] = []  # keys are unique, so requests are never compared
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
        heapq.heappush(self._heap, (self._key(request), request))

    def first(self) -> Request | None:
        """The first in line that is not parked."""
        heap = self._heap
        while heap:
            request = heap[0][1]
            if request.state is State.WAITING:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        """Takes `first` out of the queue."""
        _, request = heapq.heappop(self._heap)
        del self._all[request.id]

    def park(self, owner: int, tokens: int) -> None:
        """Lets `first` wait until request `owner` has computed `tokens` tokens, or runs no longer."""
        _, request = heapq.heappop(self._heap)
        self._parked.setdefault(owner, deque()).append((tokens, request))
        self._parked_ids[request.id] = owner

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
            heapq.heappush(self._heap, (self._key(request), request))
        if keep:
            self._parked[owner] = keep
        else:
            del self._parked[owner]

    def remove(self, request: Request) -> None:
        """Forgets a request that has just been finished."""
        del self._all[request.id]
        owner = self._parked_ids.pop(request.id, None)
        if owner is not None:
            rest = deque(entry for entry in self._parked[owner] if entry[1] is not request)
            self._parked[owner] = rest
            if not rest:
                del self._parked[owner]
        in_line = len(self._all) - len(self._parked_ids)
        if len(self._heap) > _COMPACT_FROM and len(self._heap) > 2 * in_line:
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapq.heapify(self._heap)
