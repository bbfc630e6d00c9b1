"""RMS norm (Zhang and Sennrich 2019) with a checkpoint's weight."""

from __future__ import annotations

from noria.backends.base import Graph, Value
from noria.layers.base import DecoderConfig, Weights


def norm(
    graph: Graph, weights: Weights, x: Value, name: str, config: DecoderConfig, residual: Value | None = None
) -> Value:
    """out = rms(x) * weight (+ residual). `name` lacks its ".weight"."""
    return graph.norm(x, weights.vector(f"{name}.weight", x.width), config.norm_eps, residual)
