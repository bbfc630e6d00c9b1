"""StepPlan → Batch: the arrays that a step's kernels read, made without a loop over rows or tokens.

Also the check that a plan keeps its contract: a wrong index here would be a wrong memory access there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from noria.backends.base import Batch, Limits
from noria.errors import BackendError
from noria.plan import Int32, StepPlan
from noria.worker.slots import Slots


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of the head's product that score one request's prompt tokens.

    Attributes:
        slot: of the request. k: alternatives wanted.
        first: index in the prompt of the first token scored.
        targets: [count] tokens `first` … `first + count - 1`.
        start: index of the first of its rows among the step's output rows.
    """

    slot: int
    k: int
    first: int
    targets: Int32
    start: int


@dataclass(slots=True)
class Prepared:
    """A batch and what becomes of its output rows: the sampled ones first, then those that score prompts.

    Attributes:
        sampled: [sampled] slots, in plan order; they are the first output rows.
        output_positions: [sampled] index in each request's output of the token to be drawn.
        order: [sampled] which of these each output row is: those whose token is merely that of the largest logit come
            first.
        greedy: how many those are.
        step: of the plan.
        repeats: how often `advance` may be called.
    """

    batch: Batch
    sampled: Int32
    output_positions: Int32
    order: NDArray[np.intp]
    greedy: int
    prompts: tuple[PromptRows, ...]
    step: int
    repeats: int

    def advance(self, plan: StepPlan, tokens: Int32) -> None:
        """Makes this the batch of the plan that repeats its own. The arrays are changed in place.

        Args:
            tokens: [rows] that the step before has sampled.

        Raises:
            BackendError: the plan is not the one after this one, or must not repeat it.
        """
        if plan.step != self.step + 1 or len(plan.slots) != len(tokens) or self.repeats <= 0:
            raise BackendError(f"step {plan.step} cannot repeat step {self.step}")
        self.step = plan.step
        self.repeats -= 1
        batch = self.batch
        batch.input_ids[:] = tokens
        batch.positions += 1
        batch.kv_positions += 1
        batch.kv_lengths += 1
        self.output_positions += 1


def prepare(plan: StepPlan, slots: Slots, limits: Limits) -> Prepared:
    """Makes the batch of a plan whose changes have been applied to `slots`. The plan has at least one row.

    Raises:
        BackendError: the plan breaks its contract; names the row.
    """
    check(plan, slots, limits)
    starts = np.zeros(len(plan.slots) + 1, np.int32)
    np.cumsum(plan.counts, out=starts[1:])
    total = int(starts[-1])
    # For each token: its row's slot and its position.
    slot_of = np.repeat(plan.slots, plan.counts)
    positions = np.arange(total, dtype=np.int32) + np.repeat(plan.starts - starts[:-1], plan.counts)
    block, offset = np.divmod(positions, np.int32(slots.block_size))
    sampled = np.flatnonzero(plan.sample)
    chosen = plan.slots[sampled]
    output_positions = slots.known[chosen] - slots.prompt_lengths[chosen]
    drawn = output_positions < slots.greedy_from[chosen]
    order = np.argsort(drawn, kind="stable")
    output_rows = starts[1:][sampled[order]] - np.int32(1)
    prompts = _prompt_rows(plan, slots, len(sampled)) if plan.prompt_logprobs else ()
    if prompts:
        output_rows = np.concatenate([output_rows, *_scored_rows(plan, starts, prompts)])
    batch = Batch(
        input_ids=slots.tokens[slot_of, positions],
        positions=positions,
        kv_positions=slots.block_tables[slot_of, block] * np.int32(slots.block_size) + offset,
        query_starts=starts,
        kv_lengths=plan.starts + plan.counts,
        slots=plan.slots,
        block_tables=slots.block_tables,
        output_rows=output_rows.astype(np.int32, copy=False),
    )
    greedy = len(order) - int(np.count_nonzero(drawn))
    repeats = _repeats(plan, slots, batch) if len(chosen) == len(plan.slots) and not prompts else 0
    if greedy < len(order) and repeats:
        repeats = min(repeats, int((slots.greedy_from[chosen] - output_positions)[drawn].min()) - 1)
    return Prepared(batch, chosen, output_positions, order, greedy, prompts, plan.step, repeats)


