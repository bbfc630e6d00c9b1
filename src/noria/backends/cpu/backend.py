"""The backend itself: a pool of kernel threads, and the packing of weights and tables."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from noria import _native
from noria.backends.base import CacheLayout, DenseSource, Graph, Limits, Scheme, Table, Weight, WeightSource
from noria.backends.cpu.cache import CpuCache
from noria.backends.cpu.program import CpuProgram
from noria.backends.cpu.sampler import CpuSampler
from noria.backends.rtn import dequantise_source, regroup
from noria.errors import BackendError, ConfigError
from noria.plan import Float32

# Levels on which two products of bytes cost less than one and the conversions of its groups.
WIDE_INT8 = frozenset({"amx"})


class CpuBackend:
    """`Backend` on native kernels. Weights are packed for the instruction set in use when they are packed.

    Args:
        threads: kernel threads, the calling thread being one of them; None: one per physical core that this process
            may use.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        try:
            self.isa: str = _native.isa()
        except (ValueError, RuntimeError) as error:
            raise ConfigError(str(error), "NORIA_ISA") from error
        self.wide_int8 = self.isa in WIDE_INT8
        self.pool = _native.Pool(threads or _native.topology()["threads"])
        self.threads: int = self.pool.threads

    def pack(self, source: WeightSource, scheme: Scheme) -> Weight:
        """Packs [n, k] for the products; quantises a dense source, keeps a grouped one exactly if bits and group agree.

        Raises:
            BackendError: an empty weight, values that are not finite, or a group that the kernels do not take.
        """
        n, k = source.shape
        if 0 in (n, k):
            raise BackendError(f"a weight must not be empty, got shape {source.shape}")
        try:
            data = _pack(source, scheme)
        except (ValueError, TypeError) as error:
            raise BackendError(f"cannot pack a weight {source.shape} as {scheme}: {error}") from error
        return Weight(scheme, n, k, data.nbytes, data)

    def table(self, values: NDArray[Any], dtype: Literal["f32", "bf16"]) -> Table:
        """Copies an embedding table [vocab, width] of any float type."""
        if values.ndim != 2 or 0 in values.shape:
            raise BackendError(f"an embedding table must be a matrix that is not empty, got shape {values.shape}")
        if dtype == "bf16":
            data = _native.table_bf16(_bf16_bits(values))
        else:
            data = _native.table_f32(np.ascontiguousarray(values, np.float32))
        return Table(data.vocab, data.width, data.nbytes, data)

    def table_of(self, weight: Weight) -> Table:
        """Reads the rows of an f32 or bf16 weight out of its packed form.

        Raises:
            BackendError: a weight of another scheme.
        """
        try:
            return Table(weight.n, weight.k, 0, _native.table_of(weight.data))
        except ValueError as error:
            raise BackendError(str(error)) from error

    def new_cache(self, layout: CacheLayout) -> CpuCache:
        """A cache of zeros; the system gives its memory as blocks are first written."""
        return CpuCache(layout)

    def compile(self, graph: Graph, limits: Limits) -> CpuProgram:
        """Plans the graph and allocates its buffers."""
        return CpuProgram(self.pool, graph, limits)

    def new_sampler(self, slots: int, vocab: int) -> CpuSampler:
        """A sampler with state for `slots` requests."""
        return CpuSampler(self.pool, slots, vocab)

    def rest(self) -> None:
        """Lets the kernel threads sleep at once, until the next step begins."""
        self.pool.rest()


def _pack(source: WeightSource, scheme: Scheme) -> Any:
    match scheme.name:
        case "f32":
            return _native.pack_f32(dequantise_source(source))
        case "bf16":
            return _native.pack_bf16(_bf16_bits(_floats(source)))
        case "int8":
            held = regroup(source, 8, scheme.group)
            codes, scales = _array(held.codes, np.int8), _array(held.scales, np.float32)
            return _native.pack_int8(codes, scales, held.group, scheme.wide)
        case "int4":
            held = regroup(source, 4, scheme.group)
            minimums = np.zeros_like(held.scales) if held.minimums is None else held.minimums
            codes, scales = _array(held.codes, np.uint8), _array(held.scales, np.float32)
            return _native.pack_int4(codes, scales, _array(minimums, np.float32), held.group)


def _floats(source: WeightSource) -> NDArray[Any]:
    return source.values if isinstance(source, DenseSource) else dequantise_source(source)


def _bf16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Values rounded to bfloat16 (nearest, ties to even), as their bits."""
    return np.ascontiguousarray(values, ml_dtypes.bfloat16).view(np.uint16)


def _array(values: NDArray[Any] | Float32, dtype: Any) -> NDArray[Any]:
    return np.ascontiguousarray(values, dtype)
