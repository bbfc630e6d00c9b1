"""Causal self-attention over the cache: projections, rope and cache write, attention, output projection."""

from __future__ import annotations

import numpy as np

from noria.backends.base import Graph, RopeTable, Value
from noria.layers.base import DecoderConfig, Weights


def qkv(graph: Graph, weights: Weights, x: Value, at: str, config: DecoderConfig) -> Value:
    """Queries, keys and values of three separate projections, side by side."""
    widths = (config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim)
    names = [f"{at}{name}_proj" for name in "qkv"]
    parts = [weights.matrix(f"{name}.weight", n, x.width) for name, n in zip(names, widths, strict=True)]
    bias = None
    if config.qkv_bias:
        bias = np.concatenate([weights.vector(f"{name}.bias", n) for name, n in zip(names, widths, strict=True)])
    return graph.linear(x, parts, bias)


def attend(
    graph: Graph,
    weights: Weights,
    projected: Value,
    at: str,
    layer: int,
    config: DecoderConfig,
    rope: RopeTable,
    qk_norm: bool = False,
) -> Value:
    """Attention of one layer over already projected `qkv`: [tokens, heads * head_dim], before the output projection.

    Args:
        at: prefix of the layer's weights, with its dot ("model.layers.0.self_attn.").
        qk_norm: norm each query and key head with `q_norm` and `k_norm` before the rotation.
    """
    q_norm, k_norm = (
        (weights.vector(f"{at}{name}_norm.weight", config.head_dim) for name in "qk") if qk_norm else (None, None)
    )
    q = graph.rope_cache(
        projected, layer, config.heads, config.kv_heads, config.head_dim, rope, q_norm, k_norm, config.norm_eps
    )
    return graph.attention(
        q,
        layer,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.attention_scale,
        config.windows[layer],
        config.attention_softcap,
    )


def output(
    graph: Graph, weights: Weights, x: Value, at: str, config: DecoderConfig, residual: Value | None = None
) -> Value:
    """The output projection (+ residual): back to [rows, hidden]."""
    bias = weights.vector(f"{at}o_proj.bias", config.hidden) if config.output_bias else None
    return graph.linear(x, [weights.matrix(f"{at}o_proj.weight", config.hidden, x.width)], bias, residual)
