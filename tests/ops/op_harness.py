"""Runs a piece of a graph on any backend and returns its values: how backends are compared with each other.

A backend shows only logits, so the value of interest is read through an identity matrix in float32, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from noria.backends.base import Backend, Batch, Cache, CacheLayout, DenseSource, Graph, Limits, Program, Scheme, Value

Build = Callable[[Backend, Graph], Value]  # describes a piece of a graph; returns the value to look at
BLOCKS_PER_SEQUENCE = 12
LIMITS = Limits(max_tokens=512, max_outputs=64, max_seqs=16)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def layout(
    kv_heads: int = 1, head_dim: int = 8, dtype: str = "f32", layers: int = 1, block_size: int = 8
) -> CacheLayout:
    return CacheLayout(layers, kv_heads, head_dim, block_size, 16 * BLOCKS_PER_SEQUENCE, dtype)


def make_batch(
    spans: Sequence[tuple[int, int]], block_size: int = 8, ids: Sequence[NDArray[np.int32]] | None = None, seed: int = 0
) -> Batch:
    """Sequence i computes positions spans[i][0] … spans[i][1] - 1. Its blocks lie scattered in the pool, always at the
    same places for one seed. `ids`: token ids of each sequence from position 0 (more do no harm); by default a token's
    id is its row in the batch. All rows are outputs."""
    tables = np.random.default_rng(seed).permutation(16 * BLOCKS_PER_SEQUENCE).astype(np.int32).reshape(16, -1)
    slots = np.array([(5 * i + 3) % 16 for i in range(len(spans))], np.int32)
    counts = [stop - start for start, stop in spans]
    positions = np.concatenate([np.arange(start, stop) for start, stop in spans]).astype(np.int32)
    owner = np.repeat(slots, counts)
    tokens = sum(counts)
    input_ids = np.arange(tokens, dtype=np.int32)
    if ids is not None:
        input_ids = np.concatenate([known[a:b] for known, (a, b) in zip(ids, spans, strict=False)]).astype(np.int32)
    return Batch(
        input_ids=input_ids,
        positions=positions,
        kv_positions=(tables[owner, positions // block_size] * block_size + positions % block_size).astype(np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        kv_lengths=np.array([stop for _, stop in spans], np.int32),
        slots=slots,
        block_tables=tables,
        output_rows=np.arange(tokens, dtype=np.int32),
    )


@dataclass
class Piece:
    """A compiled piece of a graph with its cache; `run` may be called step by step."""

    backend: Backend
    build: Build
    cache_layout: CacheLayout = field(default_factory=layout)
    program: Program = field(init=False)
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        graph = Graph()
        graph.hidden = graph.select(self.build(self.backend, graph))
        graph.head = self.backend.pack(DenseSource(np.eye(graph.hidden.width, dtype=np.float32)), Scheme("f32"))
        self.program = self.backend.compile(graph, LIMITS)
        self.cache = self.backend.new_cache(self.cache_layout)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """[outputs, width]."""
        rows = self.program.run(batch, self.cache)
        assert rows == len(batch.output_rows)
        steps = range(0, rows, LIMITS.max_outputs)
        parts = [np.array(self.program.logits(i, min(i + LIMITS.max_outputs, rows))) for i in steps]
        return np.concatenate(parts)


def values(
    backend: Backend, build: Build, batch: Batch, cache_layout: CacheLayout | None = None
) -> NDArray[np.float32]:
    """One step of a piece on a fresh cache."""
    return Piece(backend, build, cache_layout or layout()).run(batch)
