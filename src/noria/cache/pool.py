"""The block pool: which blocks are free, cached or held, and which cached ones are given up first.

Every block is in exactly one state:

- free: holds nothing of value; on the free list.
- held: at least one block table refers to it (reference count above 0). Never reclaimed.
- cached: no table refers to it, but its content is known by a hash and may be shared again. Reclaimed when the free
  list runs out, or when there are many of them and the only free blocks left were never used: their memory has not been
  touched yet, and is not taken from the machine just to remember more.

Knows nothing of tokens, hashes or requests: who hashes blocks marks them here and is told when one is reclaimed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from noria.config import ReclaimStrategy


@dataclass(slots=True, frozen=True)
class PoolCounts:
    """Blocks by state; they add up to `total`. The `*_total` ones only grow."""

    free: int
    cached: int
    held: int
    total: int
    allocated_total: int
    reclaimed_total: int


def _ignore(block: int) -> None:
    pass


class BlockPool:
    """Reference-counted blocks 0 … total - 1. Allocation and release are O(1); reclaiming is amortised over portions.

    Args:
        total: number of blocks.
        strategy: which cached blocks go first: `lru` the one unused for longest, `fifo` the one hashed first, `random`.
        reclaim_ratio: share of the pool that is reclaimed at a time, in (0, 1].
        retained: cached blocks beyond so many are reused before blocks that were never used; None: any number is kept.
        forget: called with each reclaimed block, so that its hash is dropped.
        seed: of the `random` strategy.
    """

    def __init__(
        self,
        total: int,
        strategy: ReclaimStrategy = "lru",
        reclaim_ratio: float = 0.1,
        forget: Callable[[int], None] = _ignore,
        seed: int = 0,
        retained: int | None = None,
    ) -> None:
        self.total = total
        self._strategy = strategy
        self._portion = max(1, math.ceil(reclaim_ratio * total))
        self._forget = forget
        self._random = random.Random(seed)
        self._retained = total if retained is None else retained
        self._free = list(range(total - 1, -1, -1))  # a stack: the block freed last is the warmest in the CPU's cache
        self._unused = total  # how many at the bottom of that stack were never used
        self._references = [0] * total
        self._marked = [0] * total  # serial number of the marking, 0: content not known by a hash
        self._cached: dict[int, None] = {}  # in the order in which they became unreferenced
        self._serial = 0
        self._allocated = 0
        self._reclaimed = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PoolCounts:
        free, cached = len(self._free), len(self._cached)
        held = self.total - free - cached
        return PoolCounts(free, cached, held, self.total, self._allocated, self._reclaimed)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_marked(self, block: int) -> bool:
        return self._marked[block] != 0

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks, each with one reference, reclaiming cached ones if need be. All or nothing."""
        short = count - len(self._free)
        if short > len(self._cached):
            return None
        # What is kept beyond `retained` goes before a block that was never used.
        needed = max(short, min(short + self._unused, len(self._cached) - self._retained))
        if needed > 0:
            # A good part at once, as some strategies look at all of them to choose.
            self._reclaim(needed, None if short > 0 else self._retained // 8)
        if count == 1:
            blocks = [self._free.pop()]
        else:
            blocks = self._free[len(self._free) - count :][::-1]
            del self._free[len(self._free) - count :]
        self._unused = min(self._unused, len(self._free))
        for block in blocks:
            self._references[block] = 1
        self._allocated += count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of these held or cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block, last one first: of a chain, the root is then reclaimed last."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            self._references[block] = left
            if left == 0:
                if self._marked[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """Cached ones among these become the last to go by `lru`, of them the first one last."""
        for block in reversed(blocks):
            if block in self._cached:
                del self._cached[block]
                self._cached[block] = None

    def mark(self, block: int) -> None:
        """A held block's content is now known by a hash: unreferenced, it will be cached instead of free."""
        self._serial += 1
        self._marked[block] = self._serial

    def unmark(self, block: int) -> None:
        """The block's hash is forgotten. A cached block becomes free."""
        self._marked[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def reclaim_all(self) -> None:
        """Makes every cached block free."""
        if self._cached:
            self._give_up(list(self._cached))

    def _reclaim(self, needed: int, portion: int | None = None) -> None:
        count = min(len(self._cached), max(needed, self._portion if portion is None else portion))
        if count == len(self._cached) or self._strategy == "lru":
            victims = list(islice(self._cached, count))
        elif self._strategy == "fifo":
            victims = heapq.nsmallest(count, self._cached, key=self._marked.__getitem__)
        else:
            victims = self._random.sample(list(self._cached), count)
        self._give_up(victims)

    def _give_up(self, victims: list[int]) -> None:
        for block in victims:
            del self._cached[block]
            self._marked[block] = 0
            self._forget(block)
        self._free.extend(reversed(victims))
        self._reclaimed += len(victims)
