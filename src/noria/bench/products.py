"""Products by themselves, weights in the caches: the kernel's own speed, and oneDNN's beside it if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from noria import _native
from noria.backends.base import GatedLinear, Graph, Linear, Scheme, Weight
from noria.backends.counts import product_work
from noria.bench.limits import MachineLimits
from noria.bench.onednn import OneDnn
from noria.bench.roofline import bound
from noria.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Product:
    """x @ concat(parts).T, the parts having k columns each."""

    parts: tuple[Weight, ...]

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].k

    @property
    def label(self) -> str:
        return product_work(self.parts, 1).label


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Of one product with so many rows. `onednn`: seconds that oneDNN takes; None where it was not asked."""

    product: str
    rows: int
    seconds: float
    operations: int
    weight_bytes: int
    limit: float
    bound_by: str
    onednn: float | None

    @property
    def of_limit(self) -> float:
        return self.limit / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "product": self.product,
            "rows": self.rows,
            "us": 1e6 * self.seconds,
            "operations_per_s": self.operations / self.seconds,
            "weight_bytes_per_s": self.weight_bytes / self.seconds,
            "limit_us": 1e6 * self.limit,
            "bound_by": self.bound_by,
            "of_limit": self.of_limit,
            "onednn_us": None if self.onednn is None else 1e6 * self.onednn,
        }


def products_of(graph: Graph) -> list[Product]:
    """The different products of a model, one of each shape and scheme; gate and up as one."""
    found: dict[str, Product] = {}
    candidates: list[tuple[Weight, ...]] = []
    for op in graph.ops:
        if isinstance(op, Linear):
            candidates.append(op.parts)
        elif isinstance(op, GatedLinear):
            candidates.append((op.gate, op.up))
    if graph.head is not None:
        candidates.append((graph.head,))
    for parts in candidates:
        product = Product(parts)
        found.setdefault(product.label, product)
    return list(found.values())


def random_product(scheme: str, shape: str) -> Product:
    """A product with random weights, of a scheme as "int8/64" and a shape as "1536x576": outputs x inputs.

    Raises:
        ConfigError: either cannot be read, or the kernels do not take it.
    """
    try:
        n, k = (int(side) for side in shape.split("x"))
    except ValueError:
        raise ConfigError(f"must be OUTPUTSxINPUTS, as 1536x576, got {shape!r}", "--shapes") from None
    name, _, size = scheme.partition("/")
    wide = scheme == "int8/a16"
    if name not in ("f32", "bf16", "int8", "int4") or (size and not size.isdigit() and not wide) or min(n, k) < 1:
        raise ConfigError(f"must be f32, bf16, int8/GROUP, int8/a16 or int4/GROUP, got {scheme!r}", "--schemes")
    group = k if wide else min(int(size or 64), k)
    try:
        data = _pack(name, n, k, group, wide)
    except ValueError as error:
        raise ConfigError(f"{scheme} of {shape}: {error}", "--schemes") from None
    known = Scheme("f32") if name == "f32" else Scheme("bf16") if name == "bf16" else None
    known = known or (Scheme("int8", group, wide) if name == "int8" else Scheme("int4", group))
    return Product((Weight(known, n, k, data.nbytes, data),))


def _pack(name: str, n: int, k: int, group: int, wide: bool) -> Any:
    rng = np.random.default_rng(0)
    if name == "f32":
        return _native.pack_f32(rng.standard_normal((n, k), dtype=np.float32))
    if name == "bf16":
        return _native.pack_bf16(rng.standard_normal((n, k), dtype=np.float32))
    scales = np.full((n, -(-k // group)), 2.0**-7, np.float32)  # fits float16, as those of GGUF files do
    if name == "int8":
        return _native.pack_int8(rng.integers(-127, 128, (n, k), dtype=np.int8), scales, group, wide)
    return _native.pack_int4(rng.integers(0, 16, (n, k), dtype=np.uint8), scales, -8 * scales, group)


def time_products(
    products: list[Product],
    rows: list[int],
    pool: Any,
    limits: MachineLimits,
    onednn: OneDnn | None,
    budget: float,
) -> Iterator[ProductTime]:
    """Each product with each number of rows. `budget`: about how many seconds a figure takes."""
    for product in products:
        for count in rows:
            work = product_work(product.parts, count)
            least = bound(work, limits, limits.read(work.stored).rate.all)
            x = np.random.default_rng(1).standard_normal((count, product.k), dtype=np.float32)
            data = [part.data for part in product.parts]
            run = partial(_native.linear, pool, x, data, None, None, 1.0, 0.0)
            other = onednn.product(product.parts[0].scheme.name, product.n, product.k, count) if onednn else None
            yield ProductTime(
                product.label,
                count,
                _seconds(run, pool.threads, budget),
                work.all_operations,
                work.stored,
                least.seconds,
                least.by,
                _seconds(other, pool.threads, budget) if other else None,
            )


def _seconds(product: Callable[[int], Any], threads: int, budget: float) -> float:
    """Time of one product: the difference of two calls that convert the same input and differ in repeats.

    One thread is timed by its processor time, so that neighbours on the machine do not count; several by the clock.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter

    def timed(repeats: int) -> float:
        start = clock()
        product(repeats)
        return clock() - start

    timed(1)
    repeats = max(4, int(budget / 8 / max(timed(1), 1e-7)))
    once = min(timed(1) for _ in range(5))
    return max(min(timed(repeats + 1) for _ in range(8)) - once, 1e-9) / repeats
