"""Keys and values in native memory."""

from __future__ import annotations

from noria import _native
from noria.backends.base import CacheLayout
from noria.errors import BackendError
from noria.plan import Int32


class CpuCache:
    """`Cache` of the CPU backend. `native` is what programs read and write.

    Raises:
        BackendError: a shape that the kernels do not take, or too little memory.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        try:
            self.native = _native.KvCache(
                layout.layers, layout.dtype, layout.kv_heads, layout.head_dim, layout.block_size, layout.num_blocks
            )
        except (ValueError, MemoryError) as error:
            raise BackendError(f"no cache {layout}: {error or 'not enough memory'}") from error

    def copy_blocks(self, pairs: Int32) -> None:
        """Copies whole blocks: pairs [copies, 2] of source and destination, in order, over all layers."""
        try:
            self.native.copy_blocks(pairs)
        except (ValueError, TypeError) as error:
            raise BackendError(f"copy_blocks: {error}") from error
