"""A step's outputs on their way to the requests that they belong to: text, stop strings, log-probabilities, ends.

Knows nothing of how requests are submitted, nor of engines that die.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from noria.errors import OverloadedError
from noria.frontend.stream import Finish, Increment, LiveRequest, LogProbColumns
from noria.messages import Abort, Finished, FinishReason, StepOutputs, ToEngine
from noria.observe.logging import get_logger
from noria.observe.metrics import Metrics, RequestRecord

log = get_logger(__name__)


class OutputRouter:
    """Hands outputs to their requests.

    Args:
        requests: those that have not finished, by id.
        send: to the engine.
        forget: takes a request that has ended out of `requests`.
    """

    def __init__(
        self,
        requests: Mapping[int, LiveRequest],
        send: Callable[[ToEngine], None],
        forget: Callable[[LiveRequest, FinishReason, float], None],
        metrics: Metrics,
    ) -> None:
        self._requests = requests
        self._send = send
        self._forget = forget
        self._metrics = metrics
        self._accepted = 0  # tokens of the step at hand that became part of an output
        self._gaps: dict[float, int] = {}  # seconds since the outputs before → how many of the step at hand

    def take(self, outputs: StepOutputs) -> None:
        """One step's."""
        now = time.monotonic()
        tokens = np.frombuffer(outputs.tokens, "<i4").tolist()
        self._accepted = 0
        self._gaps.clear()
        for started in outputs.started:
            if (live := self._requests.get(started.request_id)) is not None:
                live.note_start(started.cached_tokens, started.queued_seconds)
        for request_id, wire in outputs.prompt_logprobs.items():
            if (live := self._requests.get(request_id)) is not None:
                _gather(live, LogProbColumns.decode(wire))
        finished = {end.request_id: end for end in outputs.finished}
        ids = np.frombuffer(outputs.request_ids, "<i8").tolist()
        at = 0
        for request_id, count in zip(ids, np.frombuffer(outputs.counts, "<i4").tolist(), strict=True):
            live = self._requests.get(request_id)
            if live is not None:
                wire_logprobs = outputs.logprobs.get(request_id)
                logprobs = LogProbColumns.decode(wire_logprobs) if wire_logprobs is not None else None
                self._guarded(live, tokens[at : at + count], logprobs, finished.pop(request_id, None), now)
            at += count
        for request_id, end in finished.items():
            if (live := self._requests.get(request_id)) is not None:
                self._guarded(live, [], None, end, now)
        self._metrics.step(self._accepted, self._gaps, outputs.stats)

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
            if live.submit.request_id in self._requests:
                if end is None:
                    self._send(Abort((live.submit.request_id,)))
                self.fail(live, f"{type(error).__name__}: {error}", now)

    def _advance(
        self,
        live: LiveRequest,
        tokens: list[int],
        logprobs: LogProbColumns | None,
        end: Finished | None,
        now: float,
    ) -> None:
        if end is not None and end.shed is not None:
            self._shed(live, end, now)
            return
        self._clock(live, len(tokens), now)
        if end is None and logprobs is None and live.prompt_logprobs is None and not live.detokenizer.stops:
            self._accept(live, tokens)
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
        self._accept(live, tokens)
        increment = Increment(live.choice, tokens, text, logprobs)
        if live.prompt_logprobs is not None and (tokens or end is not None):
            increment.prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, None
        if stop is not None and end is None:
            self._send(Abort((live.submit.request_id,)))
        increment.finish = _finish(live, end, stop)
        if increment.finish is not None:
            self._end(live, increment, now)
        else:
            live.stream.put(increment)

    def _accept(self, live: LiveRequest, tokens: list[int]) -> None:
        """They are part of the answer."""
        live.received += tokens
        self._accepted += len(tokens)
        if live.stream.spend is not None:
            live.stream.spend(len(tokens))

    def _clock(self, live: LiveRequest, count: int, now: float) -> None:
        if not count:
            return
        if live.first_token is None:
            live.first_token = live.passage.first = now
            self._metrics.first_token(now - live.started, live.prompt_tokens if live.submit.choice == 0 else 0)
        else:
            # Most tokens of a step have waited since the same step before, for exactly as long.
            gap = now - live.last
            self._gaps[gap] = self._gaps.get(gap, 0) + 1
        live.last = now

    def _shed(self, live: LiveRequest, end: Finished, now: float) -> None:
        """The engine refused it. It is all that its stream has (`EngineClient.submit`)."""
        assert end.shed is not None
        self._metrics.shed(end.shed)
        live.shed = True
        self._forget(live, end.reason, now)
        live.stream.fail(OverloadedError(end.message or "", retry_after=end.retry_after))

    def fail(self, live: LiveRequest, message: str, now: float) -> None:
        """Ends a request in error."""
        self._end(live, Increment(live.choice, finish=Finish("error", message=message)), now)

    def _end(self, live: LiveRequest, increment: Increment, now: float) -> None:
        """The one end of a request."""
        assert increment.finish is not None
        self._forget(live, increment.finish.reason, now)
        stream = live.stream
        stream.live.pop(live.submit.request_id, None)
        if live.submit.choice == 0:
            stream.cached_tokens += increment.finish.cached_tokens
        stream.put(increment)


def _gather(live: LiveRequest, columns: LogProbColumns) -> None:
    if live.prompt_logprobs is None:
        live.prompt_logprobs = columns
    else:
        live.prompt_logprobs.extend(columns)


def _finish(live: LiveRequest, end: Finished | None, stop: str | None) -> Finish | None:
    """How a request ended, if it did: at a stop string, or as the engine says."""
    resumed = live.handed_over > 0  # what this engine says of its start does not count
    cached = (end.cached_tokens if end is not None and not resumed else 0) or live.cached_tokens
    if stop is not None:
        return Finish("stop", stop, None, cached)
    if end is None:
        return None
    if not resumed:
        live.queued_seconds = end.queued_seconds or live.queued_seconds
    reason_id = end.stop_id if end.stop_id in live.submit.params.stop_token_ids else None
    return Finish(end.reason, reason_id, end.message, cached, refused=end.reason == "error")


def record(live: LiveRequest, reason: FinishReason, now: float) -> RequestRecord:
    """What the metrics are told of a request that ends."""
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
        shed=live.shed,
    )
