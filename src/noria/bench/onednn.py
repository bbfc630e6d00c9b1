"""oneDNN's products, as PyTorch brings them: what the kernels are compared with. PyTorch is no dependency of Noria."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def load_onednn(threads: int) -> OneDnn | None:
    """None where PyTorch cannot be imported, or was built without oneDNN."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return OneDnn(torch, threads) if torch.backends.mkldnn.is_available() else None


class OneDnn:
    """Products with packed weights, on so many threads. oneDNN takes the best instructions that it knows; the
    environment variable ONEDNN_MAX_CPU_ISA holds it to others."""

    def __init__(self, torch: Any, threads: int) -> None:
        self._torch = torch
        torch.set_num_threads(threads)

    @property
    def version(self) -> str:
        return f"PyTorch {self._torch.__version__}"

    def product(self, scheme: str, n: int, k: int, rows: int) -> Callable[[int], None] | None:
        """Computes [rows, k] @ [n, k].T as often as it is told. None for a scheme that oneDNN has no product for.

        int8 is its plain form: one scale per output, none per group, activations in uint8 with one scale, float32 out.
        """
        if scheme == "int8":
            return self._int8(n, k, rows)
        if scheme in ("bf16", "f32"):
            return self._floats(n, k, rows, self._torch.bfloat16 if scheme == "bf16" else self._torch.float32)
        return None

    def _int8(self, n: int, k: int, rows: int) -> Callable[[int], None]:
        torch = self._torch
        ops = torch.ops.onednn
        x = torch.randint(0, 255, (rows, k), dtype=torch.uint8)
        weight = ops.qlinear_prepack(torch.randint(-127, 127, (n, k), dtype=torch.int8), [rows, k])
        scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int64)

        def run(repeats: int) -> None:
            for _ in range(repeats):
                ops.qlinear_pointwise(x, 0.01, 128, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")

        return run

    def _floats(self, n: int, k: int, rows: int, dtype: Any) -> Callable[[int], None]:
        torch = self._torch
        ops = torch.ops.mkldnn
        x = torch.randn(rows, k).to(dtype)
        weight = ops._reorder_linear_weight(torch.randn(n, k).to(dtype), rows)

        def run(repeats: int) -> None:
            for _ in range(repeats):
                ops._linear_pointwise(x, weight, None, "none", [], "")

        return run
