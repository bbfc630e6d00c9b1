"""The boundary between engine and executor: what a step shall do, and what came of it.

Plain data, no behaviour beyond emptiness. A plan is a difference: rows already admitted are named by slot only, and the
worker keeps their tokens, block tables and sampling state. Slots are permanent from admission to release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.params import SamplingParams

Int32 = NDArray[np.int32]
UInt32 = NDArray[np.uint32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


_NONE: Int32 = np.empty(0, np.int32)
_NO_PAIRS: Int32 = np.empty((0, 2), np.int32)


def _empty() -> Int32:
    return _NONE


@dataclass(slots=True, frozen=True)
class Admission:
    """A request takes a slot (also after preemption: then `token_ids` holds prompt and output so far)."""

    slot: int
    token_ids: Int32  # [known tokens]: prompt, then output so far
    prompt_length: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int
    block_ids: Int32  # the row's block table so far, shared prefix blocks first


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One step. Rows are executed in order; the worker applies releases, then admissions, appended blocks and copies.

    Attributes:
        step: number of the step.
        slots: [rows]; starts: [rows] computed tokens before the step; counts: [rows] tokens to compute, at least 1.
        sample: [rows] bool; the row reaches its last known token, so its next token is sampled. A row may start at the
            token that the step before (still in flight) samples: the worker knows it by then.
        append_slots, append_blocks: [blocks] new blocks, each appended to its slot's table, in order.
        copies: [copies, 2] source and destination block, copied whole before anything is computed.
        released: [slots] whose rows are no longer used. In the same plan such a slot may be admitted again.
        prompt_logprobs: rows (indices into `slots`) for which log-probabilities of the prompt tokens computed in this
            step are wanted.
        repeats: the step is the one before it, one token on: the same rows in the same order, each with the one token
            that that step sampled, none of them in another block, and no changes. Says nothing that the columns do not;
            the worker can move its arrays on instead of making them anew.
    """

    step: int
    slots: Int32 = field(default_factory=_empty)
    starts: Int32 = field(default_factory=_empty)
    counts: Int32 = field(default_factory=_empty)
    sample: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    admitted: tuple[Admission, ...] = ()
    append_slots: Int32 = field(default_factory=_empty)
    append_blocks: Int32 = field(default_factory=_empty)
    copies: Int32 = field(default_factory=lambda: _NO_PAIRS)
    released: Int32 = field(default_factory=_empty)
    prompt_logprobs: tuple[int, ...] = ()
    repeats: bool = False

    @property
    def tokens(self) -> int:
        """Tokens computed by this step."""
        return int(np.add.reduce(self.counts))


@dataclass(slots=True, frozen=True)
class TokenLogProbs:
    """Log-probabilities over rows: of the raw model distribution, before temperature, penalties and filters.

    `top_ids` is -1 where a row asked for fewer than k.
    """

    chosen: Float32  # [rows]
    ranks: Int32  # [rows], 1 = most likely
    top_ids: Int32  # [rows, k]
    top: Float32  # [rows, k]


@dataclass(slots=True, frozen=True)
class PromptLogProbs:
    """Of one row's prompt tokens `first` … `first + len(tokens) - 1` (token 0 has none)."""

    slot: int
    first: int
    tokens: Int32  # [count]
    values: TokenLogProbs  # over [count]


@dataclass(slots=True, frozen=True)
class StepTimings:
    """Seconds on the worker's clock."""

    prepare: float = 0.0  # plan → batch
    forward: float = 0.0
    sample: float = 0.0


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a step yielded.

    Attributes:
        slots: [sampled rows], in plan order; tokens: [sampled rows], one new token each.
        logprobs: over the sampled rows, when any of them asked.
        failed: sampled row (its index) → why its request cannot go on. Its token means nothing.
    """

    step: int
    slots: Int32
    tokens: Int32
    logprobs: TokenLogProbs | None = None
    prompt_logprobs: tuple[PromptLogProbs, ...] = ()
    timings: StepTimings = StepTimings()
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class AttentionWork:
    """Of all layers that look back equally far.

    Attributes:
        window: positions that a token attends to at most; 0: all before it.
        kind: arithmetic. operations: per token and position that it attends to.
        bytes: of keys and values, per row and position that any of its tokens attends to.
    """

    window: int
    kind: str
    operations: float
    bytes: float


@dataclass(slots=True, frozen=True)
class StepWork:
    """The least that a step of a model asks of a machine.

    Attributes:
        token: operations per token, by arithmetic. output: per row that is sampled from.
        weights: bytes read in each step, whatever it computes. passing: bytes read and written per token.
    """

    token: Mapping[str, float]
    output: Mapping[str, float]
    weights: float
    passing: float
    attention: tuple[AttentionWork, ...]


@dataclass(slots=True, frozen=True)
class WorkerInfo:
    """What a worker resolved when it loaded its model. Bytes are of this rank. `work`: None where it cannot be told."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_slots: int
    backend: str
    isa: str
    threads: int
    weights: str
    cache_dtype: str
    weight_bytes: int
    cache_bytes: int
    details: dict[str, Any] = field(default_factory=dict)
    work: StepWork | None = None
