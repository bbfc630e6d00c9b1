"""Carries out plans: plan → batch → program → logits → sampler → result.

Owns slots, cache, program, sampler and matchers between steps. Knows nothing of requests beyond their slots.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from noria.backends.base import Cache, Limits, Program, Sampler, SlotSampling
from noria.plan import Int32, PromptLogProbs, StepPlan, StepResult, StepTimings, TokenLogProbs
from noria.worker.batch import Prepared, PromptRows, prepare
from noria.worker.grammar import Matchers
from noria.worker.slots import Slots

Rows = NDArray[np.intp]


class Runner:
    """Args: `limits` are those that `program` was compiled with."""

    def __init__(
        self, program: Program, cache: Cache, sampler: Sampler, matchers: Matchers, slots: Slots, limits: Limits
    ) -> None:
        self._program = program
        self._cache = cache
        self._sampler = sampler
        self._matchers = matchers
        self._slots = slots
        self._limits = limits
        self._last: Prepared | None = None
        # Sampled by it and by those that it repeats, not yet in the slots: only other steps look there.
        self._sampled: list[Int32] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """One step, from start to end.

        Raises:
            BackendError: the plan breaks its contract. The state is then undefined: the worker must not go on.
        """
        began = time.perf_counter()
        if plan.repeats and self._last is not None:
            prepared = self._last
            prepared.advance(plan, self._sampled[-1])
        else:
            self._note_sampled()
            self._apply(plan)
            if not len(plan.slots):
                self._forget()
                empty = np.empty(0, np.int32)
                return StepResult(plan.step, empty, empty, timings=StepTimings(prepare=time.perf_counter() - began))
            prepared = prepare(plan, self._slots, self._limits)
        ready = time.perf_counter()
        self._program.run(prepared.batch, self._cache)
        computed = time.perf_counter()
        failed = self._matchers.wait(prepared.sampled)
        tokens, logprobs = self._sample(prepared)
        self._matchers.advance(prepared.sampled, tokens)
        prompts = tuple(self._score(rows) for rows in prepared.prompts)
        self._last = prepared
        self._sampled.append(tokens)
        timings = StepTimings(ready - began, computed - ready, time.perf_counter() - computed)
        return StepResult(plan.step, prepared.sampled, tokens, logprobs, prompts, timings, failed)

    def _forget(self) -> None:
        """There is nothing else to do, and rows have all ended: what they have left is given back."""
        self._matchers.grammars.forget()
        self._slots.forget()

    def _note_sampled(self) -> None:
        """Brings the slots up to date with what has been sampled since they last were."""
        if self._last is not None:
            self._slots.append_tokens(self._last.sampled, *self._sampled)
        self._last = None
        self._sampled.clear()

    def _apply(self, plan: StepPlan) -> None:
        self._slots.apply(plan)
        for slot in plan.released.tolist():
            self._sampler.release(slot)
            self._matchers.release(slot)
        for admission in plan.admitted:
            self._matchers.admit(admission)
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

    def _sample(self, prepared: Prepared) -> tuple[Int32, TokenLogProbs | None]:
        """A token for each sampled row. Logits are only made where more is asked than which is the largest, and at most
        `max_outputs` rows of them at a time."""
        count, greedy, order = len(prepared.sampled), prepared.greedy, prepared.order
        if greedy == count:
            return self._program.largest(0, count), None  # in their order
        tokens = np.empty(count, np.int32)
        if greedy:
            tokens[order[:greedy]] = self._program.largest(0, greedy)
        parts: list[tuple[Rows, TokenLogProbs | None]] = []
        for start in range(greedy, count, self._limits.max_outputs):
            stop = min(start + self._limits.max_outputs, count)
            rows = order[start:stop]
            logits = self._program.logits(start, stop)
            slots = prepared.sampled[rows]
            masks = self._matchers.masks(slots)
            tokens[rows], logprobs = self._sampler.sample(logits, slots, prepared.output_positions[rows], masks)
            parts.append((rows, logprobs))
        return tokens, join_logprobs(parts, count)

    def _score(self, rows: PromptRows) -> PromptLogProbs:
        parts: list[tuple[Rows, TokenLogProbs | None]] = []
        count = len(rows.targets)
        for at in range(0, count, self._limits.max_outputs):
            targets = rows.targets[at : at + self._limits.max_outputs]
            start = rows.start + at
            logits = self._program.logits(start, start + len(targets))
            parts.append((np.arange(at, at + len(targets)), self._sampler.score(logits, targets, rows.k)))
        values = join_logprobs(parts, count)
        assert values is not None
        return PromptLogProbs(rows.slot, rows.first, rows.targets, values)


def join_logprobs(parts: list[tuple[Rows, TokenLogProbs | None]], rows: int) -> TokenLogProbs | None:
    """Log-probabilities of `rows` rows from those of parts of them, each with the indices of its rows. Rows of no part,
    or of one in which none asked (None), are filled with log-probability 0, rank 0 and no alternatives; None if no row
    asked."""
    held = [(at, part) for at, part in parts if part is not None]
    if not held:
        return None
    k = max(part.top.shape[1] for _, part in held)
    out = TokenLogProbs(
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.full((rows, k), -1, np.int32),
        np.zeros((rows, k), np.float32),
    )
    for at, part in held:
        width = part.top.shape[1]
        out.chosen[at], out.ranks[at] = part.chosen, part.ranks
        out.top_ids[at, :width], out.top[at, :width] = part.top_ids, part.top
    return out
