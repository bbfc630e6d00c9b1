"""The scheduler: what each step computes, and what its results mean.

One rule: each running request is given tokens until computed = known, within the token budget. Running requests come
first, then waiting ones are admitted. Chunked prefill, prefix hits and resuming after a preemption are that one rule.

Plain data in, plain data out: no clock, no executor, no messages.
"""

from __future__ import annotations

import math

import numpy as np

from noria.cache.manager import BlockTable, CacheManager
from noria.config import SchedulerOptions
from noria.engine.flight import Draft, Flight, launch, repeat
from noria.engine.history import Cause, History
from noria.engine.members import Members, ending
from noria.engine.outputs import Outputs
from noria.engine.policy import Kinds, Turn, make_admission
from noria.engine.request import Request, State
from noria.engine.stats import Counters
from noria.errors import EngineError
from noria.messages import FinishReason
from noria.pacer.base import Sizes
from noria.plan import Admission, StepPlan, StepResult

_MOST_LOOKS = 64  # prefix lookups of one step that end without an admission, so that planning stays short


class Scheduler:
    """Owns all requests from submission to their end.

    Args:
        manager: the cache's blocks.
        options: batching.
        slots: rows that the worker has.
        history: is told what becomes of requests.

    Attributes:
        closed: why the last planning admitted no more. skipped: why running requests have no part in its step, if some
            have none.
    """

    def __init__(self, manager: CacheManager, options: SchedulerOptions, slots: int, history: History) -> None:
        self.manager = manager
        self._history = history
        self.closed = self.skipped = Cause.OPEN
        self._members = Members(manager, options, slots, history)
        self.requests = self._members.requests
        self.waiting, self.running = self._members.waiting, self._members.running
        self.counters = self._members.counters
        self.step = 0  # last planned
        self.collected = 0  # last whose results are in
        self._most = Sizes(slots, options.max_num_batched_tokens)
        self._sizes = self._most  # in force
        self._admission = make_admission(options, slots)
        self._kinds = Kinds(options.fusion)
        self._max_preemptions = options.max_preemptions
        self.tenancy, self._prefixes = self._members.tenancy, self._members.prefixes
        self._last: Flight | None = None  # planned
        self._stuck: tuple[Request, int] | None = None  # did not fit, when so many tables had been freed

    # ------------------------------------------------------------------------------------------ requests come and go

    def submit(self, request: Request, now: float, outputs: Outputs) -> None:
        """Queues a request; one that needs nothing any more (a resumed one at its end) finishes at once."""
        self._members.submit(request, now, outputs)

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Forgets a request and frees its blocks. A step under way may still write to them: it does so before any
        later step, so they can be handed out at once."""
        request = self.requests.get(request_id)
        if request is not None:
            self._members.forget(request, reason)

    def take_uncompiled(self) -> list[Request]:
        """Requests that could be admitted if their grammars were compiled. They are out of line until `compiled`."""
        taken, self._members.uncompiled = self._members.uncompiled, []
        return taken

    def compiled(self, request: Request, failure: str | None, now: float, outputs: Outputs) -> None:
        """The grammar of one of those is there, or cannot be had."""
        if failure is None:
            self._members.wake(request)
        else:
            self._members.fail(request, failure, now, outputs)

    def delay(self, now: float) -> float:
        """Seconds until there may be something to plan; 0 if there may be now."""
        if len(self.running) or not len(self.waiting):
            return 0.0
        if self.waiting.parked == len(self.waiting):
            return math.inf  # for something other than a step
        return self._admission.delay(0, len(self.waiting), self.waiting.oldest, now)

    def _preempt(self, request: Request) -> None:
        self._members.preempt(request, self.step)
        self._admission.preempted()

    # ------------------------------------------------------------------------------------------ planning

    @property
    def sizes(self) -> Sizes:
        """What the next step is bound by: most running requests, and most tokens. Those who run stay, be they more, and
        there is a token for each."""
        return Sizes(self._sizes.batch, self.budget)

    @property
    def budget(self) -> int:
        """Most tokens of the next step."""
        return min(self._most.budget, max(self._sizes.budget, len(self.running)))

    def bind(self, sizes: Sizes) -> None:
        """Sets other sizes, from the next step on, within those that the worker was made for. A smaller batch comes
        about as requests end: none is preempted for it. A budget has a token at least for each of a full batch."""
        batch = min(max(1, sizes.batch), self._most.batch)
        self._sizes = Sizes(batch, min(max(batch, sizes.budget), self._most.budget))
        self.running.most = batch

    def schedule(self, now: float, outputs: Outputs) -> Flight | None:
        """Plans the next step; None if nothing can be computed now."""
        last, self.closed = self._last, Cause.OPEN
        if last is not None and last.repeats and last.changes == self.running.changes and not len(self.waiting):
            self.step += 1
            self._last = repeat(last, self.running)
            self.tenancy.charge(self._last.plan, self.running.prompt)
            return self._last
        self.running.settle()
        for turn in self._kinds.turns(self._turn(now)):
            draft = self._draft(turn, now, outputs)
            if not draft.empty:
                self.skipped = _why_skipped(turn)
                break
        else:
            return None
        self.step += 1
        flight = launch(
            draft, self.step, self.running, self.manager.block_size, self._members.released, self._members.scoring
        )
        self._members.released = []
        self._last = flight
        self.tenancy.charge(flight.plan, self.running.prompt)
        self.counters.prompt_tokens += flight.prompt_tokens
        return flight

    def _turn(self, now: float) -> Turn:
        """Whose turn the step is. The first in line counts if there is room, or others can be made to leave."""
        first, running = self.waiting.first(), self.running
        if first is None or first.idle_from > self.collected or running.room < 0:
            return self.tenancy.turn(running, None, now, self.budget)
        turn = self.tenancy.turn(running, first, now, self.budget)
        if turn.all or (running.room > 0 and self._stuck != (first, self._members.frees)):
            return turn
        if self.tenancy.victim(running, self._max_preemptions, turn.bound) is None:
            return self.tenancy.turn(running, None, now, self.budget)
        self._stuck = None  # it did not fit beside one who has got too far ahead since
        return turn

    def tidy(self) -> StepPlan | None:
        """While nothing runs: what lets the worker forget those who ended last, before the next plan; None: nobody."""
        released, self._members.released, self._last = np.array(self._members.released, np.int32), [], None
        if not len(released):
            return None
        self.step = self.collected = self.step + 1
        return StepPlan(self.step, released=released)

    def _next(self) -> Request | None:
        """The first in line, unless it is known not to fit or has a token to come."""
        request = self.waiting.first()
        if request is None or request.idle_from > self.collected or self._stuck == (request, self._members.frees):
            return None
        return request

    def _draft(self, turn: Turn, now: float, outputs: Outputs) -> Draft:
        draft = self._continue(turn)
        if draft.preempted:
            self.closed = Cause.BLOCKS
        elif len(self.waiting):
            self.closed = self._admit(draft, turn, now, outputs)
        return draft

    def _continue(self, turn: Turn) -> Draft:
        """Rows of running requests whose turn it is, with room for every token. Preempts until there is."""
        running, draft = self.running, Draft(*self.running.divide(self.budget, turn))
        while True:
            ends = running.computed[draft.slots] + draft.counts
            short = np.flatnonzero(ends > running.capacity[draft.slots])
            if all(self._extend(int(draft.slots[row]), int(ends[row]), draft) for row in short):
                return draft
            # One that was preempted too often holds all the blocks it can need (`_size`), so it is neither chosen nor
            # ever the reason; hence the request that lacks a block can always be chosen itself.
            victim = self.tenancy.victim(running, self._max_preemptions)
            assert victim is not None
            draft.appended.pop(victim.slot, None)
            self._preempt(victim)
            draft.preempted = True
            draft.slots, draft.counts = running.divide(self.budget, turn)

    def _extend(self, slot: int, size: int, draft: Draft) -> bool:
        blocks = self._members.extend(slot, size)
        if blocks is not None:
            draft.appended.setdefault(slot, []).extend(blocks)
        return blocks is not None

    def _displace(self, turn: Turn) -> bool:
        """Preempts a request of a tenant whose turn it is not, so that another gets its place. Its row has no part in
        the step. Returns whether there was one."""
        if turn.all or self.running.room < 0:  # or its place could not be taken
            return False
        victim = self.tenancy.victim(self.running, self._max_preemptions, turn.bound)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def _size(self, request: Request) -> int:
        """Tokens that must fit the cache for the request to be admitted: all known ones or, if it was preempted too
        often, all that it can ever have."""
        return request.goal if request.preemptions >= self._max_preemptions else len(request.tokens)

    def _admit(self, draft: Draft, turn: Turn, now: float, outputs: Outputs) -> Cause:
        """Admits waiting requests in order, each with all blocks of its prompt, until something runs short. Returns
        what: the others wait for it."""
        quota = self._admission.quota(len(self.running), len(self.waiting), self.waiting.oldest, now)
        budget = min(self.budget - int(draft.counts.sum()), turn.several - int(draft.counts[draft.counts > 1].sum()))
        # Those who run will soon need blocks: admitting to the last one would preempt at the next step.
        share, looks = max(1, self.manager.counts().total // 100), _MOST_LOOKS
        while quota > 0 and budget > 0 and looks > 0:
            request = self._next()
            if request is None:
                return _why_none(self.waiting.first(), self.collected)
            if not self.tenancy.may_start(request, turn):
                return Cause.POLICY
            if self.running.room <= 0:
                if not self._displace(turn):
                    return Cause.CAP
                continue  # those who waited for what it computed are in line again, maybe before this one
            prefix = self._prefixes.find(request) if self._members.ready(request) else None
            if prefix is None:
                looks -= 1
                continue
            reserve = share if len(self.running) else 0
            table = self._prefixes.table(request, prefix, self._size(request), reserve, draft.copies)
            if table is None and self._displace(turn):
                continue
            if table is None:
                self._stuck = (request, self._members.frees)
                self._admission.blocked()
                return Cause.BLOCKS
            budget -= self._enter(request, table, prefix.tokens, budget, draft)
            quota -= 1
            if request.admitted is None:
                _note_start(request, prefix.tokens, now, self.counters, outputs)
        if quota <= 0:
            idle = Cause.OPEN if draft.admitted else Cause.GATHERING
            return Cause.STATIC if self._history.static else idle
        if self.running.room <= 0:
            return Cause.CAP
        if budget > 0:
            return Cause.LOOKUPS
        return Cause.BUDGET if turn.several > self.budget else _why_skipped(turn, Cause.POLICY)

    def _enter(self, request: Request, table: BlockTable, computed: int, budget: int, draft: Draft) -> int:
        """Gives the first in line a slot and its first tokens; returns how many."""
        self._members.enter(request, table, computed)
        self._history.entered(request, self.step + 1)
        self._admission.admitted()
        count = min(len(request.tokens) - computed, budget)
        draft.admitted_counts.append(count)
        draft.admitted.append(_admission(request, table))
        return count

    # ------------------------------------------------------------------------------------------ results

    def update(self, flight: Flight, result: StepResult, now: float, outputs: Outputs) -> None:
        """Takes in the results of the oldest flight. Those of requests that ended meanwhile are dropped."""
        if result.step != flight.plan.step or len(result.tokens) != len(flight.sampled):
            raise EngineError(f"step {flight.plan.step} was asked for, the executor answered step {result.step}")
        self.collected = result.step
        self.counters.steps += 1
        for piece in result.prompt_logprobs:
            flight.scored[piece.slot].scores.append(piece)
        for request, computed in flight.progress:
            if request.state is State.RUNNING:
                self._progress(request, computed)
            # One that was preempted after the step had begun may get its first token from it.
            if request.state is not State.FINISHED and computed >= request.prompt_length:
                self._note_prompt(request, now, outputs)
        self._accept(flight.sampled, result, now, outputs)

    def _progress(self, request: Request, computed: int) -> None:
        """`computed` tokens of a running request are valid: others may share them."""
        assert request.table is not None
        request.confirmed = computed
        self.manager.commit(request.table, request.tokens, computed)
        self.waiting.wake(request.id, computed)

    def _note_prompt(self, request: Request, now: float, outputs: Outputs) -> None:
        """Its whole prompt has been computed."""
        if request.wants_prompt_logprobs:
            request.wants_prompt_logprobs = False
            self._members.scoring.discard(request.slot)
            outputs.add_prompt_logprobs(request)
            request.scores.clear()
        if not request.samples:
            self._members.finish(request, "length", now, outputs)

    def _accept(self, sampled: list[Request], result: StepResult, now: float, outputs: Outputs) -> None:
        """A new token each, of running requests or of such as were preempted after the step had begun."""
        ids, tokens, scores = outputs.request_ids, outputs.tokens, result.logprobs
        before = len(ids)
        for row, (request, token) in enumerate(zip(sampled, result.tokens.tolist(), strict=True)):
            if request.state is State.FINISHED:
                continue
            if row in result.failed:
                self._members.fail(request, result.failed[row], now, outputs)
                continue
            if scores is not None and request.params.logprobs is not None:
                outputs.add_logprobs(request, token, row, scores)
            known = request.tokens
            known.append(token)
            ids.append(request.id)
            tokens.append(token)
            if (token in request.stops or len(known) >= request.limit) and (reason := ending(request)):
                self._members.finish(request, reason, now, outputs, token if reason == "stop" else None)
        self.counters.generation_tokens += len(ids) - before


def _why_none(first: Request | None, collected: int) -> Cause:
    """Why the first in line cannot be admitted. `collected`: the last step whose results are in."""
    if first is None:
        return Cause.OPEN
    return Cause.STEP if first.idle_from > collected else Cause.BLOCKS


def _why_skipped(turn: Turn, otherwise: Cause = Cause.BUDGET) -> Cause:
    """Why running requests have no part in a step."""
    if turn.kind != "any":
        return Cause.KIND
    return otherwise if turn.all else Cause.POLICY


def _admission(request: Request, table: BlockTable) -> Admission:
    return Admission(
        request.slot,
        request.token_ids(),
        request.prompt_length,
        request.params,
        request.stop_ids,
        request.choice,
        np.array(table.blocks, np.int32),
    )


def _note_start(request: Request, shared: int, now: float, counters: Counters, outputs: Outputs) -> None:
    """A request runs for the first time, `shared` of its tokens being there already."""
    request.admitted = now
    request.cached_tokens = min(shared, request.prompt_length)
    if request.chain is not None:
        counters.prefix_queries += request.prompt_length
        counters.prefix_hits += request.cached_tokens
    outputs.add_started(request)
