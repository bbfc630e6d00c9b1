"""The reference KV cache: flat over positions, held in the cache's own number format."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from noria.backends.base import CacheLayout
from noria.backends.rtn import quantise_int8
from noria.plan import Float32, Int32

_TYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}


class ReferenceCache:
    """Keys and values of all layers.

    `keys`, `values`: [layers, num_blocks * block_size, kv_heads, head_dim] in the cache's type; for int8 `key_scales`,
    `value_scales`: float32 [layers, num_blocks * block_size, kv_heads], scale = max|x| / 127.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        shape = (layout.layers, layout.num_blocks * layout.block_size, layout.kv_heads, layout.head_dim)
        self.keys = np.zeros(shape, _TYPES[layout.dtype])
        self.values = np.zeros(shape, _TYPES[layout.dtype])
        scales = shape[:3] if layout.dtype == "int8" else (layout.layers, 0, 0)
        self.key_scales = np.zeros(scales, np.float32)
        self.value_scales = np.zeros(scales, np.float32)

    def write(self, layer: int, kv_positions: Int32, keys: Float32, values: Float32) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] at flat cache positions [tokens]."""
        self._store(self.keys[layer], self.key_scales[layer], kv_positions, keys)
        self._store(self.values[layer], self.value_scales[layer], kv_positions, values)

    def read(self, layer: int, kv_positions: Int32) -> tuple[Float32, Float32]:
        """Keys and values [tokens, kv_heads, head_dim] at flat cache positions, as the attention sees them."""
        return (
            self._load(self.keys[layer], self.key_scales[layer], kv_positions),
            self._load(self.values[layer], self.value_scales[layer], kv_positions),
        )

    def copy_blocks(self, pairs: Int32) -> None:
        """Copies whole blocks: pairs [copies, 2] of source and destination, in order, over all layers."""
        size = self.layout.block_size
        for source, destination in pairs.tolist():
            read = slice(source * size, (source + 1) * size)
            write = slice(destination * size, (destination + 1) * size)
            for array in (self.keys, self.values, self.key_scales, self.value_scales):
                if array.shape[1]:
                    array[:, write] = array[:, read]

    def _store(self, held: NDArray[np.generic], scales: Float32, at: Int32, values: Float32) -> None:
        if self.layout.dtype != "int8":
            held[at] = values.astype(held.dtype)
            return
        heads = quantise_int8(values.reshape(-1, self.layout.head_dim), self.layout.head_dim)
        held[at] = heads.codes.reshape(values.shape)
        scales[at] = heads.scales.reshape(values.shape[:2])

    def _load(self, held: NDArray[np.generic], scales: Float32, at: Int32) -> Float32:
        values = held[at].astype(np.float32)
        return values * scales[at][:, :, None] if self.layout.dtype == "int8" else values
