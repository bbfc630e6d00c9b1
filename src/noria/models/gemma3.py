"""Gemma 3, text (Gemma Team 2025): five layers with a local window to each that sees everything, each kind with its own
RoPE base; norms before *and* after attention and MLP; normed query and key heads; embeddings scaled by sqrt(hidden).

A soft cap on attention in a checkpoint is a leftover of Gemma 2: neither the authors' code nor transformers applies it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from noria.backends.base import Graph, RopeTable
from noria.errors import UnsupportedModelError
from noria.layers.attention import attend, output, qkv
from noria.layers.base import Weights
from noria.layers.embedding import embed, head
from noria.layers.mlp import gated_mlp
from noria.layers.norm import norm
from noria.models.architecture import Architecture, Keys, decoder_config, keys_rope, layer_windows, rope_config
from noria.models.config import ModelConfig, RopeConfig

PATTERN = 6  # every sixth layer sees everything
LOCAL_THETA = 10_000.0
GLOBAL_THETA = 1_000_000.0
LAYERS_27B = 62


def read_config(keys: Keys) -> ModelConfig:
    if (text := keys.mapping("text_config")) != {}:
        # A multimodal checkpoint: its language model. Some keys stand outside, many are left to their defaults.
        outer = {key: keys.get(key) for key in ("tie_word_embeddings", "torch_dtype", "dtype")}
        keys = Keys({**outer, **text}, f"{keys.where}: text_config")
    if keys.get("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{keys.where}: use_bidirectional_attention (an embedding model) is not supported")
    head_dim = keys.integer("head_dim", 256, high=4096)
    rope, local_rope = _ropes(keys, head_dim)
    config = decoder_config(
        keys,
        "gemma3",
        head_dim=256,
        max_position=131072,
        tied=True,
        vocab=262208,
        heads=8,
        kv_heads=4,
        rope=rope,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
    )
    window = keys.integer("sliding_window", 4096)
    pattern = keys.integer("sliding_window_pattern", PATTERN)
    bias = keys.flag("attention_bias")
    return replace(
        config,
        windows=layer_windows(keys, config.layers, window, lambda layer: (layer + 1) % pattern != 0),
        local_rope=local_rope,
        attention_scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embed_scale=float(config.hidden) ** 0.5,
        qkv_bias=bias,
        output_bias=bias,
        logit_softcap=keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else 0.0,
    )


def _ropes(keys: Keys, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of the layers that see everything, and of those with a window."""
    params = keys_rope(keys)
    if "full_attention" in params or "sliding_attention" in params:
        wide, near = (params.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    else:
        wide, near = params, {}
    rope = rope_config(keys, wide, head_dim, GLOBAL_THETA)
    near = {"rope_theta": keys.number("rope_local_base_freq", LOCAL_THETA), **near}
    return replace(rope, scaling=_within(rope.scaling, keys.integer("max_position_embeddings", 131072))), rope_config(
        Keys({}, keys.where), near, head_dim
    )


def _within(scaling: Mapping[str, Any] | None, max_position: int) -> dict[str, Any] | None:
    # Gemma's max_position already counts its scaling: state the length before it, so that it is not counted twice.
    if scaling is None or "original_max_position_embeddings" in scaling or scaling["rope_type"] != "linear":
        return dict(scaling) if scaling is not None else None
    return {**scaling, "original_max_position_embeddings": max_position / float(scaling.get("factor") or 1.0)}


def refine_gguf(config: ModelConfig, keys: Keys) -> ModelConfig:
    window = keys.integer("attention.sliding_window")
    pattern = keys.integer("attention.sliding_window_pattern", PATTERN)
    # The 27B model alone scales by the width per head (query_pre_attn_scalar 168), which files do not record.
    scalar = config.hidden / config.heads if config.layers == LAYERS_27B else config.head_dim
    return replace(
        config,
        rope=replace(config.rope, scaling=_within(config.rope.scaling, config.max_position)),
        windows=tuple(window if (layer + 1) % pattern else 0 for layer in range(config.layers)),
        local_rope=RopeConfig(keys.number("rope.freq_base_swa", LOCAL_THETA), config.rope.rotary_dim),
        activation="gelu_tanh",
        attention_scale=scalar**-0.5,
        embed_scale=float(config.hidden) ** 0.5,
        logit_softcap=keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else 0.0,
    )


def build(config: ModelConfig, weights: Weights, ropes: Sequence[RopeTable]) -> Graph:
    graph = Graph()
    x = embed(graph, weights, config)
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        h = norm(graph, weights, x, f"{at}input_layernorm", config)
        projected = qkv(graph, weights, h, f"{at}self_attn.", config)
        h = attend(graph, weights, projected, f"{at}self_attn.", layer, config, ropes[layer], qk_norm=True)
        if layer == config.layers - 1:  # nothing later attends, so only rows that need logits go on
            h, x = graph.select(h), graph.select(x)
        h = output(graph, weights, h, f"{at}self_attn.", config)
        x = norm(graph, weights, h, f"{at}post_attention_layernorm", config, residual=x)
        h = norm(graph, weights, x, f"{at}pre_feedforward_layernorm", config)
        h = gated_mlp(graph, weights, h, f"{at}mlp.", config)
        x = norm(graph, weights, h, f"{at}post_feedforward_layernorm", config, residual=x)
    head(graph, weights, x, config)
    return graph


ARCHITECTURE = Architecture(
    name="gemma3",
    classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_types=("gemma3_text", "gemma3"),
    read_config=read_config,
    build=build,
    refine_gguf=refine_gguf,
    norm_offset=1.0,
)
