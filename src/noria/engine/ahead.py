"""What waits before a request that comes now, by policy: sums that are kept as requests come and go.

Where an order cannot be foretold in constant time, less is said to be ahead than may be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from noria.config import Policy
from noria.engine.request import Request

_MOST_LEVELS = 64  # priorities that are looked at


class Before(NamedTuple):
    """Requests that come before another one, and tokens of their prompts that have yet to be computed. `firm`: nobody
    who comes later will pass it, as far as is known."""

    requests: int
    tokens: float
    firm: bool = True


class Ahead(Protocol):
    """The waiting requests, summed up."""

    def add(self, request: Request, tokens: float) -> None:
        """One waits, that has to compute so many tokens."""
        ...

    def discard(self, request: Request) -> None:
        """It does not wait any more."""
        ...

    def before(self, request: Request) -> Before:
        """What comes before a request like this one, were it to come now."""
        ...

    @property
    def all(self) -> Before:
        """All that wait."""
        ...


@dataclass(slots=True)
class Sum:
    """Requests and tokens of one priority, or of a tenant with this share."""

    requests: int = 0
    tokens: float = 0.0
    share: float = 1.0


class AllAhead:
    """First come, first served: all that wait."""

    def __init__(self) -> None:
        self._sizes: dict[int, float] = {}  # by id
        self._tokens = 0.0

    def add(self, request: Request, tokens: float) -> None:
        self._sizes[request.id] = tokens
        self._tokens += tokens

    def discard(self, request: Request) -> None:
        self._tokens -= self._sizes.pop(request.id)

    def before(self, request: Request) -> Before:
        return self.all

    @property
    def all(self) -> Before:
        return Before(len(self._sizes), self._tokens)


class PriorityAhead:
    """By priority: those of the same or a smaller one. More will come that pass it, of which nothing is known."""

    def __init__(self) -> None:
        self._sizes: dict[int, float] = {}
        self._tokens = 0.0
        self._levels: list[int] = []  # priorities of those that wait, ascending
        self._first = 2**63  # the smallest that ever came
        self._sums: dict[int, Sum] = {}  # by priority

    def add(self, request: Request, tokens: float) -> None:
        self._sizes[request.id] = tokens
        self._first = min(self._first, request.priority)
        level = self._sums.get(request.priority)
        if level is None:
            level = self._sums[request.priority] = Sum()
            insort(self._levels, request.priority)
        level.requests += 1
        level.tokens += tokens
        self._tokens += tokens

    def discard(self, request: Request) -> None:
        level, tokens = self._sums[request.priority], self._sizes.pop(request.id)
        level.requests -= 1
        level.tokens -= tokens
        self._tokens -= tokens
        if not level.requests:
            del self._sums[request.priority]
            del self._levels[bisect_left(self._levels, request.priority)]

    def before(self, request: Request) -> Before:
        requests, tokens = 0, 0.0
        for priority in self._levels[:_MOST_LEVELS]:
            if priority > request.priority:
                break
            requests += self._sums[priority].requests
            tokens += self._sums[priority].tokens
        return Before(requests, tokens, request.priority <= self._first)

    @property
    def all(self) -> Before:
        return Before(len(self._sizes), self._tokens)


class FairAhead:
    """Shared between tenants: those of its own, and of all others as many as their shares are worth meanwhile."""

    def __init__(self) -> None:
        self._sizes: dict[int, float] = {}
        self._sums: dict[str, Sum] = {}  # by tenant, of those that wait
        self._tokens, self._shares = 0.0, 0.0  # of all that wait, and of their tenants

    def add(self, request: Request, tokens: float) -> None:
        self._sizes[request.id] = tokens
        self._tokens += tokens
        own = self._sums.get(request.tenant)
        if own is None:
            own = self._sums[request.tenant] = Sum(share=request.share)
            self._shares += own.share
        own.requests += 1
        own.tokens += tokens

    def discard(self, request: Request) -> None:
        own, tokens = self._sums[request.tenant], self._sizes.pop(request.id)
        self._tokens -= tokens
        own.requests -= 1
        own.tokens -= tokens
        if not own.requests:
            del self._sums[request.tenant]
            self._shares = self._shares - own.share if self._sums else 0.0

    def before(self, request: Request) -> Before:
        own = self._sums.get(request.tenant)
        if own is None:
            return Before(0, 0.0)
        turns = max(1.0, self._shares / own.share)
        return Before(min(len(self._sizes), int(own.requests * turns)), min(self._tokens, own.tokens * turns))

    @property
    def all(self) -> Before:
        return Before(len(self._sizes), self._tokens)


def make_ahead(policy: Policy) -> Ahead:
    """The sums of a policy."""
    if policy == "fair":
        return FairAhead()
    return PriorityAhead() if policy == "priority" else AllAhead()
