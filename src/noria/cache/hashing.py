"""Names for the contents of blocks, so that equal prefixes are found and shared.

A block's digest covers the request's salt and every token up to the block's end, because keys and values depend on
all of them. Digests only *find* a block. What is found is confirmed by its tokens and by the very block that came
before it, so that a collision can cost a miss but never serve wrong content.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

Digest = Callable[[bytes, bytes], bytes]
Parent = int | str
"""What came before a block: the serial number of the entry of the block before it or, for a first block, the salt."""


def chained_digest(before: bytes, content: bytes) -> bytes:
    """16 bytes over the digest of the block before and a block's own tokens."""
    return blake2b(content, digest_size=16, key=before).digest()


class HashChain:
    """The digests of one request's full blocks, extended as its tokens grow; each block is hashed once."""

    __slots__ = ("_digest", "block_size", "digests", "salt")

    def __init__(self, block_size: int, salt: str = "", digest: Digest = chained_digest) -> None:
        self.block_size = block_size
        self.salt = salt
        self.digests: list[bytes] = []
        self._digest = digest

    def extend(self, tokens: array[int]) -> None:
        """Hashes the full blocks of `tokens` (int32, all of the request's) that have no digest yet."""
        size, digests = self.block_size, self.digests
        first, stop = len(digests), len(tokens) // size
        if first >= stop:
            return
        before = digests[-1] if digests else blake2b(self.salt.encode(), digest_size=16).digest()
        content = tokens[first * size : stop * size].tobytes()
        width = size * tokens.itemsize
        for start in range(0, len(content), width):
            before = self._digest(before, content[start : start + width])
            digests.append(before)


class Entry(NamedTuple):
    """A block whose content is known. `serial` is never used again, `parent` is the serial of the block before."""

    block: int
    digest: bytes
    content: bytes
    serial: int
    parent: Parent


class PrefixIndex:
    """From digests to blocks, and back. One block per digest."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def blocks(self) -> set[int]:
        return set(self._by_block)

    def find(self, digest: bytes, content: bytes, parent: Parent) -> Entry | None:
        """The entry of this content after this parent, or None. Whatever the digest says, both are compared."""
        entry = self._by_digest.get(digest)
        if entry is None or entry.content != content or entry.parent != parent:
            return None
        return entry

    def add(self, block: int, digest: bytes, content: bytes, parent: Parent) -> tuple[Entry, int | None]:
        """Names a block. Returns its entry and the block, if any, that had this digest and loses it.

        A digest is taken over when its entry cannot be confirmed: by a collision, or because the entry's parent was
        reclaimed and nothing leads to it any more.
        """
        old = self._by_digest.get(digest)
        if old is not None:
            del self._by_block[old.block]
        self._serial += 1
        entry = Entry(block, digest, content, self._serial, parent)
        self._by_digest[digest] = entry
        self._by_block[block] = entry
        return entry, old.block if old is not None else None

    def remove(self, block: int) -> None:
        """Forgets a block's content."""
        entry = self._by_block.pop(block)
        del self._by_digest[entry.digest]
