"""Cache managers: prefix lookup, admission, growth, copy-on-write, and the contiguous reference."""

from __future__ import annotations

from array import array

import pytest

from noria.cache.checks import CacheCheckError, check_cache
from noria.cache.manager import ContiguousManager, PagedManager, make_manager
from noria.config import CacheOptions

SIZE = 8


def paged(blocks=8, **more):
    digest = {"digest": more.pop("digest")} if "digest" in more else {}
    return PagedManager(blocks, CacheOptions(block_size=SIZE, **more), **digest)


def tokens_of(count, first=0):
    return array("i", range(first, first + count))


def admit(manager, key, tokens, salt="", size=None, reserve=0):
    chain = manager.chain(salt)
    if chain is not None:
        chain.extend(tokens)
    match = manager.match(chain, tokens, len(tokens) - 1)
    return match, manager.admit(key, chain, match, len(tokens) if size is None else size, reserve)


def test_a_committed_prefix_is_shared_and_the_last_token_is_not():
    manager, tokens = paged(), tokens_of(24)
    _, first = admit(manager, 1, tokens)
    manager.commit(first, tokens, 24)
    match, second = admit(manager, 2, tokens)
    assert match.blocks == first.blocks[:2]
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks
    check_cache(manager, [first, second])


def test_nothing_is_shared_before_it_is_computed_but_its_owner_is_named():
    manager, tokens = paged(), tokens_of(25)
    _, first = admit(manager, 1, tokens)
    match, _ = admit(manager, 2, tokens[:20], size=0)
    assert match.blocks == []
    assert (match.owner, match.owner_tokens) == (1, 16)
    manager.commit(first, tokens, 9)
    match, _ = admit(manager, 3, tokens, size=8)
    assert match.blocks == first.blocks[:1]
    assert (match.owner, match.owner_tokens) == (1, 24)


def test_an_owner_that_leaves_is_waited_for_no_longer():
    manager, tokens = paged(), tokens_of(24)
    _, first = admit(manager, 1, tokens)
    manager.commit(first, tokens, 8)
    manager.free(first)
    match, _ = admit(manager, 2, tokens)
    assert len(match.blocks) == 1
    assert match.owner is None
    assert set(manager.announced.values()) == {2}


def test_freed_blocks_stay_cached_and_come_back():
    manager, tokens = paged(), tokens_of(24)
    _, first = admit(manager, 1, tokens)
    blocks = list(first.blocks)
    manager.commit(first, tokens, 24)
    manager.free(first)
    assert (manager.counts().cached, manager.counts().held) == (3, 0)
    match, second = admit(manager, 2, tokens)
    assert match.blocks == blocks[:2]
    assert manager.counts().held == 3
    check_cache(manager, [second])


def test_other_salts_share_nothing():
    manager, tokens = paged(), tokens_of(24)
    _, first = admit(manager, 1, tokens, "a")
    manager.commit(first, tokens, 24)
    match, _ = admit(manager, 2, tokens, "b")
    assert (match.blocks, match.owner) == ([], None)


def test_without_prefix_caching_nothing_is_shared():
    manager, tokens = paged(prefix_caching=False), tokens_of(24)
    _, first = admit(manager, 1, tokens)
    manager.commit(first, tokens, 24)
    manager.free(first)
    assert manager.counts().free == 8
    match, _ = admit(manager, 2, tokens)
    assert match.blocks == []


def test_collisions_of_a_bad_hash_cost_misses_only():
    manager = paged(digest=lambda before, content: bytes([content[0] % 2]))
    one, other = tokens_of(24, 0), tokens_of(24, 2)
    _, first = admit(manager, 1, one)
    manager.commit(first, one, 24)
    match, second = admit(manager, 2, other)
    assert match.blocks == []
    manager.commit(second, other, 24)
    check_cache(manager, [first, second])
    manager.free(first)
    check_cache(manager, [second])


def test_admission_leaves_the_reserve_alone():
    manager = paged(blocks=4)
    assert admit(manager, 1, tokens_of(24), reserve=2)[1] is None
    assert manager.counts().free == 4
    assert admit(manager, 1, tokens_of(24), reserve=1)[1] is not None


def test_a_cached_hit_is_not_counted_as_available_twice():
    manager, tokens = paged(blocks=4), tokens_of(24)
    _, first = admit(manager, 1, tokens)
    manager.commit(first, tokens, 24)
    manager.free(first)
    match, table = admit(manager, 2, tokens_of(40))
    assert len(match.blocks) == 3
    assert table is None
    assert manager.counts().held == 0


