"""Requests to an engine, and their outputs back to whoever asked.

Owns the table of live requests (with prompt and received tokens, so that they can be submitted again), the bound on
their number, fan-out of `n`, seeds, and the tasks that take a step's outputs and look after the engine. Knows nothing
of HTTP, templates or scheduling.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from noria.errors import EngineError, QueueFullError, UnavailableError
from noria.frontend.course import Passage
from noria.frontend.detokenizer import Detokenizer, Pieces
from noria.frontend.door import Door
from noria.frontend.outputs import OutputRouter, record
from noria.frontend.pace import Pace
from noria.frontend.questions import Questions
from noria.frontend.recovery import Recovery
from noria.frontend.stream import LiveRequest, RequestStream
from noria.frontend.supervisor import Supervisor
from noria.frontend.transport import Transport
from noria.frontend.vocabulary import VocabularyTeller
from noria.messages import Abort, Control, EngineInfo, EngineStats, FinishReason, StepOutputs, Submit
from noria.observe.logging import get_logger
from noria.observe.metrics import Metrics
from noria.params import SamplingParams

log = get_logger(__name__)
WATCH_SECONDS = 1.0  # between two looks at whether the engine makes progress
_SHOWN = 20  # requests, when the state of an engine that does not is logged


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a request is for.

    Attributes:
        name, share: those of one name get `share` of the engine together, under the fair policy.
        spend: is told of tokens as they are generated.
    """

    name: str = ""
    share: float = 1.0
    spend: Callable[[int], None] | None = None


ANYBODY = Tenant()


