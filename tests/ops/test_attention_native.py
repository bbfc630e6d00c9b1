"""Native cache, rope_cache and attention against float64 NumPy, and bit for bit against themselves.

The attention reference reads the keys and values back from the cache, so that its bound is that of float32 arithmetic
whatever the cache type; how well the cache keeps them is tested apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

native: Any = pytest.importorskip("noria._native")

TYPES = ("f32", "bf16", "int8")
# |out - reference| <= BOUND * max|value|: scores of magnitude 10 are off by 10 * 2^-24 * sqrt(head_dim), weights by the
# same factor; int8 products on some levels round queries to 16 bits.
BOUND = 3e-5


@dataclass
class Setup:
    """A cache with random contents for sequences of given lengths, at shuffled blocks."""

    type: str = "f32"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    lengths: tuple[int, ...] = (70,)
    seed: int = 0
    spare: int = 3
    shared: tuple[int, ...] = ()  # per sequence: so many tokens, whole blocks, are the first sequence's
    pool: Any = field(default_factory=lambda: native.Pool(1))

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        blocks = [-(-length // self.block_size) for length in self.lengths]
        total = sum(blocks) + self.spare
        self.cache = native.KvCache(2, self.type, self.kv_heads, self.head_dim, self.block_size, total)
        order = random.permutation(total).astype(np.int32)
        self.tables = np.full((len(blocks), max(blocks)), -1, np.int32)
        for slot, count in enumerate(blocks):
            self.tables[slot, :count], order = order[:count], order[count:]
        for slot, tokens in enumerate(self.shared):
            self.tables[slot, : tokens // self.block_size] = self.tables[0, : tokens // self.block_size]
        self.q: list[np.ndarray] = []  # per sequence [tokens, heads * head_dim]
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        for slot, length in enumerate(self.lengths):
            qkv = np.random.default_rng([self.seed, slot]).standard_normal((length, width)).astype(np.float32)
            self.q.append(self.write(qkv, slot))

    def kv_positions(self, slot: int, length: int) -> np.ndarray:
        at = np.arange(length)
        return (self.tables[slot, at // self.block_size] * self.block_size + at % self.block_size).astype(np.int32)

    def write(self, qkv: np.ndarray, slot: int) -> np.ndarray:
        at = np.arange(len(qkv), dtype=np.int32)
        return native.rope_cache(
            self.pool, qkv, at, self.kv_positions(slot, len(qkv)), self.cache, 1, self.heads, None, None
        )

    def attend(self, rows: list[tuple[int, int, int]], threads: int = 1, **options: Any) -> list[np.ndarray]:
        """Attention for (slot, first token, tokens) of each sequence in one batch."""
        positions = np.concatenate([np.arange(a, a + n, dtype=np.int32) for _, a, n in rows])
        out = native.attention(
            native.Pool(threads),
            np.ascontiguousarray(np.concatenate([self.q[s][a : a + n] for s, a, n in rows])),
            positions,
            np.cumsum([0] + [n for *_, n in rows]).astype(np.int32),
            np.array([a + n for _, a, n in rows], np.int32),
            np.array([s for s, *_ in rows], np.int32),
            self.tables,
            self.cache,
            1,
            self.heads,
            self.head_dim**-0.5,
            **options,
        )
        return np.split(out, np.cumsum([n for *_, n in rows])[:-1])

    def reference(self, slot: int, last: int, window: int = 0, softcap: float = 0.0) -> tuple[np.ndarray, float]:
        """Attention of the last tokens of a sequence in float64; largest value."""
        length = self.lengths[slot]
        keys, values = (x.astype(np.float64) for x in self.cache.read(1, self.kv_positions(slot, length)))
        q = self.q[slot][-last:].reshape(-1, self.heads, self.head_dim).astype(np.float64)
        out = np.empty_like(q)
        distance = np.arange(length)[-last:, None] - np.arange(length)[None, :]
        seen = (distance >= 0) & ((distance < window) if window else True)
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ keys[:, kv].T * self.head_dim**-0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ values[:, kv]
        return out.reshape(len(out), -1), float(np.abs(values).max())


def check(setup: Setup, last: int = 200, **options: Any) -> None:
    for slot, length in enumerate(setup.lengths):
        got = setup.attend([(slot, 0, length)], **options)[0][-last:]
        want, largest = setup.reference(slot, last, **options)
        assert np.abs(got - want).max() <= BOUND * largest


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("size", [1000.0, 10000.0])
def test_scores_in_the_thousands(isa: str, type: str, size: float) -> None:
    """The rounding of such a score is worth more than that of its exponential."""
    setup = Setup(type, heads=32, kv_heads=2, lengths=(40, 3))
    setup.q = [q * np.float32(size) for q in setup.q]
    for slot, length in enumerate(setup.lengths):
        values = setup.cache.read(1, setup.kv_positions(slot, 1))[1]
        first = setup.attend([(slot, 0, length)])[0][0].reshape(2, 16, 64)  # sees one token, whatever its score
        np.testing.assert_allclose(first, np.broadcast_to(values.reshape(2, 1, 64), first.shape), rtol=0, atol=0.02)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_attention_matches_reference(isa: str, type: str, heads: int, kv_heads: int, head_dim: int) -> None:
    check(Setup(type, heads, kv_heads, head_dim, 16, (1, 77)))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 72])
def test_odd_head_dims(isa: str, type: str, head_dim: int) -> None:
    check(Setup(type, 5, 1, head_dim, 16, (67,)))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_block_sizes(isa: str, type: str, block_size: int) -> None:
    check(Setup(type, 6, 2, 64, block_size, (5, 150)))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("window", [1, 30, 64, 100])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_window_and_softcap(isa: str, type: str, window: int, softcap: float) -> None:
    check(Setup(type, 3, 1, 64, 16, (190,)), window=window, softcap=softcap)


@pytest.mark.parametrize("type", TYPES)
def test_contexts_of_several_segments(isa: str, type: str) -> None:
    setup = Setup(type, 3, 1, 64, 16, (1100,))
    check(setup, last=20)
    check(setup, last=20, window=700)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("window", [0, 100])
def test_chunks_change_no_bit(isa: str, type: str, window: int) -> None:
    length = 700
    setup = Setup(type, 6, 2, 64, 16, (length,))
    whole = setup.attend([(0, 0, length)], window=window)[0]
    for sizes in ((1,), (7, 64, 1, 13), (500,)):
        at, turn = (length - 80 if sizes == (1,) else 0), 0
        while at < length:
            count = min(sizes[turn % len(sizes)], length - at)
            part = setup.attend([(0, at, count)], window=window)[0]
            assert np.array_equal(part, whole[at : at + count])
            at, turn = at + count, turn + 1


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(6, 1, 8), (6, 2, 72), (6, 2, 80), (8, 1, 128), (4, 1, 256)]
)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_few_rows_and_many_take_the_same_steps(
    isa: str, type: str, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Many rows go through other instructions than a row alone: tile products, values widened once for all."""
    length = 333
    setup = Setup(type, heads, kv_heads, head_dim, block_size, (length,))
    for options in ({}, {"window": 90}, {"softcap": 3.0}):
        whole = setup.attend([(0, 0, length)], **options)[0]
        for at in (*range(0, 70, 9), *range(250, length)):
            assert np.array_equal(setup.attend([(0, at, 1)], **options)[0][0], whole[at])


