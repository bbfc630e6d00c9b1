"""Slots and batch building against a loop that says the same slowly, and the contract of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.plans import admit, int32, plan
from noria.backends.base import Batch, Limits
from noria.errors import BackendError
from noria.plan import StepPlan
from noria.worker.batch import Prepared, prepare
from noria.worker.slots import Slots

LIMITS = Limits(max_tokens=64, max_outputs=8, max_seqs=6)


def slots_with_two(max_model_len: int = 64) -> Slots:
    slots = Slots(6, max_model_len, 8, 32)
    slots.apply(plan(0, [], admitted=(admit(1, range(20), [5, 6, 7]), admit(4, range(100, 109), [9, 2], 7))))
    return slots


def naive(p: StepPlan, slots: Slots) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {name: [] for name in ("input_ids", "positions", "kv_positions", "kv_lengths", "rows")}
    for slot, start, count, sample in zip(p.slots, p.starts, p.counts, p.sample, strict=True):
        for position in range(start, start + count):
            out["input_ids"].append(int(slots.tokens[slot, position]))
            out["positions"].append(position)
            block = int(slots.block_tables[slot, position // 8])
            out["kv_positions"].append(block * 8 + position % 8)
        out["kv_lengths"].append(int(start + count))
        if sample:
            out["rows"].append(len(out["input_ids"]) - 1)
    return out


def compare(prepared: Prepared, p: StepPlan, slots: Slots) -> None:
    batch, expected = prepared.batch, naive(p, slots)
    for name in ("input_ids", "positions", "kv_positions", "kv_lengths"):
        values = getattr(batch, name)
        assert values.dtype == np.int32, name
        assert values.tolist() == expected[name], name
    assert batch.output_rows.tolist() == expected["rows"]
    assert batch.query_starts.tolist() == [0, *np.cumsum(p.counts).tolist()]
    assert batch.slots.tolist() == p.slots.tolist()
    assert batch.block_tables is slots.block_tables
    assert batch.block_tables.flags["C_CONTIGUOUS"]


def test_batch_of_mixed_rows() -> None:
    slots = slots_with_two()
    p = plan(1, [(4, 8, 1, True), (1, 3, 12, False)])
    prepared = prepare(p, slots, LIMITS)
    compare(prepared, p, slots)
    assert prepared.sampled.tolist() == [4]
    assert prepared.output_positions.tolist() == [2]  # 9 known tokens, 7 of them prompt


def test_rows_that_take_the_largest_logit_come_first() -> None:
    slots = Slots(6, 64, 8, 32)
    asked: list[dict[str, Any]] = [
        {}, {"temperature": 0.7}, {"logprobs": 0}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}, {}
    ]  # fmt: skip
    admitted = tuple(admit(slot, [1, 2], [slot], **made) for slot, made in enumerate(asked))
    slots.apply(plan(0, [], admitted=admitted))
    rows = [(3, 0, 2, True), (1, 0, 2, True), (5, 0, 1, False), (0, 0, 2, True), (4, 0, 2, True), (2, 0, 2, True)]
    p = plan(1, rows)
    prepared = prepare(p, slots, LIMITS)
    assert prepared.sampled.tolist() == [3, 1, 0, 4, 2]
    assert prepared.greedy == 1
    assert prepared.order.tolist() == [2, 0, 1, 3, 4]
    assert prepared.batch.output_rows.tolist() == [6, 1, 3, 8, 10]
    assert prepare(plan(2, [(5, 0, 2, True), (0, 0, 2, True)]), slots, LIMITS).greedy == 2


def test_end_tokens_are_ruled_out_before_min_tokens_only() -> None:
    slots = Slots(6, 64, 8, 32)
    admitted = tuple(
        replace(admit(slot, [1, 2], [slot], min_tokens=2, max_tokens=9), stop_ids=stop_ids)
        for slot, stop_ids in enumerate([(7,), ()])
    )
    slots.apply(plan(0, [], admitted=admitted))
    found = []
    for step in range(1, 4):
        rows = [(slot, int(slots.known[slot]) - 1, 1, True) for slot in (0, 1)]
        found.append(prepare(plan(step, rows), slots, LIMITS).greedy)
        slots.append_tokens(int32(0, 1), int32(5, 5))
    assert found == [1, 1, 2]


def test_random_plans_against_the_loop() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        slots = Slots(6, 64, 8, 48)
        lengths = rng.integers(1, 64, 6)
        ids = rng.permutation(48)
        tables = [ids[8 * slot : 8 * slot + -(-int(length) // 8)].tolist() for slot, length in enumerate(lengths)]
        admitted = tuple(admit(slot, rng.integers(0, 999, lengths[slot]).tolist(), tables[slot]) for slot in range(6))
        slots.apply(plan(0, [], admitted=admitted))
        rows = []
        for slot in rng.permutation(6)[: rng.integers(1, 7)]:
            start = int(rng.integers(0, lengths[slot]))
            count = min(int(rng.integers(1, 11)), int(lengths[slot]) - start)
            rows.append((int(slot), start, count, start + count == lengths[slot]))
        p = plan(1, rows)
        compare(prepare(p, slots, LIMITS), p, slots)


def test_a_repeated_step_has_the_batch_that_would_be_made_for_it() -> None:
    slots = Slots(6, 64, 8, 32)
    slots.apply(plan(0, [], admitted=(admit(1, range(17), [5, 6, 7]), admit(4, range(9), [9, 2], temperature=0.7))))
    p = plan(1, [(4, 8, 1, True), (1, 16, 1, True)])
    moved = prepare(p, slots, LIMITS)
    assert moved.repeats == 7
    for step in range(2, 9):
        tokens = int32(100 + step, 200 + step)
        slots.append_tokens(p.slots, tokens)
        p = plan(step, [(4, 6 + step + 1, 1, True), (1, 14 + step + 1, 1, True)], repeats=True)
        moved.advance(p, tokens)
        made = prepare(p, slots, LIMITS)
        for name in Batch.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(moved.batch, name), getattr(made.batch, name), name, strict=True)
        assert moved.output_positions.tolist() == made.output_positions.tolist()
        assert (moved.greedy, moved.order.tolist(), moved.repeats) == (made.greedy, made.order.tolist(), made.repeats)
    with pytest.raises(BackendError, match="step 9 cannot repeat step 8"):
        moved.advance(plan(9, [(4, 16, 1, True), (1, 24, 1, True)], repeats=True), int32(1, 2))


def test_what_must_not_be_repeated() -> None:
    slots = Slots(6, 21, 16, 32)
    admitted = (admit(0, range(20), [5, 6]), admit(1, range(3), [7]), admit(2, range(3), [8], prompt_logprobs=1))
    slots.apply(plan(0, [], admitted=(*admitted, replace(admit(3, [1], [9], min_tokens=3), stop_ids=(7,)))))
    assert prepare(plan(1, [(0, 19, 1, True)]), slots, LIMITS).repeats == 0  # the longest context
    assert prepare(plan(1, [(1, 0, 3, True)]), slots, LIMITS).repeats == 0  # the next step has fewer tokens
    assert prepare(plan(1, [(1, 2, 1, True), (0, 0, 1, False)]), slots, LIMITS).repeats == 0
    assert prepare(plan(1, [(2, 0, 1, False)], prompt_logprobs=(0,)), slots, LIMITS).repeats == 0
    assert prepare(plan(1, [(3, 0, 1, True)]), slots, LIMITS).repeats == 2  # then it is greedy
    other = prepare(plan(1, [(1, 2, 1, True)]), slots, LIMITS)
    with pytest.raises(BackendError, match="cannot repeat"):
        other.advance(plan(3, [(1, 3, 1, True)], repeats=True), int32(1))
    with pytest.raises(BackendError, match="cannot repeat"):
        other.advance(plan(2, [(1, 3, 1, True), (3, 0, 1, True)], repeats=True), int32(1))


def test_tokens_of_several_steps_are_added_at_once() -> None:
    slots, other = slots_with_two(), slots_with_two()
    sampled = [int32(10 * step, 10 * step + 1) for step in range(3)]
    for tokens in sampled:
        slots.append_tokens(int32(4, 1), tokens)
    other.append_tokens(int32(4, 1), *sampled)
    assert slots.known.tolist() == other.known.tolist() == [0, 23, 0, 0, 12, 0]
    np.testing.assert_array_equal(slots.tokens, other.tokens)


def test_appended_blocks_keep_their_order_within_each_slot() -> None:
    slots = slots_with_two()
    slots.apply(plan(1, [], append_slots=int32(4, 1, 4, 4, 1), append_blocks=int32(20, 21, 22, 23, 24)))
    assert slots.block_tables[4, :5].tolist() == [9, 2, 20, 22, 23]
    assert slots.block_tables[1, :5].tolist() == [5, 6, 7, 21, 24]
    assert slots.block_counts.tolist() == [0, 5, 0, 0, 5, 0]


def test_released_slots_may_be_admitted_again_in_one_plan() -> None:
    slots = slots_with_two()
    slots.apply(plan(1, [], released=int32(1), admitted=(admit(1, [7, 8], [3]),)))
    assert slots.known.tolist() == [0, 2, 0, 0, 9, 0]
    p = plan(2, [(1, 0, 2, True)])
    assert prepare(p, slots, LIMITS).batch.input_ids.tolist() == [7, 8]


def test_sampled_tokens_are_known_to_the_next_plan() -> None:
    slots = slots_with_two()
    slots.append_tokens(int32(4, 1), int32(555, 777))
    p = plan(1, [(1, 20, 1, True), (4, 8, 2, True)])
    slots.apply(plan(1, [], append_slots=int32(), append_blocks=int32()))
    prepared = prepare(p, slots, LIMITS)
    assert prepared.batch.input_ids.tolist() == [777, 108, 555]
    assert prepared.output_positions.tolist() == [1, 3]


def test_token_table_grows_only_when_rows_grow() -> None:
    slots = Slots(256, 1_000_000, 16, 70_000)
    assert slots.tokens.nbytes <= 256 * 1024 * 4
    slots.apply(plan(0, [], admitted=(admit(3, [1] * 1024, range(64)), admit(200, [5, 6], [64]))))
    slots.append_tokens(int32(3, 200), int32(11, 12))
    assert slots.tokens.shape[1] == 2048
    assert slots.tokens[3, :1025].tolist() == [1] * 1024 + [11]
    assert slots.tokens[200, :3].tolist() == [5, 6, 12]


def test_prompt_rows_score_the_next_token() -> None:
    slots = Slots(6, 64, 8, 32)
    admitted = (admit(0, range(30, 45), [1, 2], prompt_logprobs=2), admit(1, [1, 2, 3], [3]))
    slots.apply(plan(0, [], admitted=admitted))
    first = prepare(plan(1, [(0, 0, 6, False), (1, 0, 3, True)], prompt_logprobs=(0,)), slots, LIMITS)
    # The sampled row comes first, then positions 0 … 5, which score tokens 1 … 6.
    assert first.batch.output_rows.tolist() == [8, 0, 1, 2, 3, 4, 5]
    (rows,) = first.prompts
    assert (rows.slot, rows.k, rows.first, rows.start) == (0, 2, 1, 1)
    assert rows.targets.tolist() == [31, 32, 33, 34, 35, 36]
    # The last chunk: its last position predicts output, not prompt.
    last = prepare(plan(2, [(0, 6, 9, True)], prompt_logprobs=(0,)), slots, LIMITS)
    assert last.batch.output_rows.tolist() == [8, 0, 1, 2, 3, 4, 5, 6, 7]
    assert last.prompts[0].targets.tolist() == list(range(37, 45))
    assert last.prompts[0].first == 7


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    slots = Slots(6, 64, 8, 32)
    slots.apply(plan(0, [], admitted=(admit(0, [9], [1], prompt_logprobs=0),)))
    prepared = prepare(plan(1, [(0, 0, 1, True)], prompt_logprobs=(0,)), slots, LIMITS)
    assert prepared.prompts == ()
    assert prepared.batch.output_rows.tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 0, 1, False)], "row 0 .*slot is free"),
        ([(1, 0, 1, False), (6, 0, 1, False)], "slots outside 0…5"),
        ([(-1, 0, 1, False)], "slots outside 0…5"),
        ([(1, 0, 1, False), (1, 1, 1, False)], "a slot appears twice"),
        ([(4, 0, 9, True), (1, -1, 2, False)], "row 1 .*start is negative"),
        ([(1, 5, 0, False)], "no tokens to compute"),
        ([(1, 19, 2, False)], "not known"),
        ([(1, 0, 5, True)], "samples before its last known token"),
    ],
)
def test_rows_that_break_the_contract(rows: list[tuple[int, int, int, bool]], said: str) -> None:
    with pytest.raises(BackendError, match=f"step 9.*{said}"):
        prepare(plan(9, rows), slots_with_two(), LIMITS)


def test_rows_without_blocks() -> None:
    slots = Slots(6, 64, 8, 32)
    slots.apply(plan(0, [], admitted=(admit(1, range(20), [5, 6]),)))
    prepare(plan(1, [(1, 0, 16, False)]), slots, LIMITS)
    with pytest.raises(BackendError, match="has not the blocks"):
        prepare(plan(1, [(1, 0, 17, False)]), slots, LIMITS)


def test_rows_at_the_longest_context() -> None:
    slots = Slots(6, 20, 8, 32)
    slots.apply(plan(0, [], admitted=(admit(1, range(20), [5, 6, 7]),)))
    prepare(plan(1, [(1, 0, 20, False)]), slots, LIMITS)
    with pytest.raises(BackendError, match="beyond the longest context"):
        prepare(plan(1, [(1, 0, 20, True)]), slots, LIMITS)


def test_steps_over_the_limits() -> None:
    slots = Slots(6, 128, 8, 32)
    slots.apply(plan(0, [], admitted=(admit(1, range(65), range(9)),)))
    with pytest.raises(BackendError, match="1 rows with 65 tokens exceed 6 with 64"):
        prepare(plan(1, [(1, 0, 65, True)]), slots, LIMITS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"released": int32(0)}, "slot 0 is released, but it is free"),
        ({"released": int32(9)}, "released slots are outside"),
        ({"admitted": (admit(1, [1], [1]),)}, "slot 1 is admitted but not free"),
        ({"admitted": (admit(6, [1], [1]),)}, "admitted slot 6 is outside"),
        ({"admitted": (admit(0, [], []),)}, "admitted with 0 tokens"),
        ({"admitted": (admit(0, range(65), []),)}, "admitted with 65 tokens"),
        ({"admitted": (admit(0, [1], [32]),)}, "block ids 32…32 are outside 0…31"),
        ({"admitted": (admit(0, [1], range(9)),)}, "has 9 blocks; 8 are possible"),
        ({"append_slots": int32(0), "append_blocks": int32(1)}, "slot 0 is appended to, but it is free"),
        ({"append_slots": int32(1), "append_blocks": int32(-1)}, "block ids -1"),
        ({"append_slots": int32(*[1] * 6), "append_blocks": int32(*range(6))}, "more than 8 blocks"),
        ({"append_slots": int32(1), "append_blocks": int32(1, 2)}, "1 slots for 2"),
    ],
)
def test_changes_that_break_the_contract(change: dict[str, object], said: str) -> None:
    with pytest.raises(BackendError, match=said):
        slots_with_two().apply(plan(1, [], **change))


def test_long_rows_leave_nothing_in_the_token_table_of_idle_slots() -> None:
    slots = Slots(2, 4096, 16, 600)
    narrow = slots.tokens.shape
    slots.apply(plan(1, [], admitted=(admit(1, range(3000), range(200)),)))
    slots.forget()
    assert slots.tokens[1, :3000].tolist() == list(range(3000))  # not while it is in use
    slots.apply(plan(2, [], released=int32(1)))
    slots.forget()
    assert slots.tokens.shape == narrow
    slots.apply(plan(3, [], admitted=(admit(0, range(2000), range(200)),)))
    assert slots.tokens[0, :2000].tolist() == list(range(2000))
