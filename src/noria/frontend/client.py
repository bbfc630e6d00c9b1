"""Requests to an engine, and their outputs back to whoever asked.

Owns the table of live requests (with prompt and received tokens, so that they can be submitted again), the bound on
their number, fan-out of `n`, seeds, and the one task that turns a step's outputs into text for all of them. Knows
nothing of HTTP, templates or scheduling.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from noria.errors import EngineError, QueueFullError, UnavailableError
from noria.frontend.detokenizer import Detokenizer, Pieces
from noria.frontend.stream import Finish, Increment, LiveRequest, LogProbColumns, RequestStream
from noria.frontend.transport import Transport
from noria.messages import Abort, Control, EngineInfo, EngineStats, Finished, FinishReason, StepOutputs, Submit
from noria.observe.logging import get_logger
from noria.observe.metrics import Metrics, RequestRecord
from noria.params import SamplingParams

log = get_logger(__name__)


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
    """

    def __init__(
        self,
        transport: Transport,
        pieces: Pieces,
        end_ids: Sequence[int] = (),
        max_unfinished: int = 1280,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics("")
        self.max_unfinished = max_unfinished
        self.unfinished = 0
        self.requests: dict[int, LiveRequest] = {}
        self._transport = transport
        self._pieces = pieces
        self._end_ids = tuple(end_ids)
        self._ids = itertools.count(1)
        self._info: EngineInfo | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: EngineError | None = None
        self._stats_waiters: list[asyncio.Future[None]] = []
        self._accepted = 0  # tokens of the step at hand that became part of an output
        self._gaps: dict[float, int] = {}  # seconds since the outputs before → how many of the step at hand

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved. Only after `start`."""
        assert self._info is not None, "start() first"
        return self._info

    @property
    def error(self) -> EngineError | None:
        """Why the engine cannot answer any more; None while it can."""
        return self._error

    async def start(self) -> EngineInfo:
        """Waits for the engine. Raises ConfigError or EngineError if it cannot start."""
        self._info = await self._transport.start()
        self.metrics.info = self._info
        self.metrics.stats = EngineStats(total_blocks=self._info.num_blocks, free_blocks=self._info.num_blocks)
        self._task = asyncio.get_running_loop().create_task(self._dispatch(), name="noria-outputs")
        return self._info

    async def close(self) -> None:
        """Ends all requests and stops the engine."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._fail_all(EngineError("the server is shutting down"))
        await self._transport.close()

    def reserve(self, count: int) -> Seats:
        """Takes places for `count` choices. Raises QueueFullError at once if there are too few."""
        self._check_engine()
        if self.unfinished + count > self.max_unfinished:
            raise QueueFullError(
                f"too many requests: {self.unfinished} are unfinished, the limit is {self.max_unfinished}"
                " (--max-num-seqs and --max-queued-requests together); try again later",
                retry_after=1.0,
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
    ) -> RequestStream:
        """Sends prompts to the engine, each to be continued `n` times.

        Args:
            prompts: token ids, checked against the vocabulary and the context.
            params: one for each prompt; `max_tokens` is resolved, `n` is the same in all.
            seats: places from `reserve`; taken here if not given.
            salt: prefix blocks are shared only between requests of one salt.
            priority: smaller runs first under the priority policy.
            arrived: when the user's request came in (`time.monotonic()`), from which latencies count; None: now.
        """
        n = params[0].n
        seats = seats or self.reserve(len(prompts) * n)
        self._check_engine()
        stream = RequestStream(len(prompts) * n, sum(map(len, prompts)), self._abort)
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
            )
            self._fan_out(stream, first, n, index * n, time.monotonic() if arrived is None else arrived)
        seats.count -= stream.choices
        self.metrics.submitted(n)
        return stream

    def _fan_out(self, stream: RequestStream, first: Submit, n: int, index: int, started: float) -> None:
        """Submits the n choices of one prompt; they are a group, named after the first."""
        params, prompt_tokens = first.params, len(first.prompt_ids) // 4
        for choice in range(n):
            request_id = next(self._ids) if choice else first.request_id
            submit = msgspec.structs.replace(first, request_id=request_id, choice=choice, group=first.request_id)
            detokenizer = Detokenizer(self._pieces, params.stop, params.min_tokens, params.skip_special_tokens)
            live = LiveRequest(submit, stream, index + choice, detokenizer, prompt_tokens, started, started)
            stream.live[request_id] = self.requests[request_id] = live
            self._transport.send(submit)

    async def refresh_stats(self, timeout: float = 0.5) -> EngineStats:
        """The engine's statistics as of now; the latest known ones if it does not answer within `timeout` seconds."""
        if self._error is None and self._task is not None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(waiter)
            if len(self._stats_waiters) == 1:
                self._transport.send(Control("stats"))
            try:
                await asyncio.wait_for(waiter, timeout)
            except asyncio.TimeoutError:
                self._stats_waiters = [other for other in self._stats_waiters if other is not waiter]
        return self.metrics.stats

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks that no request holds."""
        self._transport.send(Control("reset_prefix_cache"))

    # ------------------------------------------------------------------------------------------------ outputs

    async def _dispatch(self) -> None:
        """Takes the engine's outputs until it dies."""
        try:
            while True:
                self._take(await self._transport.receive())
        except EngineError as error:
            log.error("the engine is gone: %s; %d requests end in error", error, len(self.requests))
            self._fail_all(error)
        except Exception as error:
            log.exception("the outputs of the engine could not be read")
            self._fail_all(EngineError(f"the outputs of the engine could not be read: {error}"))

    def _take(self, outputs: StepOutputs) -> None:
        """Hands one step's outputs to their requests."""
        now = time.monotonic()
        tokens = np.frombuffer(outputs.tokens, "<i4").tolist()
        self._accepted = 0
        self._gaps.clear()
        for started in outputs.started:
            if (live := self.requests.get(started.request_id)) is not None:
                live.cached_tokens, live.queued_seconds = started.cached_tokens, started.queued_seconds
        for request_id, wire in outputs.prompt_logprobs.items():
            if (live := self.requests.get(request_id)) is not None:
                _gather(live, LogProbColumns.decode(wire))
        finished = {end.request_id: end for end in outputs.finished}
        ids = np.frombuffer(outputs.request_ids, "<i8").tolist()
        at = 0
        for request_id, count in zip(ids, np.frombuffer(outputs.counts, "<i4").tolist(), strict=True):
            live = self.requests.get(request_id)
            if live is not None:
                wire_logprobs = outputs.logprobs.get(request_id)
                logprobs = LogProbColumns.decode(wire_logprobs) if wire_logprobs is not None else None
                self._guarded(live, tokens[at : at + count], logprobs, finished.pop(request_id, None), now)
            at += count
        for request_id, end in finished.items():
            if (live := self.requests.get(request_id)) is not None:
                self._guarded(live, [], None, end, now)
        self.metrics.step(self._accepted, self._gaps, outputs.stats)
        self._answer_stats()

    def _guarded(
        self,
        live: LiveRequest,
        tokens: list[int],
        logprobs: LogProbColumns | None,
        end: Finished | None,
        now: float,
    ) -> None:
        """One request's outputs; whatever goes wrong with them ends that request only."""
        try:
            self._advance(live, tokens, logprobs, end, now)
        except Exception as error:
            log.exception("request %d failed", live.submit.request_id)
            if live.submit.request_id in self.requests:
                if end is None:
                    self._transport.send(Abort((live.submit.request_id,)))
                finish = Finish("error", message=f"{type(error).__name__}: {error}")
                self._end(live, Increment(live.choice, finish=finish), now)

    def _advance(
        self,
        live: LiveRequest,
        tokens: list[int],
        logprobs: LogProbColumns | None,
        end: Finished | None,
        now: float,
    ) -> None:
        self._clock(live, len(tokens), now)
        if end is None and logprobs is None and live.prompt_logprobs is None and not live.detokenizer.stops:
            live.received += tokens
            self._accepted += len(tokens)
            live.stream.put(Increment(live.choice, tokens, live.detokenizer.text(tokens)))
            return
        silent = 1 if end is not None and end.stop_id is not None and tokens else 0  # an end token has no text
        text, used, stop = live.detokenizer.push(tokens[: len(tokens) - silent] if silent else tokens)
        if stop is None and end is not None:
            rest = live.detokenizer.finish()
            text, used, stop = text + rest.text, len(tokens), rest.stop
        elif stop is None:
            used = len(tokens)
        if used < len(tokens):
            del tokens[used:]
            if logprobs is not None:
                logprobs.cut(used)
        live.received += tokens
        self._accepted += len(tokens)
        increment = Increment(live.choice, tokens, text, logprobs)
        if live.prompt_logprobs is not None and (tokens or end is not None):
            increment.prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, None
        if stop is not None and end is None:
            self._transport.send(Abort((live.submit.request_id,)))
        increment.finish = _finish(live, end, stop)
        if increment.finish is not None:
            self._end(live, increment, now)
        else:
            live.stream.put(increment)

    def _clock(self, live: LiveRequest, count: int, now: float) -> None:
        if not count:
            return
        if live.first_token is None:
            live.first_token = now
            self.metrics.first_token(now - live.started, live.prompt_tokens if live.submit.choice == 0 else 0)
        else:
            # Most tokens of a step have waited since the same step before, for exactly as long.
            gap = now - live.last
            self._gaps[gap] = self._gaps.get(gap, 0) + 1
        live.last = now

    def _end(self, live: LiveRequest, increment: Increment, now: float) -> None:
        """The one end of a request."""
        assert increment.finish is not None
        self._forget(live, increment.finish.reason, now)
        stream = live.stream
        stream.live.pop(live.submit.request_id, None)
        if live.submit.choice == 0:
            stream.cached_tokens += increment.finish.cached_tokens
        stream.put(increment)

    def _forget(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        if self.requests.pop(live.submit.request_id, None) is None:
            return
        self.unfinished -= 1
        self.metrics.finished(_record(live, reason, now))

    def _abort(self, stream: RequestStream) -> None:
        """The reader is gone: its requests are forgotten at once, here and by the engine."""
        now = time.monotonic()
        ids = tuple(stream.live)
        for live in tuple(stream.live.values()):
            self._forget(live, "abort", now)
        self._transport.send(Abort(ids))

    def _fail_all(self, error: EngineError) -> None:
        self._error = self._error or error
        now = time.monotonic()
        refusal = UnavailableError(f"{error}; the request was lost", retry_after=5.0)
        streams = {id(live.stream): live.stream for live in self.requests.values()}
        for live in tuple(self.requests.values()):
            self._forget(live, "error", now)
        for stream in streams.values():
            stream.fail(refusal)
        self._answer_stats()

    def _answer_stats(self) -> None:
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._stats_waiters.clear()

    def _check_engine(self) -> None:
        if self._error is not None:
            raise UnavailableError(f"{self._error}", retry_after=5.0)


def _gather(live: LiveRequest, columns: LogProbColumns) -> None:
    if live.prompt_logprobs is None:
        live.prompt_logprobs = columns
    else:
        live.prompt_logprobs.extend(columns)


def _finish(live: LiveRequest, end: Finished | None, stop: str | None) -> Finish | None:
    """How a request ended, if it did: at a stop string, or as the engine says."""
    cached = (end.cached_tokens if end is not None else 0) or live.cached_tokens
    if stop is not None:
        return Finish("stop", stop, None, cached)
    if end is None:
        return None
    live.queued_seconds = end.queued_seconds or live.queued_seconds
    reason_id = end.stop_id if end.stop_id in live.submit.params.stop_token_ids else None
    return Finish(end.reason, reason_id, end.message, cached)


def _record(live: LiveRequest, reason: FinishReason, now: float) -> RequestRecord:
    answered = live.first_token is not None
    return RequestRecord(
        reason=reason,
        prompt_tokens=live.prompt_tokens,
        generation_tokens=len(live.received),
        max_tokens=live.submit.params.max_tokens or 0,
        queued=live.queued_seconds,
        first_token=live.first_token - live.started if live.first_token is not None else None,
        last_token=live.last - live.started if answered else None,
        total=now - live.started,
    )
