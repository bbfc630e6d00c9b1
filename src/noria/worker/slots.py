"""What the worker remembers of the request in each slot: its tokens and its block table.

Rows are permanent from admission to release, so that a plan is a difference. All of it is arrays over slots: a step
touches them without a Python loop over rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.errors import BackendError
from noria.plan import Admission, Int32, StepPlan

_FIRST_CAPACITY = 1024  # tokens per slot that the token table starts with
_NEVER = np.iinfo(np.int32).max


class Slots:
    """State of all slots.

    Args:
        slots: number of rows.
        max_model_len: most tokens of a row.
        block_size: tokens per block.
        num_blocks: size of the pool, to check block ids against.

    Attributes:
        known: [slots] tokens known of each row (prompt and output); 0 where the slot is free.
        prompt_lengths: [slots].
        prompt_logprobs: [slots] alternatives wanted beside each prompt token; -1: none are wanted.
        greedy_from: [slots] index in each row's output from which on its tokens are those of the largest logits, and
            nothing else is asked about them.
        block_counts: [slots] blocks in each row's table.
        block_tables: [slots, most blocks of a row], C-contiguous; the kernels read it in place.
    """

    def __init__(self, slots: int, max_model_len: int, block_size: int, num_blocks: int) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.known: Int32 = np.zeros(slots, np.int32)
        self.prompt_lengths: Int32 = np.zeros(slots, np.int32)
        self.prompt_logprobs: Int32 = np.full(slots, -1, np.int32)
        self.greedy_from: Int32 = np.full(slots, _NEVER, np.int32)
        self.block_counts: Int32 = np.zeros(slots, np.int32)
        # Zeroed memory is not touched before it is written: rows cost what they hold, not what they might hold.
        self.block_tables: Int32 = np.zeros((slots, -(-max_model_len // block_size)), np.int32)
        self._tokens: Int32 = np.zeros((slots, min(_FIRST_CAPACITY, max_model_len)), np.int32)

    def forget(self) -> None:
        """Gives back what long rows have left in the token table, if no slot is taken."""
        if self._tokens.shape[1] > _FIRST_CAPACITY and not self.known.any():
            self._tokens = np.zeros((len(self), _FIRST_CAPACITY), np.int32)

    def __len__(self) -> int:
        return len(self.known)

    @property
    def tokens(self) -> Int32:
        """[slots, capacity] token ids. The array may be replaced by a larger one at the next admission or append."""
        return self._tokens

    def apply(self, plan: StepPlan) -> None:
        """Releases, admissions and appended blocks of a plan, in that order.

        Raises:
            BackendError: the plan breaks its contract. State may then be half changed: the worker is done for.
        """
        if len(plan.released):
            self._check_occupied(plan.released, "released")
            self.known[plan.released] = 0
            self.block_counts[plan.released] = 0
        for admission in plan.admitted:
            self._admit(admission)
        if len(plan.append_slots):
            self._append_blocks(plan.append_slots, plan.append_blocks)

    def append_tokens(self, slots: Int32, *tokens: Int32) -> None:
        """Adds sampled tokens to each of `slots` (all different): one from each of `tokens`, in order."""
        if not len(slots):
            return
        at, count = self.known[slots], len(tokens)
        self._reserve(int(at.max()) + count)
        if count == 1:
            self._tokens[slots, at] = tokens[0]
        else:
            self._tokens[slots, at + np.arange(count)[:, None]] = tokens
        self.known[slots] = at + count

    def _admit(self, admission: Admission) -> None:
        slot, count, blocks = admission.slot, len(admission.token_ids), len(admission.block_ids)
        if not 0 <= slot < len(self):
            raise BackendError(f"admitted slot {slot} is outside 0…{len(self) - 1}")
        if self.known[slot]:
            raise BackendError(f"slot {slot} is admitted but not free")
        if not 1 <= count <= self.max_model_len:
            raise BackendError(f"slot {slot} is admitted with {count} tokens; 1…{self.max_model_len} are possible")
        if not 0 <= admission.prompt_length <= count:
            raise BackendError(f"slot {slot}: prompt of {admission.prompt_length} tokens among {count}")
        self._reserve(count)
        self._tokens[slot, :count] = admission.token_ids
        self.known[slot] = count
        self.prompt_lengths[slot] = admission.prompt_length
        wanted = admission.params.prompt_logprobs
        self.prompt_logprobs[slot] = -1 if wanted is None else wanted
        self.greedy_from[slot] = _greedy_from(admission)
        self._check_blocks(admission.block_ids)
        if blocks > self.block_tables.shape[1]:
            raise BackendError(f"slot {slot} has {blocks} blocks; {self.block_tables.shape[1]} are possible")
        self.block_tables[slot, :blocks] = admission.block_ids
        self.block_counts[slot] = blocks

    def _append_blocks(self, slots: Int32, blocks: Int32) -> None:
        if len(slots) != len(blocks):
            raise BackendError(f"{len(slots)} slots for {len(blocks)} appended blocks")
        self._check_occupied(slots, "appended to")
        self._check_blocks(blocks)
        if np.bincount(slots).max() == 1:  # decoding: a block at a time
            at = self.block_counts[slots]
            self._check_room(at)
            self.block_tables[slots, at] = blocks
            self.block_counts[slots] = at + 1
            return
        # Several blocks for one slot: rank each among those of its slot.
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
        counts = np.diff(firsts, append=len(ordered))
        ranks = np.arange(len(ordered)) - np.repeat(firsts, counts)
        at = self.block_counts[ordered] + ranks
        self._check_room(at)
        self.block_tables[ordered, at] = blocks[order]
        self.block_counts[ordered[firsts]] += counts.astype(np.int32)

    def _check_room(self, at: NDArray[np.integer[Any]]) -> None:
        if at.max() >= self.block_tables.shape[1]:
            raise BackendError(f"a slot is given more than {self.block_tables.shape[1]} blocks")

    def _check_occupied(self, slots: Int32, what: str) -> None:
        if slots.min() < 0 or slots.max() >= len(self):
            raise BackendError(f"{what} slots are outside 0…{len(self) - 1}: {slots.min()}…{slots.max()}")
        if not self.known[slots].all():
            raise BackendError(f"slot {slots[self.known[slots] == 0][0]} is {what}, but it is free")

    def _check_blocks(self, blocks: Int32) -> None:
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.num_blocks:
            raise BackendError(f"block ids {blocks.min()}…{blocks.max()} are outside 0…{self.num_blocks - 1}")

    def _reserve(self, capacity: int) -> None:
        """Makes the token table at least `capacity` wide: doubling, within max_model_len."""
        held = self._tokens.shape[1]
        if capacity <= held:
            return
        if capacity > self.max_model_len:
            raise BackendError(f"a row reaches {capacity} tokens; {self.max_model_len} are possible")
        wider = np.zeros((len(self), min(max(capacity, 2 * held), self.max_model_len)), np.int32)
        used = np.flatnonzero(self.known)
        wider[used, :held] = self._tokens[used]
        self._tokens = wider


def _greedy_from(admission: Admission) -> int:
    params = admission.params
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    if not params.greedy or params.logprobs is not None or params.logit_bias or penalties != (1.0, 0.0, 0.0):
        return _NEVER
    if params.grammar is not None or params.allowed_token_ids:
        return _NEVER
    # Before min_tokens, end tokens are passed over.
    return params.min_tokens if admission.stop_ids else 0
