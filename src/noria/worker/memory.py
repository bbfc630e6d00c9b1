"""How many cache blocks fit into the memory that this process may still take."""

from __future__ import annotations

from dataclasses import dataclass

from noria.backends.base import CacheLayout
from noria.config import CacheOptions
from noria.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`num_blocks` of the pool, and the longest context that fits into it (at most what was wished for)."""

    num_blocks: int
    max_model_len: int


def cache_tokens(options: CacheOptions, layout: CacheLayout, budget: int) -> int:
    """The most tokens that a cache can hold if it gets all of `budget` (bytes), or the number of blocks asked for."""
    blocks = budget // layout.block_bytes if options.num_blocks is None else options.num_blocks
    return max(1, blocks) * layout.block_size


def plan_cache(
    options: CacheOptions,
    layout: CacheLayout,
    num_slots: int,
    max_model_len: int,
    fixed: bool,
    budget: int,
    room: int | None = None,
) -> CachePlan:
    """Number of blocks: as asked, else what the budget allows within what `num_slots` full requests could use.

    Args:
        layout: with any `num_blocks`.
        max_model_len: longest context wished for. fixed: the user named it, so that less is an error.
        budget: bytes for the cache.
        room: bytes that a number of blocks asked for may take, beyond the budget if need be; None: any.

    Raises:
        ConfigError: not even one request of `max_model_len` tokens (of one block, if not fixed) fits, or there is no
            room for the blocks asked for.
    """
    per_request = -(-max_model_len // layout.block_size)
    num_blocks = options.num_blocks
    if num_blocks is not None and room is not None and num_blocks * layout.block_bytes > room:
        # Memory is taken as blocks are used: too many would end in a kill in the middle of service.
        raise ConfigError(
            f"{num_blocks} blocks take {_mebibytes(num_blocks * layout.block_bytes)}, {_mebibytes(room)} are left: "
            "lower it, or leave it out to use what there is",
            "--num-blocks",
        )
    if num_blocks is None:
        addressable = (2**31 - 1) // layout.block_size
        num_blocks = min(budget // layout.block_bytes, num_slots * per_request, addressable)
    if num_blocks >= per_request:
        return CachePlan(int(num_blocks), max_model_len)
    fits = max(0, int(num_blocks)) * layout.block_size
    if fixed or fits == 0:
        if options.num_blocks is not None:
            raise ConfigError(
                f"{num_blocks} blocks of {layout.block_size} tokens hold {fits} tokens, one request may need "
                f"{max_model_len}: raise it, or lower --max-model-len",
                "--num-blocks",
            )
        need = _mebibytes(per_request * layout.block_bytes)
        raise ConfigError(
            f"the KV cache of one request of {max_model_len} tokens takes {need}, {_mebibytes(budget)} are left: "
            "lower --max-model-len, raise --gpu-memory-utilization, or take a smaller cache type (--kv-cache-dtype)",
            "--max-model-len",
        )
    return CachePlan(int(num_blocks), fits)


def _mebibytes(nbytes: int) -> str:
    return f"{max(0, nbytes) / 2**20:,.0f} MiB"
