"""Sharing the engine between tenants, fairly or not at all.

The fair policy keeps a virtual token counter for each tenant (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): the tokens that it has been served, divided by its share. The tenant with the smallest counter is
admitted first, computes first and is preempted last. Two things are ours. A tenant that comes back after a pause may
be behind the others by a bounded credit, so that one which asks now and then need not wait. And while a tenant is far
behind and waits for a first token, the steps are its own: the rows of those far ahead skip them, and give up slots and
blocks if it has none.

Decides who, never what: which tokens a request gets does not depend on it.
"""

from __future__ import annotations

import heapq
import math
from typing import Protocol

import numpy as np

from noria.config import SchedulerOptions
from noria.engine.columns import Running
from noria.engine.policy import EVERYONE, Key, Turn
from noria.engine.queue import Entry, Line, OneLine, heap_compact, heap_first
from noria.engine.request import Request
from noria.plan import Int32, StepPlan

# Weights of the paper: an output token costs a step of its row, a prompt token shares one with others.
_PROMPT, _OUTPUT = 1.0, 2.0
# In steps of the full budget. Ordinary steps keep tenants that all wait within about one of each other.
_FAR = 2  # so much more served is far ahead
_CREDIT = 8  # so far behind may be who comes back after a pause
# While several tenants are about, prompts of those not far behind fill a quarter of the budget at most: who comes in
# the middle of a step waits for its end.
_PART = 4
_ABOUT = 60.0  # seconds after its last request came that a tenant counts as being about; or until all have ended
_PRUNE_FROM = 1024  # tenants


class Tenancy(Protocol):
    """Who the engine works for. One method for each moment at which that matters."""

    line: Line

    def joined(self, request: Request, now: float) -> None:
        """It was submitted."""
        ...

    def left(self, request: Request) -> None:
        """It has ended."""
        ...

    def started(self, request: Request) -> None:
        """It has been given its slot."""
        ...

    def has(self, tenant: str) -> bool:
        """Whether any request of a tenant has not ended; if tenants are told apart."""
        ...

    def turn(self, running: Running, first: Request | None, now: float, budget: int) -> Turn:
        """Whose turn the next step is, of `budget` tokens. `first`: the first in line, if it could be admitted."""
        ...

    def may_start(self, request: Request, turn: Turn) -> bool:
        """Whether a waiting request may take part."""
        ...

    def charge(self, plan: StepPlan, prompts: Int32) -> None:
        """A step was planned. `prompts`: [slots] tokens of the prompt."""
        ...

    def victim(self, running: Running, most: int, bound: float = -math.inf) -> Request | None:
        """Whom to preempt of those that were preempted fewer than `most` times and whose tenants are beyond `bound`."""
        ...


class NoTenants:
    """Requests are all alike."""

    def __init__(self) -> None:
        self.line: Line = OneLine()

    def joined(self, request: Request, now: float) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def started(self, request: Request) -> None:
        pass

    def has(self, tenant: str) -> bool:
        return True

    def turn(self, running: Running, first: Request | None, now: float, budget: int) -> Turn:
        return EVERYONE

    def may_start(self, request: Request, turn: Turn) -> bool:
        return True

    def charge(self, plan: StepPlan, prompts: Int32) -> None:
        pass

    def victim(self, running: Running, most: int, bound: float = -math.inf) -> Request | None:
        return next((one for one in running.newest() if one.preemptions < most), None)


class Counters:
    """What each tenant has been served, by its number. Grows as tenants come; those that owe nothing are forgotten."""

    def __init__(self, credit: float) -> None:
        self.served = np.zeros(16)  # [numbers] weighted tokens divided by the share; only ever grows
        self.shares = np.ones(16)  # [numbers]
        self.unfinished = np.zeros(16, np.int64)  # [numbers] requests
        self.numbers: dict[str, int] = {}
        self._free = list(range(15, -1, -1))
        self._credit = credit
        self._floor = 0.0  # what those who have work have all been served at least; only ever grows
        self._prune_at = _PRUNE_FROM

    def number(self, tenant: str) -> int:
        """The number of a tenant, a new one if need be."""
        number = self.numbers.get(tenant)
        if number is None:
            if not self._free:
                self._grow()
            self.numbers[tenant] = number = self._free.pop()
            self.served[number] = 0.0
        return number

    def come_back(self, number: int) -> None:
        """A tenant with nothing in line has a request. What it did not use while it was away is lost but for the
        credit."""
        others = self.unfinished > 0
        others[number] = False
        if others.any():
            self._floor = max(self._floor, float(self.served[others].min()))
        self.served[number] = max(self.served[number], self._floor - self._credit)

    def leave(self, number: int) -> None:
        """One of its requests has ended."""
        self.unfinished[number] -= 1
        if not self.unfinished.any():
            self._floor = max(self._floor, float(self.served[number]))

    def prune(self) -> bool:
        """Forgets tenants, if there are many, that are away and would be given the credit anyhow. Whether it did."""
        if len(self.numbers) < self._prune_at:
            return False
        idle = (self.unfinished == 0) & (self.served <= self._floor - self._credit)
        for tenant, number in tuple(self.numbers.items()):
            if idle[number]:
                del self.numbers[tenant]
                self._free.append(number)
        self._prune_at = max(_PRUNE_FROM, 2 * len(self.numbers))
        return True

    def _grow(self) -> None:
        size = len(self.served)
        self._free = list(range(2 * size - 1, size - 1, -1))
        self.served = np.concatenate((self.served, np.zeros(size)))
        self.shares = np.concatenate((self.shares, np.ones(size)))
        self.unfinished = np.concatenate((self.unfinished, np.zeros(size, np.int64)))