def _repeats(plan: StepPlan, slots: Slots, batch: Batch) -> int:
    """Further tokens of the rows, all sampled, that need no other block and stay within the longest context."""
    if len(batch.positions) > len(plan.slots):
        return 0  # the next step has not as many tokens
    size = slots.block_size
    return min(size - 1 - int((batch.positions % size).max()), slots.max_model_len - 1 - int(batch.kv_lengths.max()))


def check(plan: StepPlan, slots: Slots, limits: Limits) -> None:
    """Raises a BackendError that names what is wrong with a plan's rows."""
    rows = len(plan.slots)
    if not len(plan.starts) == len(plan.counts) == len(plan.sample) == rows:
        raise BackendError(f"step {plan.step}: columns of different length")
    if rows > limits.max_seqs or plan.tokens > limits.max_tokens:
        raise BackendError(
            f"step {plan.step}: {rows} rows with {plan.tokens} tokens exceed {limits.max_seqs} with {limits.max_tokens}"
        )
    for column in (plan.slots, plan.starts, plan.counts):
        if column.dtype != np.int32:
            raise BackendError(f"step {plan.step}: columns must be int32, one is {column.dtype}")
    if any(not 0 <= row < rows for row in plan.prompt_logprobs):
        raise BackendError(f"step {plan.step}: prompt_logprobs names a row that does not exist")
    if plan.slots.min() < 0 or plan.slots.max() >= len(slots):
        raise BackendError(f"step {plan.step}: slots outside 0…{len(slots) - 1}")
    if np.bincount(plan.slots).max() > 1:
        raise BackendError(f"step {plan.step}: a slot appears twice")
    known, ends = slots.known[plan.slots], plan.starts + plan.counts
    held = slots.block_counts[plan.slots] * np.int32(slots.block_size)
    # One test for all rows and rules; which one is broken is found out only if any is.
    wrong = (plan.starts < 0) | (plan.counts < 1) | (ends > known) | (held < ends)
    wrong |= plan.sample & ((ends != known) | (known >= slots.max_model_len))
    if wrong.any():
        _explain(plan, slots, int(np.flatnonzero(wrong)[0]))


def _explain(plan: StepPlan, slots: Slots, row: int) -> NoReturn:
    """Raises a BackendError that says what is wrong with a row."""
    slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(plan.counts[row])
    known, end = int(slots.known[slot]), start + count
    reasons = (
        (known == 0, "slot is free"),
        (start < 0, "start is negative"),
        (count < 1, "no tokens to compute"),
        (end > known, f"computes tokens that are not known ({known} are)"),
        (end > slots.block_counts[slot] * slots.block_size, "has not the blocks for its tokens"),
        (end != known, f"samples before its last known token ({known} are known)"),
        (True, "samples beyond the longest context"),
    )
    why = next(reason for broken, reason in reasons if broken)
    raise BackendError(f"step {plan.step}, row {row} (slot {slot}, start {start}, count {count}): {why}")


def _prompt_rows(plan: StepPlan, slots: Slots, start: int) -> tuple[PromptRows, ...]:
    """Position p scores token p + 1, as far as that is a prompt token. `start`: output rows before these."""
    made = []
    for row in plan.prompt_logprobs:
        slot = int(plan.slots[row])
        if slots.prompt_logprobs[slot] < 0:
            raise BackendError(f"step {plan.step}: slot {slot} wanted no log-probabilities of its prompt")
        first = int(plan.starts[row]) + 1
        stop = min(first + int(plan.counts[row]), int(slots.prompt_lengths[slot]))
        if stop > first:
            targets = slots.tokens[slot, first:stop].copy()
            made.append(PromptRows(slot, int(slots.prompt_logprobs[slot]), first, targets, start))
            start += len(targets)
    return tuple(made)


def _scored_rows(plan: StepPlan, query_starts: Int32, prompts: tuple[PromptRows, ...]) -> list[Int32]:
    row_of = {int(plan.slots[row]): row for row in plan.prompt_logprobs}
    rows = [(row_of[prompt.slot], len(prompt.targets)) for prompt in prompts]
    return [np.arange(query_starts[row], query_starts[row] + count, dtype=np.int32) for row, count in rows]
