"""Llama (Touvron et al. 2023) and what is built the same way: Mistral, SmolLM2, TinyLlama, Granite code models.

Pre-norm blocks, grouped-query attention with rotary embeddings, a gated SiLU MLP. Mistral adds a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from noria.backends.base import Graph, RopeTable
from noria.layers.attention import attend, output, qkv
from noria.layers.base import Weights
from noria.layers.embedding import embed, head
from noria.layers.mlp import gated_mlp
from noria.layers.norm import norm
from noria.models.architecture import Architecture, Keys, decoder_config
from noria.models.config import ModelConfig


def read_config(keys: Keys) -> ModelConfig:
    if keys.get("model_type") == "mistral":
        config = decoder_config(keys, "llama", max_position=131072, kv_heads=8)
        # Absent means 4096 (the first Mistral), null means none.
        window = keys.integer("sliding_window", 4096) if "sliding_window" not in keys.values else _optional_window(keys)
        return replace(config, windows=(window,) * config.layers)
    config = decoder_config(keys, "llama")
    attention_bias = keys.flag("attention_bias")
    return replace(config, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=keys.flag("mlp_bias"))


def build(config: ModelConfig, weights: Weights, ropes: Sequence[RopeTable], qk_norm: bool = False) -> Graph:
    """`qk_norm`: norm each query and key head (Qwen3)."""
    graph = Graph()
    x = embed(graph, weights, config)
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        h = norm(graph, weights, x, f"{at}input_layernorm", config)
        projected = qkv(graph, weights, h, f"{at}self_attn.", config)
        h = attend(graph, weights, projected, f"{at}self_attn.", layer, config, ropes[layer], qk_norm)
        if layer == config.layers - 1:  # nothing later attends, so only rows that need logits go on
            h, x = graph.select(h), graph.select(x)
        x = output(graph, weights, h, f"{at}self_attn.", config, residual=x)
        h = norm(graph, weights, x, f"{at}post_attention_layernorm", config)
        x = gated_mlp(graph, weights, h, f"{at}mlp.", config, residual=x)
    head(graph, weights, x, config)
    return graph


def _optional_window(keys: Keys) -> int:
    return 0 if keys.get("sliding_window") is None else keys.integer("sliding_window")


ARCHITECTURE = Architecture(
    name="llama",
    classes=("LlamaForCausalLM", "MistralForCausalLM"),
    model_types=("llama", "mistral"),
    read_config=read_config,
    build=build,
    paired_rope=True,
)
