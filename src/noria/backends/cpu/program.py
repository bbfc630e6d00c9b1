"""Hands a graph to the native side once, and batches to it once per step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from noria import _native
from noria.backends.base import (
    Attention,
    Batch,
    Cache,
    Embed,
    GatedLinear,
    Graph,
    Limits,
    Linear,
    Norm,
    Op,
    RopeCache,
    Select,
    Value,
)
from noria.backends.cpu.cache import CpuCache
from noria.errors import BackendError
from noria.plan import Float32, Int32

_RANKS = {"block_tables": 2}  # of the batch's arrays; all others have one dimension


class CpuProgram:
    """`Program` of the CPU backend. Not for two threads at once.

    Raises:
        BackendError: a graph whose widths, rows or order do not fit together.
    """

    def __init__(self, pool: Any, graph: Graph, limits: Limits) -> None:
        self.graph = graph
        self.limits = limits
        try:
            self._native = _native.Program(
                pool, translate(graph), limits.max_tokens, limits.max_outputs, limits.max_seqs
            )
        except (ValueError, TypeError, MemoryError) as error:
            raise BackendError(f"cannot compile the graph: {error or 'not enough memory'}") from error

    @property
    def buffer_bytes(self) -> int:
        """Work space, without weights and cache."""
        return int(self._native.buffer_bytes)

    def run(self, batch: Batch, cache: Cache) -> int:
        """Computes the batch, writes the cache and keeps the selected hidden rows; returns their number.

        Raises:
            BackendError: arrays of a wrong type or shape, or numbers in them that lead outside of vocabulary, cache,
                tables or limits. Nothing has been computed then.
        """
        native_cache = cast(CpuCache, cache).native
        try:
            return int(
                self._native.run(
                    batch.input_ids,
                    batch.positions,
                    batch.kv_positions,
                    batch.query_starts,
                    batch.kv_lengths,
                    batch.slots,
                    batch.block_tables,
                    batch.output_rows,
                    native_cache,
                )
            )
        except TypeError as error:
            raise BackendError(_misfit(batch) or str(error)) from error
        except ValueError as error:
            raise BackendError(f"batch: {error}") from error

    def logits(self, start: int, stop: int) -> Float32:
        """Logits [stop - start, vocab] of hidden rows of the last run: a view, valid until the next call."""
        try:
            return cast(Float32, self._native.logits(start, stop))
        except ValueError as error:
            raise BackendError(str(error)) from error

    def largest(self, start: int, stop: int) -> Int32:
        """The lowest id of the largest logit of hidden rows of the last run [stop - start]; no logits are stored."""
        try:
            return cast(Int32, self._native.largest(start, stop))
        except ValueError as error:
            raise BackendError(str(error)) from error

    def hidden(self) -> Float32:
        """Hidden rows [rows, width] of the last run: a view, valid until the next run."""
        try:
            return cast(Float32, self._native.hidden())
        except ValueError as error:
            raise BackendError(str(error)) from error

    def profile(self, on: bool) -> None:
        """Starts (from zero) or stops the clocks of the ops; a running clock costs some 50 ns per op."""
        self._native.clear_times()
        self._native.set_timing(on)

    def times(self) -> list[dict[str, Any]]:
        """Since `profile(True)`, per op that ran: name, op (index in the graph; None: the head), width, seconds,
        calls, rows. The conversion of a result for the products that read it is an entry `convert` of its own."""
        return list(self._native.times())


def translate(graph: Graph) -> Any:
    """The native form of a graph. It holds references to the weights, tables and vectors."""
    native = _native.Graph()
    for value in graph.values:
        native.value(value.width, value.rows == "outputs")
    for op in graph.ops:
        _append(native, op)
    head = None if graph.head is None else graph.head.data
    native.finish(_index(graph.hidden), head, graph.logit_scale, graph.logit_softcap)
    return native


def _append(native: Any, op: Op) -> None:
    out = op.out.index
    match op:
        case Embed():
            native.embed(op.table.data, op.scale, out)
        case Norm():
            native.norm(op.x.index, _vector(op.weight), op.eps, _index(op.residual), out)
        case Linear():
            parts = [part.data for part in op.parts]
            native.linear(op.x.index, parts, _vector(op.bias), _index(op.residual), out)
        case GatedLinear():
            biases = (_vector(op.gate_bias), _vector(op.up_bias))
            native.gated_linear(op.x.index, op.gate.data, op.up.data, op.activation, *biases, out)
        case RopeCache():
            cos, sin = (None, None) if op.rope is None else (_vector(op.rope.cos), _vector(op.rope.sin))
            heads = (op.layer, op.heads, op.kv_heads, op.head_dim)
            native.rope_cache(op.qkv.index, *heads, cos, sin, _vector(op.q_norm), _vector(op.k_norm), op.eps, out)
        case Attention():
            heads = (op.layer, op.heads, op.kv_heads, op.head_dim)
            native.attention(op.q.index, *heads, op.scale, op.window, op.softcap, out)
        case Select():
            native.select(op.x.index, out)


def _index(value: Value | None) -> int | None:
    return None if value is None else value.index


def _vector(values: NDArray[Any] | None) -> NDArray[np.float32] | None:
    return None if values is None else np.ascontiguousarray(values, np.float32)


def _misfit(batch: Batch) -> str | None:
    """Which array of the batch is not int32, contiguous and of the right rank."""
    for name in Batch.__dataclass_fields__:
        array = getattr(batch, name)
        rank = _RANKS.get(name, 1)
        if not isinstance(array, np.ndarray):
            return f"batch.{name} must be an array, got {type(array).__name__}"
        if array.dtype != np.int32 or array.ndim != rank or not array.flags.c_contiguous:
            return f"batch.{name} must be C-contiguous int32 of {rank} dimension(s), got {array.dtype} {array.shape}"
    return None
