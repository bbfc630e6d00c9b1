"""Native sampling: one call per step, however many rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from noria import _native
from noria.backends.base import SlotSampling, TokenMasks
from noria.errors import BackendError
from noria.plan import Float32, Int32, TokenLogProbs


class CpuSampler:
    """`Sampler` of the CPU backend, on the threads of its pool."""

    def __init__(self, pool: Any, slots: int, vocab: int) -> None:
        self._pool = pool
        self._no_masks = TokenMasks(np.empty(0, np.int32), np.empty((0, -(-vocab // 32)), np.uint32))
        try:
            self._native = _native.Sampler(slots, vocab)
        except (ValueError, TypeError, MemoryError) as error:
            raise BackendError(f"no sampler for {slots} slots and a vocabulary of {vocab}: {error}") from error

    def admit(self, slot: int, sampling: SlotSampling) -> None:
        """Sets the slot's parameters and rebuilds its penalty state from prompt and output so far."""
        params = sampling.params
        if params.seed is None:
            raise BackendError("a request reached the sampler without a seed")
        try:
            self._native.admit(
                slot=slot,
                seed=params.seed,
                choice=sampling.choice,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                min_tokens=params.min_tokens,
                logprobs=-1 if params.logprobs is None else params.logprobs,
                bias_ids=np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias)),
                bias=np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
                stop_ids=np.array(sampling.stop_ids, np.int32),
                token_ids=sampling.token_ids,
                prompt_length=sampling.prompt_length,
            )
        except (ValueError, TypeError) as error:
            raise BackendError(f"sampler, slot {slot}: {error}") from error

    def release(self, slot: int) -> None:
        """Forgets the slot."""
        try:
            self._native.release(slot)
        except (ValueError, TypeError) as error:
            raise BackendError(f"sampler, slot {slot}: {error}") from error

    def sample(
        self, logits: Float32, slots: Int32, output_positions: Int32, masks: TokenMasks | None = None
    ) -> tuple[Int32, TokenLogProbs | None]:
        """One token per row of logits [rows, vocab], which are overwritten. Log-probabilities, if any row asked: rows
        that did not ask hold rank 0."""
        masks = masks or self._no_masks
        try:
            tokens, scored = self._native.sample(self._pool, logits, slots, output_positions, masks.rows, masks.bits)
        except (ValueError, TypeError) as error:
            raise BackendError(f"sampler: {error}") from error
        return tokens, None if scored is None else TokenLogProbs(*scored)

    def score(self, logits: Float32, targets: Int32, k: int) -> TokenLogProbs:
        """Log-probabilities of given targets [rows] and of the k most likely tokens."""
        try:
            return TokenLogProbs(*self._native.score(self._pool, logits, targets, k))
        except (ValueError, TypeError) as error:
            raise BackendError(f"sampler: {error}") from error