@pytest.mark.parametrize("type", TYPES)
def test_neighbours_and_threads_change_no_bit(isa: str, type: str) -> None:
    lengths = (600, 1, 130, 64, 1500, 33)
    setup = Setup(type, 9, 3, 64, 16, lengths)
    rows = [(0, 599, 1), (1, 0, 1), (2, 100, 30), (3, 63, 1), (4, 1499, 1), (5, 0, 33)]
    alone = [setup.attend([row])[0] for row in rows]
    for threads in (1, 2, 5):
        for order in (range(6), (4, 2, 0, 5, 3, 1)):
            together = setup.attend([rows[i] for i in order], threads=threads)
            assert all(np.array_equal(out, alone[i]) for out, i in zip(together, order, strict=True))


@pytest.mark.parametrize("type", TYPES)
def test_long_context_shared_among_threads_changes_no_bit(isa: str, type: str) -> None:
    setup = Setup(type, 3, 1, 64, 16, (3000,))
    alone = setup.attend([(0, 2999, 1)])[0]
    for threads in (2, 7):
        assert np.array_equal(setup.attend([(0, 2999, 1)], threads=threads)[0], alone)


def equal_to_alone(setup: Setup, rows: list[tuple[int, int, int]], **options: Any) -> None:
    alone = [setup.attend([row], **options)[0] for row in rows]
    for threads in (1, 2, 3):
        together = setup.attend(rows, threads=threads, **options)
        for one, other in zip(together, alone, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("count", [2, 5, 17, 40])
@pytest.mark.parametrize("shared", [144, 512, 720])
def test_shared_prefix_changes_no_bit(isa: str, type: str, count: int, shared: int) -> None:
    """Decodes whose contexts begin with the same blocks; one has nothing more of its own."""
    lengths = (shared, *(shared + 1 + 13 * i % 90 for i in range(count - 1)))
    setup = Setup(type, 9, 3, 64, 16, lengths, shared=(shared,) * count)
    rows = [(slot, length - 1, 1) for slot, length in enumerate(lengths)]
    equal_to_alone(setup, rows)
    equal_to_alone(setup, rows[::-1])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("window", "softcap"), [(100, 0.0), (300, 0.0), (600, 0.0), (0, 3.0), (130, 3.0)])
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_shared_prefix_under_windows_and_softcaps(
    isa: str, type: str, window: int, softcap: float, block_size: int
) -> None:
    lengths = (650, 641, 660, 900, 700, 640)
    setup = Setup(type, 6, 2, 64, block_size, lengths, shared=(640,) * 6)
    rows = [(slot, length - 1, 1) for slot, length in enumerate(lengths)]
    equal_to_alone(setup, rows, window=window, softcap=softcap)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nested_prefixes_and_other_work_change_no_bit(isa: str, type: str, head_dim: int) -> None:
    """All share a little, some of them much more; beside them prefills of the same prefix, drafts and strangers."""
    shared = (1200, 1200, 1200, 1088, 256, 256, 256, 1200, 0, 0)
    lengths = (1210, 1201, 1290, 1100, 300, 270, 257, 1300, 40, 1500)
    setup = Setup(type, 6, 2, head_dim, 16, lengths, shared=shared)
    counts = (1, 1, 4, 1, 1, 5, 1, 100, 40, 1)  # the eighth prefills, from within the prefix on
    rows = [(slot, length - n, n) for slot, (length, n) in enumerate(zip(lengths, counts, strict=True))]
    equal_to_alone(setup, rows)
    equal_to_alone(setup, rows, window=700)


