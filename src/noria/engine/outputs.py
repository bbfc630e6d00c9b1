"""What goes to the client: results gathered by request, as the columns of one message."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from noria.engine.request import Request
from noria.messages import EngineStats, Explained, Finished, FinishReason, LogProbs, PacerLog, Started, StepOutputs
from noria.plan import Int32, PromptLogProbs, TokenLogProbs

_ONE = struct.pack("<i", 1)


def _log_probs(tokens: Int32, values: TokenLogProbs, k: int) -> LogProbs:
    """Log-probabilities of tokens [t] with the k most likely alternatives of each; `values` are over [t] too."""
    return LogProbs(
        k=k,
        tokens=tokens.astype("<i4").tobytes(),
        chosen=values.chosen.astype("<f4").tobytes(),
        ranks=values.ranks.astype("<i4").tobytes(),
        top_ids=values.top_ids[:, :k].astype("<i4").tobytes(),
        top=values.top[:, :k].astype("<f4").tobytes(),
    )


def _joined(pieces: list[PromptLogProbs], k: int) -> LogProbs:
    """Consecutive pieces of one prompt as one. No piece at all: a prompt of one token."""
    if not pieces:
        return LogProbs(k, b"", b"", b"", b"", b"")
    values = TokenLogProbs(
        np.concatenate([piece.values.chosen for piece in pieces]),
        np.concatenate([piece.values.ranks for piece in pieces]),
        np.concatenate([piece.values.top_ids[:, :k] for piece in pieces]),
        np.concatenate([piece.values.top[:, :k] for piece in pieces]),
    )
    return _log_probs(np.concatenate([piece.tokens for piece in pieces]), values, k)


@dataclass(slots=True)
class Outputs:
    """Collects what has happened since the last message."""

    request_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    logprobs: dict[int, LogProbs] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogProbs] = field(default_factory=dict)
    answers: list[Explained | PacerLog] = field(default_factory=list)
    stats_wanted: bool = False

    def __bool__(self) -> bool:
        return bool(self.request_ids or self.finished or self.started or self.answers or self.stats_wanted)

    def add_logprobs(self, request: Request, token: int, row: int, values: TokenLogProbs) -> None:
        """Of a request's new token, which is row `row` of the step's log-probabilities."""
        one = slice(row, row + 1)
        value = TokenLogProbs(values.chosen[one], values.ranks[one], values.top_ids[one], values.top[one])
        self.logprobs[request.id] = _log_probs(np.array([token], np.int32), value, request.params.logprobs or 0)

    def add_prompt_logprobs(self, request: Request) -> None:
        """Of a whole prompt, once it has been computed."""
        self.prompt_logprobs[request.id] = _joined(request.scores, request.params.prompt_logprobs or 0)

    def add_started(self, request: Request) -> None:
        assert request.admitted is not None
        self.started.append(Started(request.id, request.cached_tokens, request.admitted - request.submitted))

    def add_finished(
        self, request: Request, reason: FinishReason, now: float, stop_id: int | None = None, message: str | None = None
    ) -> None:
        self.finished.append(
            Finished(
                request.id,
                reason,
                stop_id,
                message,
                request.cached_tokens,
                request.preemptions,
                (now if request.admitted is None else request.admitted) - request.submitted,
            )
        )

    def message(self, step: int, stats: EngineStats) -> StepOutputs:
        """As one message. Each token listed is of another request: a step yields one token per row."""
        return StepOutputs(
            step=step,
            request_ids=struct.pack(f"<{len(self.request_ids)}q", *self.request_ids),
            counts=_ONE * len(self.request_ids),
            tokens=struct.pack(f"<{len(self.tokens)}i", *self.tokens),
            finished=tuple(self.finished),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stats=stats,
            started=tuple(self.started),
            answers=tuple(self.answers),
        )
