"""Where the first tokens of a request come from: cached blocks, or the table of a sibling, instead of being computed.

Knows who leads a group and whose prefix another waits for. Chooses nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from noria.cache.manager import BlockTable, CacheManager, Match
from noria.engine.queue import WaitingQueue
from noria.engine.request import Request


@dataclass(slots=True)
class Prefix:
    """Matched blocks, or a sibling's table. `tokens`: how many tokens they hold."""

    match: Match
    tokens: int
    sibling: BlockTable | None = None


class Prefixes:
    """What requests share.

    Args:
        manager: the cache's blocks.
        waiting: where a request is parked until another has computed what both need.
        most_parked: beyond so many, requests compute for themselves.
    """

    def __init__(self, manager: CacheManager, waiting: WaitingQueue, most_parked: int) -> None:
        self._manager = manager
        self._waiting = waiting
        self._most_parked = most_parked
        self._leaders: dict[int, Request] = {}  # group → the running request that its siblings share with

    def started(self, request: Request) -> None:
        """It runs: its siblings can share with it."""
        if request.group:
            self._leaders.setdefault(request.group, request)

    def stopped(self, request: Request) -> None:
        """It runs no longer: those who waited for it are in line again."""
        if self._leaders.get(request.group) is request:
            del self._leaders[request.group]
        self._waiting.wake(request.id, None)

    def look_ahead(self, request: Request) -> None:
        """It has begun to wait: hashes its blocks, and what is cached of them counts as just used, so that others are
        given up first."""
        if request.chain is not None:
            request.chain.extend(request.tokens)
            match = self._manager.match(request.chain, request.tokens, len(request.tokens) - 1)
            self._manager.touch(match.blocks)

    def find(self, request: Request) -> Prefix | None:
        """What the first in line can share now; None: it has been parked until another has computed what both need.

        The last known token is always computed, for its logits. Prompt log-probabilities need every hidden state.
        """
        tokens, chain, most = request.tokens, request.chain, len(request.tokens) - 1
        if request.wants_prompt_logprobs:
            return Prefix(self._manager.match(chain, tokens, 0), 0)
        if chain is not None:
            chain.extend(tokens)
        match = self._manager.match(chain, tokens, most)
        found = len(match.blocks) * self._manager.block_size
        room = self._waiting.parked < self._most_parked
        leader = self._leaders.get(request.group) if request.group and self._manager.shares else None
        shared = request.prompt_length - 1
        if leader is not None and shared > found and leader.same_prompt(request):
            if leader.confirmed >= shared:
                return Prefix(match, shared, leader.table)
            if room:
                self._waiting.park(leader.id, shared)
                return None
        if match.owner is not None and room:
            self._waiting.park(match.owner, match.owner_tokens)
            return None
        return Prefix(match, found)

    def table(
        self, request: Request, prefix: Prefix, size: int, reserve: int, copies: list[tuple[int, int]]
    ) -> BlockTable | None:
        """Blocks for `size` tokens, those of the prefix first; None if they do not fit.

        Args:
            reserve: blocks that must be left.
            copies: gets source and destination of blocks that must be copied.
        """
        if prefix.sibling is None:
            table = self._manager.admit(request.id, request.chain, prefix.match, size, reserve)
            if table is None:
                self._manager.touch(prefix.match.blocks)  # it is the next to need them
            return table
        fork = self._manager.fork(request.id, request.chain, prefix.match, prefix.sibling, prefix.tokens, size, reserve)
        if fork is None:
            return None
        copies.extend(fork.copies)
        return fork.table
