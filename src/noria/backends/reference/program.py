"""Runs a graph op by op."""

from __future__ import annotations

from typing import cast

import numpy as np

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
from noria.backends.reference import ops
from noria.backends.reference.cache import ReferenceCache
from noria.errors import BackendError
from noria.plan import Float32, Int32


class ReferenceProgram:
    """`Program` that interprets its graph. `values` of the last run stay readable by index, for tests and debugging."""

    def __init__(self, graph: Graph, limits: Limits) -> None:
        self.graph = graph
        self.limits = limits
        self.values: dict[int, Float32] = {}
        self._hidden: Float32 = np.empty((0, graph.hidden.width if graph.hidden else 0), np.float32)

    def run(self, batch: Batch, cache: Cache) -> int:
        """Computes the batch, writes the cache and keeps the selected hidden rows; returns their number."""
        self._check(batch)
        self.values = {}
        for op in self.graph.ops:
            self.values[op.out.index] = self._compute(op, batch, cast(ReferenceCache, cache))
        if self.graph.hidden is not None:
            self._hidden = self.values[self.graph.hidden.index]
        return len(self._hidden)

    def logits(self, start: int, stop: int) -> Float32:
        """Logits [stop - start, vocab] of hidden rows start … stop - 1 of the last run."""
        if stop - start > self.limits.max_outputs:
            raise BackendError(f"logits of {stop - start} hidden rows, at most {self.limits.max_outputs} at once")
        return self._logits(start, stop)

    def largest(self, start: int, stop: int) -> Int32:
        """The lowest id of the largest logit of hidden rows start … stop - 1 of the last run."""
        ids: Int32 = self._logits(start, stop).argmax(axis=1).astype(np.int32)
        return ids

    def _logits(self, start: int, stop: int) -> Float32:
        head = self.graph.head
        if head is None:
            raise BackendError("this graph has no head")
        if not 0 <= start <= stop <= len(self._hidden):
            raise BackendError(f"rows {start}…{stop} of {len(self._hidden)} hidden rows")
        logits = ops.product(self._hidden[start:stop], head) * self.graph.logit_scale
        cap = self.graph.logit_softcap
        return ops.narrow(cap * np.tanh(logits / cap) if cap else logits)

    def _compute(self, op: Op, batch: Batch, cache: ReferenceCache) -> Float32:
        value = self._value
        match op:
            case Embed():
                return ops.embed(op.table, batch.input_ids, op.scale)
            case Norm():
                return ops.norm(value(op.x), op.weight, op.eps, self._optional(op.residual))
            case Linear():
                return ops.linear(value(op.x), op.parts, op.bias, self._optional(op.residual))
            case GatedLinear():
                return ops.gated_linear(op, value(op.x))
            case RopeCache():
                return ops.rope_cache(op, value(op.qkv), batch, cache)
            case Attention():
                return ops.attention(op, value(op.q), batch, cache)
            case Select():
                return value(op.x)[batch.output_rows]

    def _value(self, value: Value) -> Float32:
        return self.values[value.index]

    def _optional(self, value: Value | None) -> Float32 | None:
        return None if value is None else self.values[value.index]

    def _check(self, batch: Batch) -> None:
        tokens, seqs = len(batch.input_ids), len(batch.slots)
        if tokens > self.limits.max_tokens or seqs > self.limits.max_seqs:
            raise BackendError(f"{tokens} tokens of {seqs} sequences in one step, over the limits {self.limits}")
