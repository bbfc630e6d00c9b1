"""Perplexity: how surprised a model is by a text, in a given scheme and cache type.

Owns the cutting of a text into windows and the arithmetic over their log-probabilities. Runs a compiled program
directly, one window per step: no engine, no scheduler. Perplexity is exp(mean negative log-likelihood) over all tokens
but the first of each window.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from noria.backends.base import Backend, Batch, CacheLayout, CacheType, Limits, Scheme, Weight, WeightSource
from noria.config import ModelOptions
from noria.errors import ConfigError
from noria.models.loaders import Checkpoint
from noria.models.registry import Model, build_model
from noria.plan import Float32, Int32

BLOCK = 16  # tokens
LOGITS_ROWS = 64  # rows of logits held at once
WEIGHTS = ("f32", "bf16", "int8", "int4", "auto")


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of a text's tokens under one setting. `log_probs`: float32 [windows, length - 1]."""

    log_probs: Float32
    seconds: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.log_probs.mean(dtype=np.float64)))

    def change(self, base: Score) -> tuple[float, float]:
        """Relative change of perplexity against `base`, and its standard error over the tokens that both scored."""
        difference = base.log_probs.astype(np.float64) - self.log_probs
        ratio = float(np.exp(difference.mean()))
        return ratio - 1.0, ratio * float(difference.std() / np.sqrt(difference.size))


def cut_windows(ids: Int32, length: int, count: int, bos: int | None) -> Int32:
    """`count` windows [count, length], spread evenly over the text; each begins with `bos` if the model uses one.

    Raises:
        ConfigError: the text is too short for that many windows that do not overlap.
    """
    body = length - (bos is not None)
    if len(ids) < count * body:
        raise ConfigError(f"the text has {len(ids)} tokens; {count} windows need {count * body}", "--windows")
    starts = np.linspace(0, len(ids) - body, count).astype(int)
    cut = np.stack([ids[start : start + body] for start in starts]).astype(np.int32)
    return cut if bos is None else np.insert(cut, 0, bos, axis=1)


def model_options(model: str, weights: str) -> ModelOptions:
    """The options that hold all weights as `weights` says: f32, bf16, int8, int4, or auto (as the file stores them)."""
    if weights not in WEIGHTS:
        raise ConfigError(f"must be one of {', '.join(WEIGHTS)}, got {weights!r}", "--weights")
    held = {"dtype": weights, "quantization": "none"} if weights in ("f32", "bf16") else {"quantization": weights}
    return msgspec.convert({"model": model, **held}, ModelOptions)


class Regrouped:
    """A backend that packs int8 weights in another grouping than their scheme says: for choosing the default."""

    def __init__(self, backend: Backend, int8_group: int) -> None:
        self._backend = backend
        self._group = int8_group

    def pack(self, source: WeightSource, scheme: Scheme) -> Weight:
        """As the backend itself, but for the group of int8; one scale per row where it exceeds the row."""
        k = source.shape[1]
        return self._backend.pack(
            source, replace(scheme, group=min(self._group, k), wide=False) if scheme.name == "int8" else scheme
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Evaluator:
    """A packed model that scores windows with any cache type."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend, options: ModelOptions, length: int) -> None:
        self.model: Model = build_model(checkpoint, backend, options, length)
        self._backend = backend
        self._length = length
        self._program = backend.compile(self.model.graph, Limits(length, LOGITS_ROWS, 1))
        self._sampler = backend.new_sampler(1, checkpoint.config.vocab)

    def score(self, windows: Int32, cache_type: CacheType, on_window: Callable[[], None] = lambda: None) -> Score:
        """Scores windows [count, length]; calls `on_window` after each."""
        began = time.perf_counter()
        config = self.model.config
        blocks = -(-self._length // BLOCK)
        layout = CacheLayout(config.layers, config.kv_heads, config.head_dim, BLOCK, blocks, cache_type)
        cache = self._backend.new_cache(layout)
        rows = []
        for window in windows:
            self._program.run(window_batch(window), cache)
            targets = np.ascontiguousarray(window[1:])
            rows.append(self._log_probs(targets))
            on_window()
        return Score(np.stack(rows), time.perf_counter() - began)

    def _log_probs(self, targets: Int32) -> Float32:
        """[targets] of the hidden rows of the last run."""
        parts: list[NDArray[np.float32]] = []
        for start in range(0, len(targets), LOGITS_ROWS):
            stop = min(start + LOGITS_ROWS, len(targets))
            scored = self._sampler.score(self._program.logits(start, stop), targets[start:stop], 0)
            parts.append(np.array(scored.chosen))
        return np.concatenate(parts)


def window_batch(window: Int32) -> Batch:
    """One sequence from position 0 whose every token but the last is an output."""
    length = len(window)
    positions = np.arange(length, dtype=np.int32)
    return Batch(
        input_ids=np.ascontiguousarray(window),
        positions=positions,
        kv_positions=positions.copy(),  # blocks 0, 1, 2 … in order
        query_starts=np.array([0, length], np.int32),
        kv_lengths=np.array([length], np.int32),
        slots=np.zeros(1, np.int32),
        block_tables=np.arange(-(-length // BLOCK), dtype=np.int32)[None],
        output_rows=positions[:-1].copy(),
    )
