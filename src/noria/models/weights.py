"""The two ways of walking through an architecture's weights: taking stock of a checkpoint, and packing it.

Both are given to the same description (`Architecture.build`), so what is checked is what is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
_TABLE_CHUNK = 1 << 20  # elements of an embedding table dequantised at a time


@dataclass(slots=True)
class Inventory:
    """Notes what an architecture needs, hands out empty weights, and compares with what a checkpoint has."""

    needed: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def matrix(self, name: str, n: int, k: int) -> Weight:
        self.needed[name] = (n, k)
        return Weight(Scheme("f32"), n, k, 0, None)

    def split(self, name: str, ns: Sequence[int], k: int) -> tuple[Weight, ...]:
        self.needed[name] = (sum(ns), k)
        return tuple(Weight(Scheme("f32"), n, k, 0, None) for n in ns)

    def vector(self, name: str, width: int) -> Float32:
        self.needed[name] = (width,)
        return np.zeros(width, np.float32)

    def table(self, name: str, vocab: int, width: int) -> Table:
        self.needed[name] = (vocab, width)
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


@dataclass(slots=True)
class Packing:
    """Reads, quantises and packs one weight after the other; counts bytes and schemes."""

    checkpoint: Checkpoint
    backend: Backend
    options: ModelOptions
    nbytes: int = 0
    elements: Counter[str] = field(default_factory=Counter)  # of products' weights, by scheme

    def matrix(self, name: str, n: int, k: int) -> Weight:
        return self._pack(self.checkpoint.source(name))

    def split(self, name: str, ns: Sequence[int], k: int) -> tuple[Weight, ...]:
        source = self.checkpoint.source(name)
        ends = np.cumsum(ns).tolist()
        return tuple(self._pack(_rows(source, end - n, end)) for n, end in zip(ns, ends, strict=True))

    def vector(self, name: str, width: int) -> Float32:
        values = self.checkpoint.vector(name)
        self.nbytes += values.nbytes
        return values

    def table(self, name: str, vocab: int, width: int) -> Table:
        dtype: Literal["f32", "bf16"] = "f32" if self.options.dtype == "f32" else "bf16"
        source = self.checkpoint.source(name)
        if isinstance(source, DenseSource):
            table = self.backend.table(source.values, dtype)
        else:
            values = np.empty((vocab, width), np.float32 if dtype == "f32" else ml_dtypes.bfloat16)
            step = max(1, _TABLE_CHUNK // width)
            for start in range(0, vocab, step):
                values[start : start + step] = dequantise_source(_rows(source, start, min(start + step, vocab)))
            table = self.backend.table(values, dtype)
        self.nbytes += table.nbytes
        return table

    @property
    def schemes(self) -> str:
        """For people, the largest share first: "int4/32 + int8/64"."""
        return " + ".join(name for name, _ in self.elements.most_common())

    def _pack(self, source: WeightSource) -> Weight:
        scheme = choose_scheme(source, self.options, self.checkpoint.config.stored_dtype)
        weight = self.backend.pack(source, scheme)
        self.nbytes += weight.nbytes
        self.elements[str(weight.scheme)] += weight.n * weight.k
        return weight


def _rows(source: WeightSource, start: int, stop: int) -> WeightSource:
    if isinstance(source, DenseSource):
        return DenseSource(source.values[start:stop])
    minimums = None if source.minimums is None else source.minimums[start:stop]
    return GroupedSource(source.bits, source.codes[start:stop], source.scales[start:stop], minimums, source.group)


def _listed(items: Sequence[str] | set[str] | frozenset[str]) -> str:
    names = sorted(items)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
