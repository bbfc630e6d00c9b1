"""The requests that an engine has: who waits, who runs, what each holds, from submission to its end.

Takes care that slots, blocks and what is kept by request go together when one comes or leaves. Decides nothing.
"""

from __future__ import annotations

from noria.cache.manager import BlockTable, CacheManager
from noria.config import SchedulerOptions
from noria.engine.columns import Running
from noria.engine.fair import make_tenancy
from noria.engine.history import History
from noria.engine.outputs import Outputs
from noria.engine.policy import KEYS
from noria.engine.prefix import Prefixes
from noria.engine.queue import WaitingQueue
from noria.engine.request import Request, State
from noria.engine.stats import Counters
from noria.messages import FinishReason


class Members:
    """Args: as of `Scheduler`.

    Attributes:
        requests: all that have not ended, by id. waiting, running: each of them is in one of these.
        tenancy: who they are for. prefixes: what they share.
        released: slots given up since the last plan.
        scoring: slots that owe prompt log-probabilities.
        frees: how often a table's blocks have been freed.
        uncompiled: requests that wait for nothing but their grammars, and have not been handed on for it.
    """

    def __init__(self, manager: CacheManager, options: SchedulerOptions, slots: int, history: History) -> None:
        self.requests: dict[int, Request] = {}
        self.tenancy = make_tenancy(options, slots)
        self._key = KEYS[options.policy]
        self.waiting = WaitingQueue(self._key, self.tenancy.line, history)
        self.running = Running(slots)
        self.prefixes = Prefixes(manager, self.waiting, slots)
        self.counters = Counters()
        self.released: list[int] = []
        self.scoring: set[int] = set()
        self.frees = 0
        self.uncompiled: list[Request] = []
        self._prefetch = options.prefetch
        self._manager = manager
        self._history = history

    def submit(self, request: Request, now: float, outputs: Outputs) -> None:
        """Queues a request; one that needs nothing any more (a resumed one at its end) finishes at once."""
        self.requests[request.id] = request
        request.chain = request.chain or self._manager.chain(request.salt)
        if self._prefetch:
            self.prefixes.look_ahead(request)
        self.tenancy.joined(request, now)
        self.waiting.push(request)
        self._history.queued(request)
        if request.output_length and (reason := ending(request)):
            last = request.tokens[-1]
            self.finish(request, reason, now, outputs, last if reason == "stop" else None)

    def ready(self, request: Request) -> bool:
        """Whether the first in line has its grammar, if it needs one. Otherwise it is out of line until `wake`."""
        if request.params.grammar is None or request.grammar is not None:
            return True
        self.waiting.park(~request.id, 0)  # a number that no request has
        self.uncompiled.append(request)
        return False

    def wake(self, request: Request) -> None:
        """Its grammar is there: it has its place in line again."""
        self.waiting.wake(~request.id, None)

    def enter(self, request: Request, table: BlockTable, computed: int) -> None:
        """The first in line gets a slot. `computed`: tokens that it shares."""
        self.waiting.pop()
        capacity = len(table.blocks) * self._manager.block_size
        slot = self.running.add(request, self._key(request), computed, capacity)
        request.state, request.slot, request.table, request.confirmed = State.RUNNING, slot, table, computed
        self.tenancy.started(request)
        self.prefixes.started(request)
        if request.wants_prompt_logprobs:
            request.scores.clear()  # of an earlier time
            self.scoring.add(slot)

    def extend(self, slot: int, size: int) -> list[int] | None:
        """New blocks for the request in a slot, so that `size` tokens fit; None if there are too few."""
        request = self.running.requests[slot]
        assert request is not None
        assert request.table is not None
        blocks = self._manager.grow(request.table, size)
        if blocks is not None:
            self.running.capacity[slot] = len(request.table.blocks) * self._manager.block_size
        return blocks

    def preempt(self, request: Request, idle_from: int) -> None:
        """Back to waiting; it will compute again what the cache has given up by then, and go on as if nothing was.

        Args:
            idle_from: the last step that may still yield a token for it.
        """
        self._leave(request)
        request.state = State.WAITING
        request.preemptions += 1
        request.confirmed = 0
        request.idle_from = idle_from
        self.waiting.push(request)
        self.counters.preemptions += 1
        self._history.preempted(request, idle_from)

    def finish(
        self, request: Request, reason: FinishReason, now: float, outputs: Outputs, stop_id: int | None = None
    ) -> None:
        """It has come to its end, which is said."""
        self.forget(request, reason)
        outputs.add_finished(request, reason, now, stop_id)

    def fail(self, request: Request, message: str, now: float, outputs: Outputs) -> None:
        """It cannot go on."""
        self.forget(request, "error")
        outputs.add_finished(request, "error", now, message=message)

    def forget(self, request: Request, reason: FinishReason) -> None:
        """It has ended, wherever it was."""
        if request.output_length:
            self.counters.ended += 1
            self.counters.ended_tokens += request.output_length
        running = request.state is State.RUNNING
        request.state = State.FINISHED
        del self.requests[request.id]
        if running:
            self._leave(request)
        else:
            self.waiting.remove(request)
        self.tenancy.left(request)
        if self.waiting.watcher is not None:
            self.waiting.watcher.ended(request)
        self._history.ended(request, reason)

    def _leave(self, request: Request) -> None:
        """Takes slot and blocks from a request that runs no longer."""
        assert request.table is not None
        self.running.remove(request.slot, self._key(request))
        self.released.append(request.slot)
        self.scoring.discard(request.slot)
        self._manager.free(request.table)
        self.frees += 1
        request.table, request.slot = None, -1
        self.prefixes.stopped(request)


def ending(request: Request) -> FinishReason | None:
    """Why a request with output ends here, if it does. End tokens before `min_tokens` do not count, unless a grammar
    left nothing else."""
    params = request.params
    if request.tokens[-1] in request.stops and (
        request.output_length > params.min_tokens or params.grammar is not None
    ):
        return "stop"
    return "length" if len(request.tokens) >= request.limit else None
