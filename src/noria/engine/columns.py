"""The running requests as columns, so that a step is planned by a few array operations.

One entry per slot, changed only where something changed. Lengths are *planned* ones: they count what is in flight.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from noria.engine.policy import EVERYONE, Key, Turn
from noria.engine.request import Request
from noria.plan import Int32


class Running:
    """Columns by slot, and the slots in the order of the policy.

    Attributes:
        computed: [slots] tokens whose keys and values are valid once all that is planned has run.
        known: [slots] tokens of the request, including those that are being sampled.
        goal: [slots] most tokens to compute. limit: [slots] most tokens. prompt: [slots] tokens of the prompt.
        capacity: [slots] tokens that fit the block table.
        requests: [slots] who has the slot.
        most: how many may run, up to the number of slots.
        changes: how often a request has come or gone.

    `computed` and `known` are up to date after `settle`: while steps repeat, nobody reads them.
    """

    def __init__(self, slots: int) -> None:
        self.computed = np.zeros(slots, np.int32)
        self.known = np.zeros(slots, np.int32)
        self.goal = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.prompt = np.zeros(slots, np.int32)
        self.capacity = np.zeros(slots, np.int32)
        self.requests: list[Request | None] = [None] * slots
        self.most = slots
        self.changes = 0
        self._repeated = 0  # tokens of every request that `computed` and `known` lack
        self._free = list(range(slots - 1, -1, -1))
        self._order: list[tuple[Key, int]] = []
        self._slots: Int32 | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        """In the order of the policy."""
        for _, slot in self._order:
            request = self.requests[slot]
            assert request is not None
            yield request

    @property
    def room(self) -> int:
        """How many may be added; below 0 while more run than may now."""
        return self.most - len(self._order)

    @property
    def slots(self) -> Int32:
        """[running] slots in the order of the policy. Not to be changed."""
        if self._slots is None:
            self._slots = np.fromiter((slot for _, slot in self._order), np.int32, len(self._order))
        return self._slots

    def owners(self, slots: Int32) -> list[Request]:
        """Who has these slots, all of them taken."""
        requests = self.requests
        return [requests[slot] for slot in slots.tolist()]

    def newest(self) -> Iterator[Request]:
        """Against the order of the policy."""
        for _, slot in reversed(self._order):
            request = self.requests[slot]
            assert request is not None
            yield request

    def add(self, request: Request, key: Key, computed: int, capacity: int) -> int:
        """Gives a request a slot and returns it. `computed`: tokens that it shares or copies."""
        slot = self._free.pop()
        self.requests[slot] = request
        self.computed[slot] = computed
        self.known[slot] = len(request.tokens)
        self.goal[slot] = request.goal
        self.limit[slot] = request.limit
        self.prompt[slot] = request.prompt_length
        self.capacity[slot] = capacity
        insort(self._order, (key, slot))
        self._slots = None
        self.changes += 1
        return slot

    def lengths(self) -> tuple[int, int]:
        """Tokens of all that run whose keys and values are valid once all that is planned has run, and tokens that they
        have made."""
        slots = self.slots
        computed = int(np.add.reduce(self.computed[slots])) + self._repeated * len(slots)
        known = int(np.add.reduce(self.known[slots])) + self._repeated * len(slots)
        return computed, max(0, known - int(np.add.reduce(self.prompt[slots])))

    def repeat(self) -> None:
        """A token more of every request is computed, and one known."""
        self._repeated += 1

    def settle(self) -> None:
        """Brings the lengths up to date."""
        if self._repeated:
            self.computed[self.slots] += self._repeated
            self.known[self.slots] += self._repeated
            self._repeated = 0

    def remove(self, slot: int, key: Key) -> None:
        self.settle()
        self.requests[slot] = None
        self._free.append(slot)
        del self._order[bisect_left(self._order, (key, slot))]
        self._slots = None
        self.changes += 1

    def divide(self, budget: int, turn: Turn = EVERYONE) -> tuple[Int32, Int32]:
        """The one rule: each request whose turn it is gets tokens until computed = known, within the budget.

        Rows with a single token to compute come first, so that a long prompt never delays another's next token.
        Returns slots and counts [rows].
        """
        slots = self.slots
        need = np.minimum(self.known[slots], self.goal[slots]) - self.computed[slots]
        if turn.served is not None:
            need[turn.served[slots] > turn.bound] = 0
        if turn.kind != "any":
            decodes = (need == 1) & (self.computed[slots] >= self.prompt[slots])
            need[decodes if turn.kind == "prefill" else ~decodes] = 0
        single = slots[need == 1]
        if len(single) > budget:
            single = turn.order(single)[:budget]
        if len(single) == budget or not (need > 1).any():
            return single, np.ones(len(single), np.int32)
        several = turn.order(slots[need > 1])
        wanted = np.minimum(self.known[several], self.goal[several]) - self.computed[several]
        before = np.cumsum(wanted) - wanted
        room = min(budget - len(single), turn.several)
        counts = np.clip(room - before, 0, wanted).astype(np.int32)
        some = counts > 0
        return (
            np.concatenate((single, several[some])),
            np.concatenate((np.ones(len(single), np.int32), counts[some])),
        )
