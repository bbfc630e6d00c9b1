"""The two ways of walking through an architecture's weights: taking stock of a checkpoint, and packing it.

Both are given to the same description (`Architecture.build`), so what is checked is what is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import ml_dtypes
import numpy as np

from noria.backends.base import Backend, DenseSource, GroupedSource, Scheme, Table, Weight, WeightSource
from noria.config import ModelOptions
from noria.errors import WeightsError
from noria.models.loaders import Checkpoint
from noria.plan import Float32
from noria.quantize.schemes import choose_scheme, dequantise_source

_NAMED = 8  # weights that a message names before it counts the rest
_TABLE_CHUNK = 1 << 18  # elements of an embedding table dequantised at a time


@dataclass(frozen=True, slots=True)
class _Job:
    """One thing to be made of a weight: a packed matrix, the packed parts of a fused one (`ns`), or a table."""

    kind: Literal["matrix", "split", "table"]
    name: str
    n: int
    k: int
    ns: tuple[int, ...] = ()


@dataclass(slots=True)
class Inventory:
    """Notes what an architecture needs, hands out empty weights, and compares with what a checkpoint has."""

    needed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    jobs: list[_Job] = field(default_factory=list)

    def matrix(self, name: str, n: int, k: int) -> Weight:
        self._note(_Job("matrix", name, n, k))
        return Weight(Scheme("f32"), n, k, 0, None)

    def split(self, name: str, ns: Sequence[int], k: int) -> tuple[Weight, ...]:
        self._note(_Job("split", name, sum(ns), k, tuple(ns)))
        return tuple(Weight(Scheme("f32"), n, k, 0, None) for n in ns)

    def vector(self, name: str, width: int) -> Float32:
        self.needed[name] = (width,)
        return np.broadcast_to(np.float32(0), (width,))  # no memory: the width has not been checked yet

    def table(self, name: str, vocab: int, width: int) -> Table:
        self._note(_Job("table", name, vocab, width))
        return Table(vocab, width, 0, None)

    def compare(self, checkpoint: Checkpoint) -> None:
        """Raises a WeightsError that names what is missing, superfluous or of the wrong shape."""
        faults = []
        if missing := self.needed.keys() - checkpoint.names:
            faults.append(f"missing: {_listed(missing)}")
        if extra := checkpoint.names - self.needed.keys():
            faults.append(f"superfluous: {_listed(extra)}")
        wrong = [
            f"{name} is {list(checkpoint.shape(name))}, must be {list(shape)}"
            for name, shape in self.needed.items()
            if name in checkpoint.names and checkpoint.shape(name) != shape
        ]
        if wrong:
            faults.append(f"wrong shape: {_listed(wrong)}")
        if faults:
            raise WeightsError(f"the weights do not fit {checkpoint.config.architecture}: {'; '.join(faults)}")

    def _note(self, job: _Job) -> None:
        self.needed[job.name] = (job.n, job.k)
        self.jobs.append(job)


class PackedWeights:
    """Every weight of an inventory read, quantised and packed: on as many threads as the backend has, each with one
    unpacked weight at a time.

    Attributes:
        nbytes: of packed weights, tables and vectors.
        schemes: for people, the largest share first: "int4/32 + int8/64".
    """

    def __init__(self, checkpoint: Checkpoint, backend: Backend, options: ModelOptions, inventory: Inventory) -> None:
        self._checkpoint = checkpoint
        self._backend = backend
        self._options = options
        self._matrices = {job.name for job in inventory.jobs if job.kind == "matrix"}
        self.nbytes = 0
        # Largest first, so that no thread is left alone with a large one at the end.
        jobs = sorted(inventory.jobs, key=lambda job: job.n * job.k, reverse=True)
        pool = ThreadPoolExecutor(backend.threads, thread_name_prefix="noria-load")
        try:
            made = list(zip(jobs, pool.map(self._make, jobs), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
        self._parts = {(job.kind, job.name): item for job, item in made if isinstance(item, tuple)}
        self._tables = {
            job.name: item or backend.table_of(self._parts["matrix", job.name][0])
            for job, item in made
            if not isinstance(item, tuple)
        }
        packed = [part for parts in self._parts.values() for part in parts]
        self.nbytes = sum(weight.nbytes for weight in packed) + sum(table.nbytes for table in self._tables.values())
        elements: Counter[str] = Counter()
        for part in packed:
            elements[str(part.scheme)] += part.n * part.k
        self.schemes = " + ".join(name for name, _ in elements.most_common())

    def matrix(self, name: str, n: int, k: int) -> Weight:
        return self._parts["matrix", name][0]

    def split(self, name: str, ns: Sequence[int], k: int) -> tuple[Weight, ...]:
        return self._parts["split", name]

    def table(self, name: str, vocab: int, width: int) -> Table:
        return self._tables[name]

    def vector(self, name: str, width: int) -> Float32:
        values = np.array(self._checkpoint.vector(name))  # a copy, so that the file need not stay mapped
        self.nbytes += values.nbytes
        return values

    def _make(self, job: _Job) -> tuple[Weight, ...] | Table | None:
        """None: a table whose values a matrix of that name holds besides, as they are."""
        source = self._checkpoint.source(job.name)
        if job.kind == "table":
            return self._table(source, job.name)
        if job.kind == "matrix":
            return (self._pack(source, job.name),)
        ends = np.cumsum(job.ns).tolist()
        return tuple(self._pack(_rows(source, end - n, end), job.name) for n, end in zip(job.ns, ends, strict=True))

    def _table(self, source: WeightSource, name: str) -> Table | None:
        dtype: Literal["f32", "bf16"] = "f32" if self._options.dtype == "f32" else "bf16"
        if name in self._matrices and self._scheme(source, name).name == dtype:
            return None
        if isinstance(source, DenseSource):
            return self._backend.table(source.values, dtype)
        vocab, width = source.shape
        values = np.empty((vocab, width), np.float32 if dtype == "f32" else ml_dtypes.bfloat16)
        step = max(1, _TABLE_CHUNK // width)
        for start in range(0, vocab, step):
            values[start : start + step] = dequantise_source(_rows(source, start, min(start + step, vocab)))
        return self._backend.table(values, dtype)

    def _pack(self, source: WeightSource, name: str) -> Weight:
        return self._backend.pack(source, self._scheme(source, name))

    def _scheme(self, source: WeightSource, name: str) -> Scheme:
        stored = self._checkpoint.config.stored_dtype
        return choose_scheme(source, self._options, stored, name, self._backend.wide_int8)


def _rows(source: WeightSource, start: int, stop: int) -> WeightSource:
    if isinstance(source, DenseSource):
        return DenseSource(source.values[start:stop])
    minimums = None if source.minimums is None else source.minimums[start:stop]
    return GroupedSource(source.bits, source.codes[start:stop], source.scales[start:stop], minimums, source.group)


def _listed(items: Sequence[str] | set[str] | frozenset[str]) -> str:
    names = sorted(items)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
