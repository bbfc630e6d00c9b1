"""Conservation: free + cached + held = total, and every reference has an owner.

Run after every step in tests, and when idle in production. Cost is proportional to the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from noria.cache.manager import BlockTable, CacheManager, ContiguousManager, PagedManager
from noria.cache.pool import BlockPool


class CacheCheckError(AssertionError):
    """Blocks are lost, doubly owned or wrongly counted. Always a defect of Noria."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CacheCheckError(message)


def check_pool(pool: BlockPool, owners: Counter[int]) -> None:
    """Each block is in one state, and referenced as often as `owners` says."""
    free, cached = set(pool._free), set(pool._cached)
    _require(len(free) == len(pool._free), "a block is on the free list twice")
    _require(not free & cached, f"blocks both free and cached: {sorted(free & cached)[:8]}")
    for block in range(pool.total):
        references, owned = pool.references(block), owners[block]
        _require(references == owned, f"block {block}: {references} references counted, {owned} owners")
        idle = block in free or block in cached
        _require(idle == (references == 0), f"block {block}: {references} references, yet idle is {idle}")
        _require(pool.is_marked(block) or block not in cached, f"cached block {block} has no hash")
        _require(not pool.is_marked(block) or block not in free, f"free block {block} has a hash")
    counts = pool.counts()
    _require(counts.free + counts.cached + counts.held == counts.total, f"blocks are lost: {counts}")


def check_paged(manager: PagedManager, tables: Iterable[BlockTable]) -> None:
    """The pool agrees with the tables, the index with the pool, announcements with running requests."""
    tables = list(tables)
    check_pool(manager.pool, Counter(block for table in tables for block in table.blocks))
    marked = {block for block in range(manager.pool.total) if manager.pool.is_marked(block)}
    _require(manager.index.blocks() == marked, "hashed blocks and the index differ")
    for table in tables:
        _require(len(set(table.blocks)) == len(table.blocks), f"request {table.key}: a block is in its table twice")
    keys = {table.key for table in tables}
    strays = set(manager.announced.values()) - keys
    _require(not strays, f"blocks announced by requests that do not run: {sorted(strays)[:8]}")


def check_contiguous(manager: ContiguousManager, tables: Iterable[BlockTable]) -> None:
    """Each region is free or held by one request."""
    tables = list(tables)
    _require(sorted(table.key for table in tables) == sorted(manager._held), "regions and running requests differ")
    used = [table.blocks[0] // manager.region for table in tables]
    everything = sorted(used + manager._free)
    _require(everything == list(range(manager.total // manager.region)), "regions are lost or doubly held")


def check_cache(manager: CacheManager, tables: Iterable[BlockTable]) -> None:
    """Raises CacheCheckError unless every block and every reference is accounted for by these tables."""
    if isinstance(manager, PagedManager):
        check_paged(manager, tables)
    elif isinstance(manager, ContiguousManager):
        check_contiguous(manager, tables)