class Seats:
    """Places among the unfinished requests, taken before a prompt is encoded so that the bound holds from the door on.

    Those that were not used are given back by `release`, or by leaving `with`.
    """

    __slots__ = ("_client", "count")

    def __init__(self, client: EngineClient, count: int) -> None:
        self._client = client
        self.count = count

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives back what was not used."""
        self._client.unfinished -= self.count
        self.count = 0


class EngineClient:
    """One engine's client.

    Args:
        transport: the way to the engine.
        pieces: bytes of the model's tokens.
        end_ids: the model's own end tokens.
        max_unfinished: most unfinished choices, running and waiting together, before QueueFullError.
        metrics: where requests are counted.
        make_transport: the way to another engine when one dies; None: there is none, and its requests end in error.
    """

    def __init__(
        self,
        transport: Transport,
        pieces: Pieces,
        end_ids: Sequence[int] = (),
        max_unfinished: int = 1280,
        metrics: Metrics | None = None,
        make_transport: Callable[[], Transport] | None = None,
    ) -> None:
        self.metrics = metrics or Metrics("")
        self.max_unfinished = max_unfinished
        self.unfinished = 0
        self.requests: dict[int, LiveRequest] = {}
        self.pace = Pace()
        self.door = Door()
        self._engine = Supervisor(transport, make_transport)
        self.questions = Questions(self._engine.send)
        self._ids = itertools.count(1)
        self._vocabulary = VocabularyTeller(pieces, end_ids, self._engine.send)
        self._recovery = Recovery(self.requests, self._vocabulary.send, self._ids.__next__)
        self._router = OutputRouter(self.requests, self._engine.send, self._forget, self.metrics)
        self._pieces = pieces
        self._end_ids = tuple(end_ids)
        self._info: EngineInfo | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error: EngineError | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved. Only after `start`."""
        assert self._info is not None, "start() first"
        return self._info

    @property
    def error(self) -> EngineError | None:
        """Why no engine will answer any more; None while one does, or is about to."""
        return self._error

    @property
    def ready(self) -> bool:
        """Whether there is an engine, and it makes progress."""
        idle = not self.requests
        return self._error is None and self._recovery.up and (idle or self._engine.stalled(time.monotonic()) is None)

    async def start(self) -> EngineInfo:
        """Waits for the engine. Raises ConfigError or EngineError if it cannot start."""
        self._began(await self._engine.start())
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._dispatch(), name="noria-outputs"))
        if self._engine.replaceable:
            self._tasks.append(loop.create_task(self._watch(), name="noria-watchdog"))
        return self.info

    def _began(self, info: EngineInfo) -> None:
        self._info, self.door = info, Door()
        self.metrics.began(info, self._engine.restarts)
        self._vocabulary.forget()
        self._recovery.started()

    async def close(self) -> None:
        """Ends all requests and stops the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._fail_all(EngineError("the server is shutting down"))
        await self._engine.close()

    def reserve(self, count: int) -> Seats:
        """Takes places for `count` choices. Raises QueueFullError at once if there are too few."""
        self._check_engine()
        if (over := self.unfinished + count - self.max_unfinished) > 0:
            raise QueueFullError(
                f"too many requests: {self.unfinished} are unfinished, the limit is {self.max_unfinished}"
                " (--max-num-seqs and --max-queued-requests together); try again later",
                retry_after=self.pace.seconds(over),
            )
        self.unfinished += count
        return Seats(self, count)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        seats: Seats | None = None,
        salt: str = "",
        priority: int = 0,
        arrived: float | None = None,
        tenant: Tenant = ANYBODY,
        marks: bool = False,
        sheddable: bool = False,
    ) -> RequestStream:
        """Sends prompts to the engine, each to be continued `n` times.

        Args:
            prompts: token ids, checked against the vocabulary and the context.
            params: one for each prompt; `max_tokens` is resolved, `n` is the same in all.
            seats: places from `reserve`; taken here if not given.
            salt: prefix blocks are shared only between requests of one salt.
            priority: smaller runs first under the priority policy.
            arrived: when the user's request came in (`time.monotonic()`), from which latencies count; None: now.
            tenant: whom it is for.
            marks: the text keeps control tokens that tell the parts of an answer from each other.
            sheddable: it may be refused for an objective that it cannot meet; of several choices none is.
        """
        n = params[0].n
        seats = seats or self.reserve(len(prompts) * n)
        self._check_engine()
        if not self.requests:
            self._engine.works_from_now()
        stream = RequestStream(len(prompts) * n, sum(map(len, prompts)), self._abort, tenant.spend)
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            assert wanted.max_tokens is not None, "max_tokens is resolved before"
            seed = secrets.randbits(64) if wanted.seed is None else wanted.seed
            first = Submit(
                request_id=next(self._ids),
                prompt_ids=np.asarray(prompt, "<i4").tobytes(),
                params=msgspec.structs.replace(wanted, n=1, seed=seed),
                stop_ids=wanted.stop_token_ids if wanted.ignore_eos else (*self._end_ids, *wanted.stop_token_ids),
                priority=priority,
                salt=salt,
                arrival=time.time(),
                tenant=tenant.name,
                share=tenant.share,
                waited=0.0 if arrived is None else time.monotonic() - arrived,
                sheddable=sheddable and stream.choices == 1,
            )
            try:
                self._fan_out(stream, first, n, index * n, time.monotonic() if arrived is None else arrived, marks)
            except BaseException:  # nobody would read it
                seats.count -= len(stream.live)
                stream.close()
                raise
        seats.count -= stream.choices
        self.metrics.submitted(n)
        return stream

    def _fan_out(self, stream: RequestStream, first: Submit, n: int, index: int, started: float, marks: bool) -> None:
        """Submits the n choices of one prompt; they are a group, named after the first."""
        params, prompt_tokens = first.params, len(first.prompt_ids) // 4
        for choice in range(n):
            request_id = next(self._ids) if choice else first.request_id
            submit = msgspec.structs.replace(first, request_id=request_id, choice=choice, group=first.request_id)
            detokenizer = Detokenizer(
                self._pieces,
                params.stop,
                params.min_tokens,
                params.skip_special_tokens,
                params.include_stop_str_in_output,
                marks,
            )
            passage = Passage(index + choice, prompt_tokens, time.monotonic())
            live = LiveRequest(submit, stream, index + choice, detokenizer, prompt_tokens, started, started, passage)
            stream.course.passages.append(passage)
            stream.live[request_id] = self.requests[request_id] = live
            self.metrics.accepted()
            self._recovery.submit(live)

    async def refresh_stats(self, timeout: float = 0.5) -> EngineStats:
        """The engine's statistics as of now; the latest known ones if it does not answer within `timeout` seconds."""
        if self._recovery.up:
            await self.questions.fresh_stats(timeout)
        return self.metrics.stats

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks that no request holds."""
        self._engine.send(Control("reset_prefix_cache"))

    # ------------------------------------------------------------------------------------------------ the engine

    async def _dispatch(self) -> None:
        """Takes the outputs of one engine after the other."""
        try:
            while True:
                try:
                    await self._take_all()
                except EngineError as error:
                    if not self._engine.replaceable:
                        raise
                    await self._replace(error)
        except EngineError as error:
            log.error("the engine is gone: %s; %d requests end in error", error, len(self.requests))
            self._fail_all(error)
        except Exception as error:
            log.exception("the outputs of the engine could not be read")
            self._fail_all(EngineError(f"the outputs of the engine could not be read: {error}"))

    async def _take_all(self) -> None:
        """Until the engine dies."""
        while True:
            outputs = await self._engine.receive()
            if _tells_of_progress(outputs, self.metrics.stats):
                self._engine.heard(time.monotonic())
            if outputs.request_ids:
                self._engine.barren = 0
            self._router.take(outputs)
            self.door.heard(outputs.stats.outlook, time.monotonic())
            self._recovery.check()
            self.questions.answered(outputs.answers)
            self.questions.told_stats()

    async def _replace(self, error: EngineError) -> None:
        """Another engine, which goes on with what the dead one had. Raises EngineError if there is none."""
        lost = self._recovery.died(self.info.max_num_seqs)
        self.metrics.ended()
        self.questions.give_up()
        if lost:
            now = time.monotonic()
            log.error("%s; %d requests end in error: it died of them twice while it had nothing else", error, len(lost))
            for live in lost:
                self._router.fail(live, f"{error}; it has died of this request more than once", now)
        log.error("%s; it is started again and goes on with %d requests", error, len(self.requests))
        self._began(await self._engine.restart(error))
        log.warning("there is an engine again")

    async def _watch(self) -> None:
        """Ends an engine that has work and makes no progress, so that another takes it over."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if not self.requests:
                self._engine.works_from_now()
            elif self._recovery.up and (seconds := self._engine.stalled(now)) is not None:
                self._log_stall(seconds)
                await self._engine.put_down()
            elif self._recovery.up:
                self._engine.send(Control("stats"))  # the steps of a long prefill are not told of otherwise

    def _log_stall(self, seconds: float) -> None:
        shown = [f"{one}: {live.prompt_tokens} + {len(live.received)}" for one, live in self.requests.items()]
        log.error(
            "nothing has run for %.0f s, with %d requests: the engine is killed",
            seconds,
            len(self.requests),
            extra={"fields": {"requests": shown[:_SHOWN], "stats": repr(self.metrics.stats)}},
        )

    def _forget(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        if self.requests.pop(live.submit.request_id, None) is None:
            return
        self.unfinished -= 1
        self.pace.ended()
        live.note_end(reason, now)
        self.metrics.finished(record(live, reason, now))

    def _abort(self, stream: RequestStream) -> None:
        """The reader is gone: its requests are forgotten at once, here and by the engine."""
        now = time.monotonic()
        ids = tuple(stream.live)
        for live in tuple(stream.live.values()):
            self._forget(live, "abort", now)
        self._engine.send(Abort(ids))
        self._recovery.check()

    def _fail_all(self, error: EngineError) -> None:
        self._error = self._error or error
        self._recovery.up = False
        self.metrics.ended()
        now = time.monotonic()
        refusal = UnavailableError(f"{error}; the request was lost", retry_after=5.0)
        streams = {id(live.stream): live.stream for live in self.requests.values()}
        for live in tuple(self.requests.values()):
            self._forget(live, "error", now)
        for stream in streams.values():
            stream.fail(refusal)
        self.questions.give_up()

    def _check_engine(self) -> None:
        if self._error is not None:
            raise UnavailableError(f"{self._error}", retry_after=5.0)


def _tells_of_progress(outputs: StepOutputs, before: EngineStats) -> bool:
    """Whether something ran: an engine that only answers questions may still let its work wait forever."""
    stepped = outputs.stats.running > 0 and outputs.stats.steps_total > before.steps_total
    return stepped or bool(outputs.request_ids or outputs.finished)