@pytest.mark.parametrize("type", TYPES)
def test_long_tails_of_a_short_prefix_change_no_bit(isa: str, type: str) -> None:
    lengths = (1900, 300, 1601)
    setup = Setup(type, 4, 1, 64, 16, lengths, shared=(192,) * 3)
    equal_to_alone(setup, [(slot, length - 1, 1) for slot, length in enumerate(lengths)])


@pytest.mark.parametrize("type", TYPES)
def test_shared_prefix_matches_reference(isa: str, type: str) -> None:
    lengths = tuple(700 + i for i in range(30))
    setup = Setup(type, 9, 3, 64, 16, lengths, shared=(688,) * 30)
    got = setup.attend([(slot, length - 1, 1) for slot, length in enumerate(lengths)], threads=2)
    for slot in (0, 13, 29):
        want, largest = setup.reference(slot, 1)
        assert np.abs(got[slot] - want).max() <= BOUND * largest


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_placement_changes_no_bit(isa: str, type: str, head_dim: int) -> None:
    """Other block tables, block sizes and number of spare blocks: the same sequence, the same bits."""
    results = []
    for spare, lengths, block_size in ((0, (201,), 16), (9, (201, 50), 16), (1, (201,), 8), (2, (201,), 64)):
        setup = Setup(type, 4, 2, head_dim, block_size, lengths, spare=spare)
        results.append(setup.attend([(0, 0, 201)])[0])
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("block_size", [8, 16])
def test_stale_cache_contents_do_no_harm(isa: str, type: str, block_size: int) -> None:
    """A block that an earlier request filled with NaN and infinities, given to a new one."""
    length = 37
    clean = Setup(type, 3, 1, 72, block_size, (length,), spare=0)
    dirty = Setup(type, 3, 1, 72, block_size, (length,), spare=0)
    every = np.arange(dirty.tables.size * block_size, dtype=np.int32)
    poison = np.full((len(every), 5 * 72), np.nan, np.float32)
    poison[::2] = np.inf
    native.rope_cache(dirty.pool, poison, every, every, dirty.cache, 1, 3, None, None)
    dirty.write(np.random.default_rng([0, 0]).standard_normal((length, 5 * 72)).astype(np.float32), 0)
    got = dirty.attend([(0, 0, length)])[0]
    assert np.array_equal(got, clean.attend([(0, 0, length)])[0])
    assert np.isfinite(got).all()


