"""Runs a whole prompt through a model's program, without engine or worker, and returns its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.backends import get_backend
from noria.backends.base import Batch, CacheLayout, Limits
from noria.config import ModelOptions
from noria.files.resolve import resolve
from noria.models.loaders import open_checkpoint
from noria.models.registry import build_model


def prompt_logits(
    model: str, ids: Sequence[int], backend: str = "cpu", threads: int | None = None, cache: str = "f32", **options: Any
) -> NDArray[np.float32]:
    """Logits [tokens, vocab] after each token of one prompt.

    Args:
        options: fields of ModelOptions, as `dtype` or `quantization`.
    """
    device = get_backend(backend, threads)
    checkpoint = open_checkpoint(resolve(model))
    config = checkpoint.config
    length, block = len(ids), 16
    built = build_model(checkpoint, device, ModelOptions(model=model, **options), max(length, 64))
    blocks = -(-length // block)
    layout = CacheLayout(config.layers, config.kv_heads, config.head_dim, block, blocks + 1, cache)
    store = device.new_cache(layout)
    program = device.compile(built.graph, Limits(max_tokens=length, max_outputs=length, max_seqs=1))
    positions = np.arange(length, dtype=np.int32)
    batch = Batch(
        input_ids=np.asarray(ids, np.int32),
        positions=positions,
        kv_positions=positions + block,  # block 0 is left out: tables must be followed
        query_starts=np.array([0, length], np.int32),
        kv_lengths=np.array([length], np.int32),
        slots=np.zeros(1, np.int32),
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None].copy(),
        output_rows=positions,
    )
    rows = program.run(batch, store)
    return np.array(program.logits(0, rows))