def test_growing_appends_and_fails_whole():
    manager = paged(blocks=4)
    _, table = admit(manager, 1, tokens_of(9))
    assert len(manager.grow(table, 17)) == 1
    assert len(table.blocks) == 3
    assert manager.grow(table, 48) is None
    assert len(table.blocks) == 3


def test_output_blocks_are_shared_too():
    manager, tokens = paged(), tokens_of(7)
    _, table = admit(manager, 1, tokens)
    tokens.extend(range(100, 113))
    manager.grow(table, 20)
    manager.commit(table, tokens, 19)
    manager.free(table)
    match, _ = admit(manager, 2, tokens)
    assert len(match.blocks) == 2


@pytest.mark.parametrize(("shared", "whole", "copied"), [(19, 2, True), (16, 2, False), (5, 0, True)])
@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_whole_blocks_and_copies_the_partial_one(shared, whole, copied, caching):
    manager, tokens = paged(prefix_caching=caching), tokens_of(shared + 1)
    _, first = admit(manager, 1, tokens)
    manager.commit(first, tokens, shared + 1)
    chain = manager.chain("")
    if chain is not None:
        chain.extend(tokens)
    match = manager.match(chain, tokens, shared)
    fork = manager.fork(2, chain, match, first, shared, shared + 1)
    assert fork.table.blocks[:whole] == first.blocks[:whole]
    assert not set(fork.table.blocks[whole:]) & set(first.blocks)
    assert fork.copies == (((first.blocks[whole], fork.table.blocks[whole]),) if copied else ())
    check_cache(manager, [first, fork.table])
    manager.free(first)
    check_cache(manager, [fork.table])


def test_reset_forgets_all_prefixes():
    manager, tokens = paged(), tokens_of(24)
    _, first = admit(manager, 1, tokens)
    manager.commit(first, tokens, 16)
    manager.reset()
    check_cache(manager, [first])
    match, _ = admit(manager, 2, tokens)
    assert match.blocks == []
    manager.commit(first, tokens, 24)
    manager.free(first)


def test_the_check_finds_a_table_that_nobody_knows():
    manager = paged()
    _, table = admit(manager, 1, tokens_of(9))
    with pytest.raises(CacheCheckError, match="0 owners"):
        check_cache(manager, [])
    table.blocks.append(table.blocks[0])
    with pytest.raises(CacheCheckError):
        check_cache(manager, [table])


def test_contiguous_gives_regions_of_consecutive_blocks():
    manager = ContiguousManager(11, CacheOptions(block_size=SIZE, layout="contiguous"), 40)
    _, first = admit(manager, 1, tokens_of(9))
    _, second = admit(manager, 2, tokens_of(9))
    assert first.blocks == [0, 1, 2, 3, 4]
    assert second.blocks == [5, 6, 7, 8, 9]
    assert admit(manager, 3, tokens_of(9))[1] is None
    assert manager.grow(first, 40) == []
    check_cache(manager, [first, second])
    manager.free(first)
    assert manager.counts().held == 5
    check_cache(manager, [second])
    with pytest.raises(CacheCheckError):
        check_cache(manager, [])


def test_the_layout_option_chooses_the_manager():
    assert isinstance(make_manager(8, CacheOptions(), 64), PagedManager)
    assert isinstance(make_manager(8, CacheOptions(layout="contiguous"), 64), ContiguousManager)


@pytest.mark.parametrize(
    ("wanted", "cache_bytes", "kept"),
    [(None, 0, 60), (None, 10**11, 25), (None, 10**10, 40), (200, 10**10, 32), (0, 10**10, 0)],
)
def test_how_much_of_what_nobody_uses_is_kept(wanted, cache_bytes, kept):
    """A 64th of the cache and at least 256 MB, or what was asked for; all if memory is of no interest."""
    options = CacheOptions(block_size=SIZE, prefix_cache_mb=wanted)
    manager = make_manager(1600, options, 1600 * SIZE, cache_bytes)
    for turn in range(60):
        tokens = tokens_of(SIZE, first=turn * SIZE)
        _, table = admit(manager, turn, tokens)
        manager.commit(table, tokens, SIZE)
        manager.free(table)
    assert manager.counts().cached == pytest.approx(kept, abs=5)