def test_outlier_dims_stay_within_the_rounding_of_queries(isa: str) -> None:
    """Over int8 keys some levels round a query to 65,278 steps of its largest dim: a score moves by at most half a step
    times the sum of |key|, and no weight by more than twice that."""
    setup = Setup("int8", 4, 2, 64, 16, (150,))
    for q in setup.q:
        q[:, ::64] *= 30
    got = setup.attend([(0, 0, 150)])[0]
    want, largest = setup.reference(0, 150)
    keys, _ = setup.cache.read(1, setup.kv_positions(0, 150))
    step = max(np.abs(q).max() for q in setup.q) / 65278
    moved = 64**-0.5 * step / 2 * np.abs(keys).sum(-1).max()
    assert np.abs(got - want).max() <= (2 * moved + BOUND) * largest


def test_large_scores_stay_finite(isa: str) -> None:
    setup = Setup("f32", 2, 1, 64, 16, (100,))
    setup.q = [q * 1e4 for q in setup.q]
    got = setup.attend([(0, 0, 100)])[0]
    want, largest = setup.reference(0, 100)
    assert np.isfinite(got).all()
    # A softmax this sharp picks one value, unless two scores are closer than float32 can tell.
    assert np.median(np.abs(got - want)) <= BOUND * largest


@pytest.mark.parametrize("type", TYPES)
def test_scores_that_lie_far_apart(isa: str, type: str) -> None:
    """Weights of hundreds of powers of two below the largest: finite, and the same bits for one row and for many."""
    setup = Setup(type, 6, 1, 64, 16, (600,))
    setup.q = [q * 200 for q in setup.q]
    whole = setup.attend([(0, 0, 600)])[0]
    assert np.isfinite(whole).all()
    for at in range(0, 600, 37):
        assert np.array_equal(setup.attend([(0, at, 1)])[0][0], whole[at])


def test_bad_arguments_are_refused() -> None:
    for head_dim, block_size in ((60, 16), (264, 16), (64, 12), (64, 256)):
        with pytest.raises(ValueError):
            native.KvCache(1, "f32", 1, head_dim, block_size, 4)
    with pytest.raises(ValueError, match="int7"):
        native.KvCache(1, "int7", 1, 64, 16, 4)
    setup = Setup()
    with pytest.raises(ValueError, match="outside the cache"):
        native.rope_cache(
            setup.pool,
            np.zeros((1, 8 * 64), np.float32),
            np.zeros(1, np.int32),
            np.full(1, 10_000, np.int32),
            setup.cache,
            1,
            4,
            None,
            None,
        )
