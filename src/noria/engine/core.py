"""The engine's core: schedule → execute → update.

Owns the scheduler, the cache's blocks and the steps in flight. No sockets, no processes, no device: it is driven by
`handle` and `step`, and talks to an executor.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from noria.cache.checks import check_cache
from noria.cache.manager import make_manager
from noria.config import CacheOptions, SchedulerOptions
from noria.engine.account import explain
from noria.engine.flight import Flight
from noria.engine.forecast import Forecast
from noria.engine.grammars import Compiling
from noria.engine.history import History, Planned, without
from noria.engine.outputs import Outputs
from noria.engine.pacing import Pacing, Shapes
from noria.engine.request import RefusedRequest, Request, make_request
from noria.engine.scheduler import Scheduler
from noria.engine.shedding import Shedding
from noria.errors import EngineError
from noria.executor.base import Executor
from noria.messages import (
    Abort,
    AskPacer,
    Control,
    EngineInfo,
    EngineStats,
    Explain,
    Explained,
    Finished,
    FinishReason,
    Outlook,
    PacerLog,
    PacerStats,
    StepOutputs,
    Submit,
    ToEngine,
    Vocabulary,
    build_id,
)
from noria.pacer.gate import Gate
from noria.pacer.pacer import Pacer

_log = logging.getLogger(__name__)
# Rows from which on a step is planned while another one runs. Planning 100 rows takes a millisecond or two, cold. With
# few rows it takes less than the kernels lose by it: it runs on a processor that a kernel thread needs.
_MANY_ROWS = 16


class EngineCore:
    """One engine, turned by whoever drives it.

    Args:
        executor: runs the steps.
        cache: layout, sharing and reclaiming of blocks. `block_size` and number of blocks are the executor's.
        scheduler: batching.
        pacer: sets batch size and token budget; None: they stay as they are.
        gate: refuses requests that would miss an objective; None: nobody does.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        executor: Executor,
        cache: CacheOptions,
        scheduler: SchedulerOptions,
        clock: Callable[[], float] = time.monotonic,
        pacer: Pacer | None = None,
        gate: Gate | None = None,
    ) -> None:
        worker = executor.info
        slots = min(scheduler.max_num_seqs, worker.num_slots)
        # A request that the whole cache cannot hold could never end.
        max_model_len = min(worker.max_model_len, worker.num_blocks * worker.block_size)
        if cache.block_size != worker.block_size:
            raise EngineError(f"blocks of {cache.block_size} tokens are planned, the worker has {worker.block_size}")
        self._manager = make_manager(worker.num_blocks, cache, max_model_len, worker.cache_bytes)
        self._history = History(not scheduler.continuous, scheduler.build_interval > 0)
        self._scheduler = Scheduler(self._manager, scheduler, slots, self._history)
        self._pacing = None if pacer is None else Pacing(pacer, self._scheduler)
        self._shedding = None if gate is None else Shedding(gate, self._scheduler, scheduler.policy)
        self._shapes = Shapes()
        self._off = PacerStats(slots, scheduler.max_num_batched_tokens)
        self._compiling = Compiling(executor.compile_grammar)
        self._executor = executor
        self._prefetch = scheduler.prefetch
        self._adapts = scheduler.in_flight_depth is None and scheduler.async_planning
        self._depth = scheduler.in_flight_depth or 1
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self._forecast = Forecast()
        self._began = 0.0  # when the oldest step in flight did
        self._turned = 0.0  # when its turn did: planning is part of a turn where nothing is computed meanwhile
        self._outputs = Outputs()
        self._orders = 0
        self.stopped = False
        self.info = EngineInfo(
            build_id=build_id(),
            max_model_len=max_model_len,
            vocab_size=worker.vocab_size,
            num_blocks=worker.num_blocks,
            block_size=worker.block_size,
            max_num_seqs=slots,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            backend=worker.backend,
            isa=worker.isa,
            threads=worker.threads,
            weights=worker.weights,
            cache_dtype=worker.cache_dtype,
            weight_bytes=worker.weight_bytes,
            cache_bytes=worker.cache_bytes,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say, now or after `idle_seconds`."""
        return bool(self._scheduler.requests or self._flights or self._outputs or self._compiling)

    @property
    def idle_seconds(self) -> float:
        """How long the next step would have nothing to do, or had better wait: while a static batch fills, and while a
        step runs whose successor need not be planned yet. What is heard meanwhile can be part of it."""
        if self._outputs or len(self._flights) >= self._depth:
            return 0.0
        if self._flights:
            return max(0.0, self._began + self._forecast.seconds(self._flights[0].plan) - self._clock())
        delay = self._scheduler.delay(self._clock())
        if not self._compiling:
            return delay
        pause = self._compiling.pause
        return min(delay, pause) if self._scheduler.requests else pause

    @property
    def stats(self) -> EngineStats:
        scheduler, blocks = self._scheduler, self._manager.counts()
        pacer = self._off if self._pacing is None else self._pacing.pacer.stats
        waiting = len(scheduler.waiting) + self._aside
        outlook = Outlook() if self._shedding is None else self._shedding.outlook(self._clock())
        return scheduler.counters.snapshot(len(scheduler.running), waiting, blocks, pacer, outlook)

    @property
    def _aside(self) -> int:
        """Requests that wait for their grammars and are not with the scheduler yet."""
        return len(self._compiling) if self._prefetch else 0

    def handle(self, message: ToEngine) -> None:
        """Takes in one message. What it causes is said by later steps. Greetings are for whoever owns the socket."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(frozenset(message.request_ids))
        elif isinstance(message, Control):
            self._control(message)
        elif isinstance(message, Vocabulary):
            self._executor.load_vocabulary(message)
        elif isinstance(message, (Explain, AskPacer)):
            self._outputs.answers.append(self._answer(message))

    def _answer(self, question: Explain | AskPacer) -> Explained | PacerLog:
        now = self._history.now = self._clock()
        if isinstance(question, Explain):
            made: Explained | PacerLog = explain(self._history, question.ask, question.request_id)
        else:
            made = PacerLog(question.ask, now, None if self._pacing is None else self._pacing.decisions())
        return replace(made, seconds=self._clock() - now)

    def step(self) -> StepOutputs | None:
        """One turn. Returns what there is to say, if anything.

        Raises:
            EngineError: the executor failed; this engine cannot go on.
        """
        began = self._clock()
        submitted, planned = self._plan(began)
        # One at most, since a message has one token of a request.
        updating = self._collect() if self._flights and (not submitted or len(self._flights) >= self._depth) else 0.0
        counters = self._scheduler.counters
        counters.step_seconds += self._clock() - began
        counters.plan_seconds += planned - began + updating
        return self._say()

    @property
    def may_launch(self) -> bool:
        """Whether the next step might be submitted before what the last one brought is sent, which would else hold it
        up. Not one that the caller's own thread will compute: whoever reads can then begin while it is planned, with
        nothing else for the other processors to do."""
        return self._depth > 1 and not self._flights and bool(self._scheduler.requests)

    def launch(self) -> None:
        """Plans and submits the next step, if it may and need not wait."""
        if not self.may_launch or self._scheduler.delay(self._clock()) > 0.0:
            return
        began = self._clock()
        _, planned = self._plan(began)
        self._scheduler.counters.step_seconds += planned - began
        self._scheduler.counters.plan_seconds += planned - began

    def _plan(self, began: float) -> tuple[bool, float]:
        """Submits a step if there is room for one in flight; returns whether, and when it had been planned."""
        self._history.now = began
        if self._compiling:
            self._take_compiled(began)
        if len(self._flights) >= self._depth:
            return False, began
        if self._pacing is not None:
            self._pacing.turn(began, self._aside)
        if self._shedding is not None:
            self._shed(self._shedding.lost(began))
        flight = self._scheduler.schedule(began, self._outputs)
        for request in self._scheduler.take_uncompiled():
            self._compiling.add(request)
        if flight is not None or len(self._scheduler.waiting):
            self._history.planned(_planned(flight, self._scheduler))
        planned = self._clock()
        if flight is None:
            return False, planned
        if self._shedding is not None:
            self._shedding.planned(flight, began)
        if self._adapts:
            self._depth = 2 if len(flight.plan.slots) >= _MANY_ROWS else 1
        if not self._flights:
            self._began, self._turned = planned, began
        self._executor.submit(flight.plan, alone=self._depth == 1 and not self._flights)
        self._flights.append(flight)
        return True, planned

    def _collect(self) -> float:
        """Takes in the results of the oldest step in flight; returns the seconds that took once they were there."""
        oldest = self._flights.popleft()
        try:
            result = self._executor.collect()
        except Exception as error:
            raise EngineError(f"step {oldest.plan.step} failed: {error}") from error
        collected = self._clock()
        if self._depth > 1:  # otherwise no step is planned ahead of a time that would have to be known
            self._forecast.learn(oldest.plan, collected - self._began)
        if self._pacing is not None or self._shedding is not None:
            shape, seconds = self._shapes.next(oldest.plan), collected - self._turned
            if self._pacing is not None:
                self._pacing.collected(shape, seconds, collected)
            if self._shedding is not None:
                self._shedding.collected(oldest, shape, seconds, collected)
        self._began = self._turned = self._history.now = collected
        self._history.ran()
        self._scheduler.update(oldest, result, collected, self._outputs)
        return self._clock() - collected

    def tidy(self) -> None:
        """To be called when there has been no work for a while. Raises EngineError as `step` does."""
        plan = None if self._flights or self._scheduler.requests else self._scheduler.tidy()
        if plan is None:
            return
        try:
            self._executor.submit(plan, alone=True)
            self._executor.collect()
        except Exception as error:
            raise EngineError(f"step {plan.step} failed: {error}") from error

    def rest(self) -> bool:
        """To be called again and again while there is no work and no message comes: does for a few milliseconds what
        had better be done then; returns whether there is more."""
        return self._pacing is not None and self._pacing.pacer.rest(self._clock())

    def wake(self) -> None:
        """To be called after `rest` when there is something to do."""
        if self._pacing is not None:
            self._pacing.pacer.wake()

    def close(self) -> None:
        """No step will follow: keeps what was learned. The executor is its owner's to close."""
        if self._pacing is not None:
            self._pacing.pacer.close()

    def check(self) -> None:
        """Raises CacheCheckError unless every block is accounted for."""
        tables = [request.table for request in self._scheduler.running if request.table is not None]
        check_cache(self._manager, tables)

    def _say(self) -> StepOutputs | None:
        if not self._outputs:
            return None
        outputs, self._outputs = self._outputs, Outputs()
        return outputs.message(self._scheduler.collected, self.stats)

    def _abort(self, request_ids: frozenset[int]) -> None:
        self._history.now = self._clock()
        for request_id in request_ids:
            self._forget(request_id, "abort")
        outputs = self._outputs
        outputs.finished = [end for end in outputs.finished if end.request_id not in request_ids]
        outputs.stats_wanted = True  # so that the client sees blocks and slots come back

    def _forget(self, request_id: int, reason: FinishReason) -> None:
        if (request := self._compiling.remove(request_id)) is not None:
            self._history.ended(request, reason)
        self._scheduler.abort(request_id, reason)

    def _submit(self, submit: Submit) -> None:
        now = self._history.now = self._clock()
        if submit.request_id in self._scheduler.requests or submit.request_id in self._compiling:
            _log.error("request %d was submitted twice; the second submission is ignored", submit.request_id)
            return
        try:
            request = self._request(submit, now)
        except RefusedRequest as refusal:
            self._outputs.finished.append(Finished(submit.request_id, "error", message=str(refusal)))
            return
        self._history.submitted(request, len(self._scheduler.waiting) + self._aside)
        if self._pacing is not None:
            self._pacing.arrived(request, now)
        if self._shedding is not None and (end := self._shedding.refusal(request, now)) is not None:
            self._history.ended(request, end.reason)
            self._outputs.finished.append(end)
            return
        if request.params.grammar is not None and self._prefetch:
            self._compiling.add(request)
            self._take_compiled(now)
        else:
            self._scheduler.submit(request, now, self._outputs)

    def _shed(self, ends: list[Finished]) -> None:
        """Ends requests that have waited too long."""
        for end in ends:
            self._forget(end.request_id, end.reason)
        self._outputs.finished += ends

    def _take_compiled(self, now: float) -> None:
        """Hands over requests whose grammars are ready."""
        for request, failure in self._compiling.take():
            if request.id in self._scheduler.requests:
                self._scheduler.compiled(request, failure, now, self._outputs)
            elif failure is None:
                self._scheduler.submit(request, now, self._outputs)
            else:
                self._history.ended(request, "error")
                self._outputs.add_finished(request, "error", now, message=failure)

    def _request(self, submit: Submit, now: float) -> Request:
        self._orders += 1
        return make_request(submit, self._orders, now, self.info.vocab_size, self.info.max_model_len)

    def _control(self, control: Control) -> None:
        if control.action == "shutdown":
            self.stopped = True
        elif control.action == "reset_prefix_cache":
            self._manager.reset()
            self._outputs.stats_wanted = True
        else:
            self._outputs.stats_wanted = True


def _planned(flight: Flight | None, scheduler: Scheduler) -> Planned:
    """What was planned just now, to be written down."""
    sizes, plan = scheduler.sizes, None if flight is None else flight.plan
    return Planned(
        plan,
        len(scheduler.running),
        len(scheduler.waiting),
        sizes.batch,
        sizes.budget,
        scheduler.closed,
        scheduler.skipped,
        None if plan is None else without(plan, scheduler.running),
    )
