"""Who may use which blocks: block tables of running requests, made, grown, shared and freed.

`PagedManager` takes single blocks from a pool and shares prefixes. `ContiguousManager` gives each request one region
for its longest possible length and shares nothing: the simple reference that the paged one is tested against. Block
ids only; nothing here knows what a block holds, or schedules anything.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from noria.cache.hashing import Digest, HashChain, Parent, PrefixIndex, chained_digest
from noria.cache.pool import BlockPool, PoolCounts
from noria.config import CacheOptions

_LEAST_RETAINED = 256_000_000  # bytes


@dataclass(slots=True, eq=False)
class BlockTable:
    """One running request's blocks, in order of position.

    Attributes:
        key: the request's id.
        blocks: block ids; token p lies in blocks[p // block_size].
        chain: digests of the request's full blocks; None: nothing is shared.
        committed: leading blocks whose content has been offered for sharing.
        parent: what block `committed` comes after.
        announced: full blocks of the chain that others may wait for.
    """

    key: int
    blocks: list[int]
    chain: HashChain | None = None
    committed: int = 0
    parent: Parent = ""
    announced: int = 0


@dataclass(slots=True)
class Match:
    """What a prefix lookup found.

    Attributes:
        blocks: shareable blocks from the first token on.
        parent: what the block after them comes after.
        owner: request that is computing the blocks that follow, or None.
        owner_tokens: tokens that will be shareable once the owner has computed them.
    """

    blocks: list[int] = field(default_factory=list)
    parent: Parent = ""
    owner: int | None = None
    owner_tokens: int = 0


@dataclass(slots=True, frozen=True)
class Fork:
    """A table that shares a sibling's prompt. `copies`: source and destination block, before anything is computed."""

    table: BlockTable
    copies: tuple[tuple[int, int], ...]


class CacheManager(Protocol):
    """What the scheduler needs of a cache. Token counts are of one request; `reserve` blocks must stay available."""

    @property
    def block_size(self) -> int: ...

    @property
    def shares(self) -> bool:
        """Whether tables can have blocks in common."""
        ...

    def chain(self, salt: str) -> HashChain | None:
        """Where a request keeps the digests of its blocks; None: this cache shares nothing."""
        ...

    def match(self, chain: HashChain | None, tokens: array[int], limit: int) -> Match:
        """Looks up the longest shareable prefix of at most `limit` tokens."""
        ...

    def touch(self, blocks: list[int]) -> None:
        """Those of them that nobody holds count as just used."""
        ...

    def admit(self, key: int, chain: HashChain | None, match: Match, size: int, reserve: int = 0) -> BlockTable | None:
        """A table for `size` tokens that begins with the matched blocks; None: not enough blocks."""
        ...

    def fork(
        self,
        key: int,
        chain: HashChain | None,
        match: Match,
        source: BlockTable,
        shared: int,
        size: int,
        reserve: int = 0,
    ) -> Fork | None:
        """A table for `size` tokens whose first `shared` tokens are those of a sibling; None: not enough blocks, or
        this cache shares nothing. `match` is of at most `shared` tokens."""
        ...

    def grow(self, table: BlockTable, size: int) -> list[int] | None:
        """Appends blocks until `size` tokens fit; returns the new ones, None: not enough blocks (nothing changes)."""
        ...

    def commit(self, table: BlockTable, tokens: array[int], computed: int) -> None:
        """Offers the blocks that `computed` tokens fill for sharing."""
        ...

    def free(self, table: BlockTable) -> None: ...

    def reset(self) -> None:
        """Forgets every cached block; held ones are shared no further."""
        ...

    def counts(self) -> PoolCounts: ...


class PagedManager:
    """Single blocks from one pool, shared by reference count.

    Prefixes are shared in whole blocks. A prefix that a running request is still computing is announced, so that others
    wait for it instead of computing it again.
    """

    shares = True

    def __init__(
        self,
        num_blocks: int,
        options: CacheOptions,
        digest: Digest = chained_digest,
        retained: int | None = None,
    ) -> None:
        self.block_size = options.block_size
        self.index = PrefixIndex()
        strategy, ratio = options.reclaim_strategy, options.reclaim_ratio
        self.pool = BlockPool(num_blocks, strategy, ratio, self.index.remove, retained=retained)
        self.announced: dict[bytes, int] = {}  # digest → key of the request that is computing the block
        self._prefix_caching = options.prefix_caching
        self._digest = digest

    def chain(self, salt: str) -> HashChain | None:
        return HashChain(self.block_size, salt, self._digest) if self._prefix_caching else None

    def match(self, chain: HashChain | None, tokens: array[int], limit: int) -> Match:
        if chain is None:
            return Match()
        size, digests, find = self.block_size, chain.digests, self.index.find
        most = min(limit // size, len(digests))
        found = Match(parent=chain.salt)
        for number in range(most):
            content = tokens[number * size : (number + 1) * size].tobytes()
            entry = find(digests[number], content, found.parent)
            if entry is None:
                break
            found.blocks.append(entry.block)
            found.parent = entry.serial
        number = len(found.blocks)
        if number < most:
            found.owner = self.announced.get(digests[number])
            if found.owner is not None:
                while number < most and self.announced.get(digests[number]) == found.owner:
                    number += 1
                found.owner_tokens = number * size
        return found

    def touch(self, blocks: list[int]) -> None:
        self.pool.touch(blocks)

    def admit(self, key: int, chain: HashChain | None, match: Match, size: int, reserve: int = 0) -> BlockTable | None:
        blocks = self._take(match.blocks, self._blocks_for(size) - len(match.blocks), reserve)
        if blocks is None:
            return None
        table = BlockTable(key, blocks, chain, len(match.blocks), match.parent)
        self._announce(table, size)
        return table

    def fork(
        self,
        key: int,
        chain: HashChain | None,
        match: Match,
        source: BlockTable,
        shared: int,
        size: int,
        reserve: int = 0,
    ) -> Fork | None:
        whole, rest = divmod(shared, self.block_size)
        blocks = self._take(source.blocks[:whole], self._blocks_for(size) - whole, reserve)
        if blocks is None:
            return None
        table = BlockTable(key, blocks)
        if len(match.blocks) == whole:  # else nothing leads to this table's own blocks, so they cannot be offered
            table.chain, table.committed, table.parent = chain, whole, match.parent
        return Fork(table, ((source.blocks[whole], blocks[whole]),) if rest else ())

    def grow(self, table: BlockTable, size: int) -> list[int] | None:
        missing = self._blocks_for(size) - len(table.blocks)
        blocks = self.pool.allocate(missing)
        if blocks is not None:
            table.blocks.extend(blocks)
        return blocks

    def commit(self, table: BlockTable, tokens: array[int], computed: int) -> None:
        chain, size = table.chain, self.block_size
        if chain is None:
            return
        full = computed // size
        if full > len(chain.digests):
            chain.extend(tokens)
        for number in range(table.committed, full):
            digest = chain.digests[number]
            content = tokens[number * size : (number + 1) * size].tobytes()
            entry = self.index.find(digest, content, table.parent)
            if entry is None:
                entry, loser = self.index.add(table.blocks[number], digest, content, table.parent)
                if loser is not None:
                    self.pool.unmark(loser)
                self.pool.mark(table.blocks[number])
            table.parent = entry.serial
            if self.announced.get(digest) == table.key:
                del self.announced[digest]
        table.committed = max(table.committed, full)

    def free(self, table: BlockTable) -> None:
        if table.chain is not None:
            for digest in table.chain.digests[table.committed : table.announced]:
                if self.announced.get(digest) == table.key:
                    del self.announced[digest]
        self.pool.release(table.blocks)
        table.blocks = []

    def reset(self) -> None:
        self.pool.reclaim_all()
        for block in self.index.blocks():
            self.index.remove(block)
            self.pool.unmark(block)

    def counts(self) -> PoolCounts:
        return self.pool.counts()

    def _blocks_for(self, size: int) -> int:
        return -(-size // self.block_size)

    def _take(self, shared: list[int], new: int, reserve: int) -> list[int] | None:
        """References to `shared` and `new` blocks, or nothing at all."""
        revived = sum(self.pool.is_cached(block) for block in shared)
        if new + revived + reserve > self.pool.available:
            return None
        self.pool.share(shared)
        blocks = self.pool.allocate(new)
        assert blocks is not None
        return shared + blocks

    def _announce(self, table: BlockTable, size: int) -> None:
        if table.chain is None:
            return
        table.announced = min(size // self.block_size, len(table.chain.digests))
        for digest in table.chain.digests[table.committed : table.announced]:
            self.announced.setdefault(digest, table.key)


class ContiguousManager:
    """One region of consecutive blocks per request, as long as the longest request. Nothing is shared or preempted."""

    shares = False

    def __init__(self, num_blocks: int, options: CacheOptions, max_model_len: int) -> None:
        self.block_size = options.block_size
        self.region = -(-max_model_len // options.block_size)  # blocks
        self.total = num_blocks
        self._free = list(range(num_blocks // self.region - 1, -1, -1))
        self._held: dict[int, int] = {}  # key → region
        self._allocated = 0

    def chain(self, salt: str) -> HashChain | None:
        return None

    def match(self, chain: HashChain | None, tokens: array[int], limit: int) -> Match:
        return Match()

    def touch(self, blocks: list[int]) -> None:
        pass

    def admit(self, key: int, chain: HashChain | None, match: Match, size: int, reserve: int = 0) -> BlockTable | None:
        assert size <= self.region * self.block_size
        if not self._free:
            return None
        number = self._free.pop()
        self._held[key] = number
        self._allocated += self.region
        return BlockTable(key, list(range(number * self.region, (number + 1) * self.region)))

    def fork(
        self,
        key: int,
        chain: HashChain | None,
        match: Match,
        source: BlockTable,
        shared: int,
        size: int,
        reserve: int = 0,
    ) -> Fork | None:
        return None

    def grow(self, table: BlockTable, size: int) -> list[int] | None:
        assert size <= len(table.blocks) * self.block_size
        return []

    def commit(self, table: BlockTable, tokens: array[int], computed: int) -> None:
        pass

    def free(self, table: BlockTable) -> None:
        self._free.append(self._held.pop(table.key))
        table.blocks = []

    def reset(self) -> None:
        pass

    def counts(self) -> PoolCounts:
        held = len(self._held) * self.region
        return PoolCounts(self.total - held, 0, held, self.total, self._allocated, 0)


def make_manager(num_blocks: int, options: CacheOptions, max_model_len: int, cache_bytes: int = 0) -> CacheManager:
    """The manager that the options ask for. `cache_bytes`: of all blocks; 0: they take no memory."""
    if options.layout == "contiguous":
        return ContiguousManager(num_blocks, options, max_model_len)
    return PagedManager(num_blocks, options, retained=_retained(num_blocks, options, cache_bytes))


def _retained(num_blocks: int, options: CacheOptions, cache_bytes: int) -> int | None:
    """Blocks that may stay cached before memory that was never used is touched."""
    if not cache_bytes:
        return None
    wanted = options.prefix_cache_mb
    size = max(_LEAST_RETAINED, cache_bytes // 64) if wanted is None else wanted * 1_000_000
    return size * num_blocks // cache_bytes
