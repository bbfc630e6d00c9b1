"""The block pool: states, reference counts and what is reclaimed first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.cache.checks import CacheCheckError, check_pool
from noria.cache.pool import BlockPool


def cache(pool, blocks):
    """Hashes the blocks and lets go of them, in this order."""
    for block in blocks:
        pool.mark(block)
        pool.release([block])


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.counts().free == 1
    assert pool.allocate(0) == []


def test_a_block_is_free_again_only_when_its_last_user_lets_go():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.allocate(1) is None
    pool.release(blocks)
    assert pool.counts().free == 2


def test_releasing_twice_is_our_own_bug():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


@pytest.mark.parametrize("strategy", ["lru", "fifo", "random"])
def test_a_referenced_block_is_never_reclaimed(strategy):
    forgotten = []
    pool = BlockPool(8, strategy, 1.0, forgotten.append)
    blocks = pool.allocate(8)
    for block in blocks:
        pool.mark(block)
    pool.release(blocks[:5])
    assert len(pool.allocate(5)) == 5
    assert sorted(forgotten) == sorted(blocks[:5])
    assert pool.allocate(1) is None


def test_lru_gives_up_what_was_unused_for_longest():
    forgotten = []
    pool = BlockPool(4, "lru", 0.25, forgotten.append)
    first, second, third, fourth = pool.allocate(4)
    cache(pool, [first, second, third, fourth])
    pool.share([first])
    pool.release([first])
    pool.allocate(2)
    assert forgotten == [second, third]


def test_fifo_gives_up_what_was_hashed_first():
    forgotten = []
    pool = BlockPool(4, "fifo", 0.25, forgotten.append)
    first, second, third, fourth = pool.allocate(4)
    cache(pool, [first, second, third, fourth])
    pool.share([first])
    pool.release([first])
    pool.allocate(2)
    assert forgotten == [first, second]


def test_random_is_repeatable_and_not_in_order():
    def reclaimed(seed):
        forgotten = []
        pool = BlockPool(64, "random", 0.5, forgotten.append, seed)
        cache(pool, pool.allocate(64))
        pool.allocate(1)
        return forgotten

    assert reclaimed(1) == reclaimed(1)
    assert reclaimed(1) != reclaimed(2)
    assert reclaimed(1) != sorted(reclaimed(1))


@pytest.mark.parametrize(("ratio", "expected"), [(0.1, 2), (0.5, 10), (1.0, 20), (0.001, 1)])
def test_blocks_are_reclaimed_in_portions(ratio, expected):
    pool = BlockPool(20, "lru", ratio)
    cache(pool, pool.allocate(20))
    pool.allocate(1)
    counts = pool.counts()
    assert counts.reclaimed_total == expected
    assert (counts.free, counts.cached, counts.held) == (expected - 1, 20 - expected, 1)


@pytest.mark.parametrize("strategy", ["lru", "fifo"])
def test_cached_blocks_are_reused_before_memory_that_was_never_used(strategy):
    pool = BlockPool(100, strategy, retained=3)
    cache(pool, pool.allocate(2))
    assert sorted(pool.allocate(1)) == [2]  # few are cached: they stay
    cache(pool, pool.allocate(3))
    assert pool.counts().cached == 5
    assert sorted(pool.allocate(4)) == [0, 1, 6, 7]  # the two that are too many, the oldest, and two new ones
    assert pool.counts().cached == 3
    pool.release([6, 7])
    assert sorted(pool.allocate(2)) == [6, 7]  # free ones that were used before cost nothing


def test_of_a_chain_the_tail_goes_first():
    forgotten = []
    pool = BlockPool(3, "lru", 0.1, forgotten.append)
    chain = pool.allocate(3)
    for block in chain:
        pool.mark(block)
    pool.release(chain)
    pool.allocate(1)
    assert forgotten == chain[-1:]


def test_touched_blocks_go_last_and_of_a_chain_still_the_tail_first():
    forgotten = []
    pool = BlockPool(6, "lru", 0.01, forgotten.append)
    chain, other, held = pool.allocate(2), pool.allocate(3), pool.allocate(1)
    cache(pool, chain)
    cache(pool, other)
    pool.touch([*chain, *held])
    assert pool.references(held[0]) == 1
    for _ in range(5):
        pool.allocate(1)
    assert set(forgotten[:3]) == set(other)
    assert forgotten[3:] == chain[::-1]


def test_the_last_unused_block_stays_so_while_more_is_cached_than_shall_be():
    pool = BlockPool(4, retained=0, reclaim_ratio=0.05)
    cached = pool.allocate(3)
    cache(pool, cached)
    assert set(pool.allocate(2)) < set(cached)
    assert (pool.counts().free, pool.counts().cached) == (1, 1)


def test_a_forgotten_hash_frees_a_cached_block():
    pool = BlockPool(2)
    block, other = pool.allocate(2)
    cache(pool, [block])
    pool.mark(other)
    pool.unmark(block)
    pool.unmark(other)
    assert (pool.counts().free, pool.counts().cached, pool.counts().held) == (1, 0, 1)
    pool.release([other])
    assert pool.counts().free == 2


def test_reclaim_all():
    forgotten = []
    pool = BlockPool(4, forget=forgotten.append)
    cache(pool, pool.allocate(3))
    pool.reclaim_all()
    assert pool.counts().free == 4
    assert len(forgotten) == 3


def test_the_check_finds_lost_and_miscounted_blocks():
    pool = BlockPool(4)
    block, _ = pool.allocate(2)
    with pytest.raises(CacheCheckError, match="owners"):
        check_pool(pool, Counter([block]))
    pool._free.pop()
    with pytest.raises(CacheCheckError):
        check_pool(pool, Counter([block, block + 1]))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["lru", "fifo", "random"]),
    st.sampled_from([0.05, 0.5, 1.0]),
    st.sampled_from([None, 0, 1, 4]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=60),
)
def test_every_block_is_accounted_for(strategy, ratio, retained, actions):
    known = set()
    pool = BlockPool(12, strategy, ratio, known.remove, retained=retained)
    held: list[list[int]] = []
    used: set[int] = set()
    for action, count in actions:
        if action <= 1:
            before = pool.available
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > before)
            if blocks is not None:
                if retained is not None and not used.issuperset(blocks):
                    assert pool.counts().cached <= retained, "memory is touched while there is enough to reuse"
                used.update(blocks)
                held.append(blocks)
        elif action == 2 and held:
            pool.release(held.pop(count % len(held)))
        elif action == 3 and held:
            for block in held[-1]:
                if block not in known:
                    pool.mark(block)
                    known.add(block)
        elif action == 4 and known:
            block = sorted(known)[count % len(known)]
            pool.share([block])
            held.append([block])
        elif action == 5:
            pool.touch(range(count, 12, 2))
        check_pool(pool, Counter(block for blocks in held for block in blocks))
        assert {block for block in range(12) if pool.is_marked(block)} == known
