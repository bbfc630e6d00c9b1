"""Carries out plans: plan → batch → program → logits → sampler → result.

Owns slots, cache, program and sampler between steps. Knows nothing of requests beyond their slots.
"""

from __future__ import annotations

import time

import numpy as np

from noria.backends.base import Cache, Limits, Program, Sampler, SlotSampling
from noria.plan import PromptLogProbs, StepPlan, StepResult, StepTimings, TokenLogProbs
from noria.worker.batch import Prepared, PromptRows, prepare
from noria.worker.slots import Slots


class Runner:
    """Args: `limits` are those that `program` was compiled with."""

    def __init__(self, program: Program, cache: Cache, sampler: Sampler, slots: Slots, limits: Limits) -> None:
        self._program = program
        self._cache = cache
        self._sampler = sampler
        self._slots = slots
        self._limits = limits

    def execute(self, plan: StepPlan) -> StepResult:
        """One step, from start to end.

        Raises:
            BackendError: the plan breaks its contract. The state is then undefined: the worker must not go on.
        """
        began = time.perf_counter()
        self._apply(plan)
        if not len(plan.slots):
            empty = np.empty(0, np.int32)
            return StepResult(plan.step, empty, empty, timings=StepTimings(prepare=time.perf_counter() - began))
        prepared = prepare(plan, self._slots, self._limits)
        ready = time.perf_counter()
        self._program.run(prepared.batch, self._cache)
        computed = time.perf_counter()
        tokens, logprobs = self._sample(prepared)
        prompts = tuple(self._score(rows) for rows in prepared.prompts)
        self._slots.append_tokens(prepared.sampled, tokens)
        timings = StepTimings(ready - began, computed - ready, time.perf_counter() - computed)
        return StepResult(plan.step, prepared.sampled, tokens, logprobs, prompts, timings)

    def _apply(self, plan: StepPlan) -> None:
        self._slots.apply(plan)
        for slot in plan.released.tolist():
            self._sampler.release(slot)
        for admission in plan.admitted:
            self._sampler.admit(
                admission.slot,
                SlotSampling(
                    admission.params,
                    admission.choice,
                    admission.stop_ids,
                    admission.token_ids,
                    admission.prompt_length,
                ),
            )
        if len(plan.copies):
            self._cache.copy_blocks(plan.copies)

    def _sample(self, prepared: Prepared) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], TokenLogProbs | None]:
        """Draws a token for each sampled row, at most `max_outputs` rows of logits at a time."""
        slots, positions = prepared.sampled, prepared.output_positions
        step = self._limits.max_outputs
        tokens = np.empty(len(slots), np.int32)
        parts: list[tuple[int, TokenLogProbs | None]] = []
        for start in range(0, len(slots), step):
            stop = min(start + step, len(slots))
            logits = self._program.logits(start, stop)
            tokens[start:stop], logprobs = self._sampler.sample(logits, slots[start:stop], positions[start:stop])
            parts.append((stop - start, logprobs))
        return tokens, join_logprobs(parts)

    def _score(self, rows: PromptRows) -> PromptLogProbs:
        parts: list[tuple[int, TokenLogProbs | None]] = []
        for at in range(0, len(rows.targets), self._limits.max_outputs):
            targets = rows.targets[at : at + self._limits.max_outputs]
            start = rows.start + at
            logits = self._program.logits(start, start + len(targets))
            parts.append((len(targets), self._sampler.score(logits, targets, rows.k)))
        values = join_logprobs(parts)
        assert values is not None
        return PromptLogProbs(rows.slot, rows.first, rows.targets, values)


def join_logprobs(parts: list[tuple[int, TokenLogProbs | None]]) -> TokenLogProbs | None:
    """Log-probabilities of slices, one after the other. A slice in which no row asked (None, with its row count) is
    filled with log-probability 0, rank 0 and no alternatives; None if all are."""
    held = [part for _, part in parts if part is not None]
    if len(parts) == len(held) == 1:
        return held[0]
    if not held:
        return None
    rows, k = sum(count for count, _ in parts), max(part.top.shape[1] for part in held)
    out = TokenLogProbs(
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.full((rows, k), -1, np.int32),
        np.zeros((rows, k), np.float32),
    )
    at = 0
    for count, part in parts:
        if part is not None:
            width = part.top.shape[1]
            out.chosen[at : at + count], out.ranks[at : at + count] = part.chosen, part.ranks
            out.top_ids[at : at + count, :width], out.top[at : at + count, :width] = part.top_ids, part.top
        at += count
    return out
