"""Refusing what would miss an objective (`--admission slo`): requests as they come, and such as have waited too long.

Keeps what is ahead of a request; the gate decides. Never concerned are requests that have begun, whatever became of
them since, and those that may not be shed (`Submit.sheddable`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from noria.config import Policy
from noria.engine.ahead import Before, make_ahead
from noria.engine.flight import Flight
from noria.engine.history import Cause
from noria.engine.request import Request, State
from noria.engine.scheduler import Scheduler
from noria.messages import Finished, Outlook, Shed
from noria.pacer.base import StepShape
from noria.pacer.gate import Gate
from noria.pacer.outlook import Miss, Scene, Speed

_MOST_LOOKS = 64  # requests that are dropped before one step, so that planning stays short
_COMPACT_FROM = 64
_NOTHING = Before(0, 0.0)


class Shedding:
    """One engine's.

    Args:
        gate: decides.
        scheduler: its waiting requests are watched.
        policy: by which they are ordered.
    """

    def __init__(self, gate: Gate, scheduler: Scheduler, policy: Policy) -> None:
        self._gate = gate
        self._scheduler = scheduler
        self._alike = policy == "fcfs"  # the same is ahead of all who come
        self._ahead = make_ahead(policy)
        self._line: deque[Request] = deque()  # those that may be shed, as they came; some have left since
        self._now = 0.0  # when the results of the last step were there
        self._under_way = 0  # steps
        self._known, self._left = (-1, -1), 0  # see `_unfinished`
        scheduler.waiting.watcher = self

    # ------------------------------------------------------------------------------------------------ what is told

    def joined(self, request: Request) -> None:
        """It waits from now on, maybe again."""
        again = request.admitted is not None
        self._ahead.add(request, float(len(request.tokens)) if again else request.to_compute)
        if request.sheddable and not again:
            self._line.append(request)
            if len(self._line) > _COMPACT_FROM and len(self._line) > 2 * len(self._scheduler.waiting):
                self._line = deque(filter(_may_be_shed, self._line))

    def left(self, request: Request) -> None:
        """It does not wait any more."""
        self._ahead.discard(request)

    def planned(self, flight: Flight, now: float) -> None:
        """A step is under way."""
        self._under_way += 1
        for admission in flight.plan.admitted:
            request = self._scheduler.running.requests[admission.slot]
            if request is not None and request.admitted == now:
                computed = request.prompt_length - request.cached_tokens
                self._gate.started(request.to_compute, computed)

    def collected(self, flight: Flight, shape: StepShape, seconds: float, now: float) -> None:
        """The results of the oldest step are there, so long after its turn began."""
        self._under_way -= 1
        self._gate.stepped(shape, seconds)
        for request, computed in flight.progress:
            if request.first is None and computed >= request.prompt_length:
                request.first = now
                if request.expected is not None:
                    self._gate.first_token(request.expected[0], now - request.submitted)
        self._now = now

    def ended(self, request: Request) -> None:
        """It has, wherever it was."""
        count, taken = request.output_length, None
        if count > 1 and request.first is not None:
            taken = (self._now - request.first) / (count - 1)
        if count:
            self._gate.ended(count, None if request.expected is None else request.expected[1], taken)

    # ------------------------------------------------------------------------------------------------ what is asked

    def refusal(self, request: Request, now: float) -> Finished | None:
        """Of a request that has just come: its end, if it is not to be taken."""
        request.waited += self._gate.delivery(request.arrival)
        gate, speed, before = self._gate, self._speed(now), self._ahead.before(request)
        scene = self._scene_of(request, before)
        # If the queue alone decides it, its prompt need not be looked at.
        miss = gate.full(scene, speed, request.waited) if request.sheddable else None
        if miss is None:
            request.to_compute = float(len(request.tokens) - self._cached(request))
            if before.firm and not request.output_length:  # what a dead engine had made would seem to take no time
                request.expected = gate.expected(scene, speed, request.to_compute)
            if request.sheddable:
                miss = gate.refuses(scene, speed, request.to_compute, request.waited)
        return None if miss is None else _end(request, miss, "door", now)

    def lost(self, now: float) -> list[Finished]:
        """The ends of requests that have waited so long that they cannot meet the objective any more. They are to be
        forgotten at once."""
        line, ends = self._line, list[Finished]()
        if not line or self._gate.objectives.ttft is None:
            return ends
        scene, speed = self._scene(_NOTHING), self._speed(now)
        while line and len(ends) < _MOST_LOOKS:
            request = line[0]
            if _may_be_shed(request):
                waited = now - request.submitted
                miss = self._gate.lost(scene, speed, request.to_compute, request.waited + waited)
                if miss is None:
                    break
                if request.expected is not None:
                    self._gate.first_token(request.expected[0], waited)
                ends.append(_end(request, replace(miss, retry_after=self._retry_after(request, speed)), "queue", now))
            line.popleft()
        return ends

    def outlook(self, now: float) -> Outlook:
        """What the shortest prompt would find, whoever sends it."""
        if not self._alike or not len(self._scheduler.waiting):
            return Outlook()  # nobody need be turned away before the engine has seen what it is
        return Outlook(*self._gate.outlook(self._scene(self._ahead.all), self._speed(now)))

    # ------------------------------------------------------------------------------------------------ what is there

    def _scene_of(self, request: Request, before: Before) -> Scene:
        """What a request finds that comes now."""
        scene = self._scene(before)
        if self._scheduler.tenancy.has(request.tenant):
            return scene
        return replace(scene, batch=max(scene.batch, scene.running + 1))  # others will give up a place for it

    def _scene(self, before: Before) -> Scene:
        scheduler, gate = self._scheduler, self._gate
        running, sizes = scheduler.running, scheduler.sizes
        full = bool(len(running)) and scheduler.closed is Cause.BLOCKS  # there are places, but no room in the cache
        return Scene(
            running=len(running),
            ahead=before.requests,
            tokens=self._unfinished() + gate.computed * before.tokens,
            batch=min(sizes.batch, len(running)) if full else sizes.batch,
            budget=sizes.budget,
            under_way=self._under_way,
            output=gate.output,
            prompt=gate.prompt,
        )

    def _unfinished(self) -> int:
        """Tokens of running prompts that no step computes yet. Worked out when something has changed."""
        running = self._scheduler.running
        known = self._scheduler.step, running.changes
        if self._known != known:
            slots = running.slots
            left = running.prompt[slots] - running.computed[slots]
            self._known, self._left = known, int(np.maximum(left, 0).sum())
        return self._left

    def _speed(self, now: float) -> Speed | None:
        return self._gate.speed(self._scheduler.sizes, self._context, now)

    def _context(self) -> float:
        """Mean cache positions of a row."""
        running = self._scheduler.running
        return running.lengths()[0] / max(1, len(running))

    def _cached(self, request: Request) -> int:
        """Tokens that the request need not compute, as far as can be seen now: others have, or are about to."""
        if request.wants_prompt_logprobs:
            return 0
        manager = self._scheduler.manager
        request.chain = manager.chain(request.salt)
        if request.chain is not None:
            request.chain.extend(request.tokens)
        match = manager.match(request.chain, request.tokens, len(request.tokens) - 1)
        return max(len(match.blocks) * manager.block_size, match.owner_tokens)

    def _retry_after(self, request: Request, speed: Speed | None) -> float:
        """For one that has waited in vain: when another like it would not."""
        return self._gate.later(self._scene(self._ahead.before(request)), speed, request.to_compute)


def _may_be_shed(request: Request) -> bool:
    """Whether it waits, and has done nothing else yet."""
    return request.state is State.WAITING and request.admitted is None


def _end(request: Request, miss: Miss, where: Shed, now: float) -> Finished:
    return Finished(
        request.id,
        "error",
        message=miss.message,
        queued_seconds=now - request.submitted,
        shed=where,
        retry_after=miss.retry_after,
    )