class TenantLines:
    """A line for each tenant, and a heap of tenants: a request costs O(log n) as in a single line.

    A counter may have grown since its tenant was put into the heap; it is put back where it belongs when it surfaces.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._heaps: dict[int, list[Entry]] = {}  # by number
        self._tenants: list[tuple[float, int]] = []  # (served when put here, number), one for each of `_heaps`
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def has(self, number: int) -> bool:
        """Whether the tenant has a request in line."""
        return self._waits(number)

    def push(self, key: Key, request: Request) -> None:
        number = self._counters.numbers[request.tenant]
        heap = self._heaps.get(number)
        if heap is None:
            heap = self._heaps[number] = []
            heapq.heappush(self._tenants, (float(self._counters.served[number]), number))
        heapq.heappush(heap, (key, request))
        self._entries += 1

    def first(self) -> Request | None:
        tenants, served = self._tenants, self._counters.served
        while tenants:
            before, number = tenants[0]
            if served[number] > before:
                heapq.heapreplace(tenants, (float(served[number]), number))
            elif self._waits(number):
                return self._heaps[number][0][1]
            else:
                heapq.heappop(tenants)
                del self._heaps[number]
        return None

    def _waits(self, number: int) -> bool:
        """Whether any request of the tenant does; then it is the first of its heap."""
        heap = self._heaps.get(number)
        if not heap:
            return False
        before = len(heap)
        found = heap_first(heap) is not None
        self._entries -= before - len(heap)
        return found

    def pop(self) -> Request:
        self._entries -= 1
        return heapq.heappop(self._heaps[self._tenants[0][1]])[1]

    def compact(self) -> None:
        kept = {number: heap_compact(heap) for number, heap in self._heaps.items()}
        self._heaps = {number: heap for number, heap in kept.items() if heap}
        self._entries = sum(map(len, self._heaps.values()))
        self._tenants = [(float(self._counters.served[number]), number) for number in self._heaps]
        heapq.heapify(self._tenants)


class FairTenants:
    """The fair policy.

    Args:
        budget: most tokens of a step.
        slots: rows.
    """

    def __init__(self, budget: int, slots: int) -> None:
        self._counters = Counters(_CREDIT * budget * _PROMPT)
        self._lines = TenantLines(self._counters)
        self.line: Line = self._lines
        self._far = _FAR * budget * _PROMPT
        self._number = np.zeros(slots, np.int32)  # [slots] of the tenant that has it
        self._paid = np.zeros(slots, np.int32)  # [slots] prompt tokens that are not charged (again)
        self._latest = ("", -math.inf)  # who submitted last, and when
        self._other = -math.inf  # when anyone else did

    def joined(self, request: Request, now: float) -> None:
        counters, tenant = self._counters, request.tenant
        if counters.prune():
            self._lines.compact()  # numbers may mean others from now on
        number = counters.number(tenant)
        counters.shares[number] = request.share
        if not self._lines.has(number):
            counters.come_back(number)
        counters.unfinished[number] += 1
        if tenant != self._latest[0]:
            self._other = self._latest[1]
        self._latest = (tenant, now)

    def left(self, request: Request) -> None:
        self._counters.leave(self._counters.numbers[request.tenant])

    def started(self, request: Request) -> None:
        self._number[request.slot] = self._counters.numbers[request.tenant]
        # A prompt that is computed again because others needed its place has been charged.
        self._paid[request.slot] = request.prompt_length if request.preemptions else 0

    def has(self, tenant: str) -> bool:
        number = self._counters.numbers.get(tenant)
        return number is not None and bool(self._counters.unfinished[number])

    def turn(self, running: Running, first: Request | None, now: float, budget: int) -> Turn:
        if now - self._other > _ABOUT and np.count_nonzero(self._counters.unfinished) < 2:
            return EVERYONE
        slots, served = running.slots, self._counters.served[self._number]
        new = slots[running.computed[slots] < running.prompt[slots]]
        least = float(served[new].min()) if len(new) else math.inf
        if first is not None:
            least = min(least, self._served(first))
        far = least + self._far
        if (served[slots] > far).any():
            return Turn(served, far)
        return Turn(served, several=max(1, budget // _PART))

    def may_start(self, request: Request, turn: Turn) -> bool:
        return self._served(request) <= turn.bound

    def charge(self, plan: StepPlan, prompts: Int32) -> None:
        slots, ends = plan.slots, plan.starts + plan.counts
        prompt = np.minimum(ends, prompts[slots]) - np.maximum(plan.starts, self._paid[slots])
        tokens = _PROMPT * np.maximum(prompt, 0) + _OUTPUT * plan.sample
        counters = self._counters
        counters.served += np.bincount(self._number[slots], tokens, len(counters.served)) / counters.shares

    def victim(self, running: Running, most: int, bound: float = -math.inf) -> Request | None:
        """The newest of the tenant that has been served most."""
        found, highest = None, bound
        for request in running.newest():
            if request.preemptions < most and (served := self._served(request)) > highest:
                found, highest = request, served
        return found

    def _served(self, request: Request) -> float:
        return float(self._counters.served[self._counters.numbers[request.tenant]])


def make_tenancy(options: SchedulerOptions, slots: int) -> Tenancy:
    """The tenancy of a policy."""
    return FairTenants(options.max_num_batched_tokens, slots) if options.policy == "fair" else NoTenants()
