"""StepPlan → Batch: the arrays that a step's kernels read, made without a loop over rows or tokens.

Also the check that a plan keeps its contract: a wrong index here would be a wrong memory access there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch and what becomes of its output rows: the sampled ones first, then those that score prompts.

    Attributes:
        sampled: [sampled] slots, in plan order; they are the first output rows.
        output_positions: [sampled] index in each request's output of the token to be drawn.
    """

    batch: Batch
    sampled: Int32
    output_positions: Int32
    prompts: tuple[PromptRows, ...]


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
    output_rows = starts[1:][sampled] - np.int32(1)
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
    chosen = plan.slots[sampled]
    return Prepared(batch, chosen, slots.known[chosen] - slots.prompt_lengths[chosen], prompts)


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
    if plan.slots.min() < 0 or plan.slots.max() >= len(slots):
        raise BackendError(f"step {plan.step}: slots outside 0…{len(slots) - 1}")
    if np.bincount(plan.slots, minlength=1).max() > 1:
        raise BackendError(f"step {plan.step}: a slot appears twice")
    known, ends = slots.known[plan.slots], plan.starts + plan.counts
    _refuse(plan, known == 0, "slot is free")
    _refuse(plan, plan.starts < 0, "start is negative")
    _refuse(plan, plan.counts < 1, "no tokens to compute")
    _refuse(plan, ends > known, "computes tokens that are not known")
    _refuse(plan, plan.sample & (ends != known), "samples before its last known token")
    _refuse(plan, plan.sample & (known >= slots.max_model_len), "samples beyond the longest context")
    _refuse(plan, slots.block_counts[plan.slots] * slots.block_size < ends, "has not the blocks for its tokens")
    if any(not 0 <= row < rows for row in plan.prompt_logprobs):
        raise BackendError(f"step {plan.step}: prompt_logprobs names a row that does not exist")


def _refuse(plan: StepPlan, wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], why: str) -> None:
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        where = f"slot {plan.slots[row]}, start {plan.starts[row]}, count {plan.counts[row]}"
        raise BackendError(f"step {plan.step}, row {row} ({where}): {why}")


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
