"""Speed of the products by themselves: each scheme, shape and number of rows.

Figures are 10^9 operations a second (a multiply-add is two) and, for one row, 10^9 bytes of weights a second.

python benchmarks/products.py --schemes int8/64,int4/32 --shapes 1536x576,49152x576 --rows 1,8,100 --isa avx2

One thread is timed by its processor time, so that neighbours on the machine do not count; several by the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from noria import _native

SHAPES = "576x576,1536x576,576x1536,49152x576"


def pack(scheme: str, n: int, k: int) -> Any:
    """A random weight of a scheme written as "int8/64"; scales fit float16, as those of GGUF files do."""
    rng = np.random.default_rng(0)
    name, _, size = scheme.partition("/")
    if name == "f32":
        return _native.pack_f32(rng.standard_normal((n, k), dtype=np.float32))
    if name == "bf16":
        return _native.pack_bf16(rng.standard_normal((n, k), dtype=np.float32))
    group = int(size or 64)
    scales = np.full((n, -(-k // group)), 2.0**-7, np.float32)
    if name == "int8":
        return _native.pack_int8(rng.integers(-127, 128, (n, k), dtype=np.int8), scales, group)
    return _native.pack_int4(rng.integers(0, 16, (n, k), dtype=np.uint8), scales, -8 * scales, group)


def seconds(product: Callable[[int], Any], clock: Callable[[], float], budget: float) -> float:
    """Time of one product: the difference of two calls that convert the same input and differ in repeats."""

    def timed(repeats: int) -> float:
        start = clock()
        product(repeats)
        return clock() - start

    repeats = max(4, int(budget / 8 / max(timed(1), 1e-7)))
    once = min(timed(1) for _ in range(5))
    return max(min(timed(repeats + 1) for _ in range(8)) - once, 1e-9) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="int8/64,int8/192,int4/32,bf16,f32")
    parser.add_argument("--shapes", default=SHAPES, help="outputs x inputs, separated by commas")
    parser.add_argument("--rows", default="1,8,100,512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="an ISA level; the best one unless given")
    parser.add_argument("--seconds", type=float, default=0.2, help="about how long each figure is measured")
    args = parser.parse_args()
    if args.isa:
        _native.select_isa(args.isa)
    pool = _native.Pool(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows = [int(count) for count in args.rows.split(",")]
    table = Table(
        "scheme", "shape", *(f"{count} rows" for count in rows), title=f"{_native.isa()}, {args.threads} threads"
    )
    for scheme in args.schemes.split(","):
        for shape in args.shapes.split(","):
            n, k = (int(side) for side in shape.split("x"))
            weight = pack(scheme, n, k)
            cells = []
            for count in rows:
                x = np.random.default_rng(1).standard_normal((count, k), dtype=np.float32)
                product = partial(_native.linear, pool, x, [weight], None, None, 1.0, 0.0)
                spent = seconds(product, clock, args.seconds)
                bandwidth = f", {weight.nbytes / spent / 1e9:.1f} GB/s" if count == 1 else ""
                cells.append(f"{2 * count * n * k / spent / 1e9:.0f} GOP/s{bandwidth}")
            table.add_row(scheme, shape, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
