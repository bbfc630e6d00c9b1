"""The reference backend: packs weights by simulating their scheme in float32, and compiles graphs to an interpreter."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from noria.backends.base import (
    CacheLayout,
    DenseSource,
    Graph,
    GroupedSource,
    Limits,
    Scheme,
    Table,
    Weight,
    WeightSource,
)
from noria.backends.reference.cache import ReferenceCache
from noria.backends.reference.program import ReferenceProgram
from noria.backends.reference.sampling import ReferenceSampler
from noria.backends.rtn import dequantise_source, regroup, round_bf16
from noria.errors import BackendError
from noria.plan import Float32


class ReferenceBackend:
    """`Backend` in NumPy. `threads` is accepted for the protocol's sake; NumPy's own threads do the products."""

    name = "reference"
    isa = "numpy"
    wide_int8 = False

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def pack(self, source: WeightSource, scheme: Scheme) -> Weight:
        """Holds the values that a product in this scheme sees, as float32 [n, k], whatever the scheme."""
        n, k = source.shape
        if 0 in (n, k):
            raise BackendError(f"a weight must not be empty, got shape {source.shape}")
        values = held_values(source, scheme)
        return Weight(scheme, n, k, values.nbytes, values)

    def table(self, values: NDArray[Any], dtype: Literal["f32", "bf16"]) -> Table:
        """Holds the table in the given type."""
        held = np.ascontiguousarray(values, ml_dtypes.bfloat16 if dtype == "bf16" else np.float32)
        return Table(held.shape[0], held.shape[1], held.nbytes, held)

    def table_of(self, weight: Weight) -> Table:
        """The weight's own values."""
        if weight.scheme.name not in ("f32", "bf16"):
            raise BackendError(f"only an f32 or bf16 weight holds its values as they are, got {weight.scheme}")
        return Table(weight.n, weight.k, 0, weight.data)

    def new_cache(self, layout: CacheLayout) -> ReferenceCache:
        """A cache of zeros; the system gives its memory as blocks are first written."""
        return ReferenceCache(layout)

    def compile(self, graph: Graph, limits: Limits) -> ReferenceProgram:
        """A program that walks the graph op by op."""
        return ReferenceProgram(graph, limits)

    def new_sampler(self, slots: int, vocab: int) -> ReferenceSampler:
        """A sampler with state for `slots` requests."""
        return ReferenceSampler(slots, vocab)

    def rest(self) -> None:
        """There is nothing to be put to rest."""


def held_values(source: WeightSource, scheme: Scheme) -> Float32:
    """Float32 [n, k]: the weight after rounding to the scheme. A grouped source that agrees with it is kept exactly."""
    if scheme.name == "f32":
        return dequantise_source(source)
    if scheme.name == "bf16":
        return round_bf16(dequantise_source(source))
    if scheme.group < 1:
        raise BackendError(f"scheme {scheme.name} needs a group of at least 1, got {scheme.group}")
    held: GroupedSource | DenseSource = regroup(source, 8 if scheme.name == "int8" else 4, scheme.group)
    return dequantise_source(held)
