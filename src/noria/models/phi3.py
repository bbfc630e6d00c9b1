"""Phi-3 and Phi-3.5 mini, Phi-4 mini (Abdin et al. 2024): Llama with fused weights, LongRoPE and partial rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from noria.backends.base import Graph, RopeTable
from noria.layers.attention import attend, output
from noria.layers.base import Weights
from noria.layers.embedding import embed, head
from noria.layers.mlp import fused_mlp
from noria.layers.norm import norm
from noria.models.architecture import Architecture, Keys, decoder_config
from noria.models.config import ModelConfig

ORIGINAL_LENGTH = 4096


def read_config(keys: Keys) -> ModelConfig:
    config = decoder_config(keys, "phi3", max_position=4096, norm_eps=1e-5)
    scaling = config.rope.scaling
    if scaling is not None:
        if scaling["rope_type"] == "yarn":  # what the first files called it
            scaling = {**scaling, "rope_type": "longrope"}
        # The length before the scaling stands at the top level, whatever the rope parameters say.
        original = keys.integer("original_max_position_embeddings", ORIGINAL_LENGTH)
        scaling = {**scaling, "original_max_position_embeddings": original}
    window = 0 if keys.get("sliding_window") is None else keys.integer("sliding_window")
    return replace(config, rope=replace(config.rope, scaling=scaling), windows=(window,) * config.layers)


def build(config: ModelConfig, weights: Weights, ropes: Sequence[RopeTable]) -> Graph:
    graph = Graph()
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    x = embed(graph, weights, config)
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        h = norm(graph, weights, x, f"{at}input_layernorm", config)
        projected = graph.linear(h, [weights.matrix(f"{at}self_attn.qkv_proj.weight", width, config.hidden)])
        h = attend(graph, weights, projected, f"{at}self_attn.", layer, config, ropes[layer])
        if layer == config.layers - 1:  # nothing later attends, so only rows that need logits go on
            h, x = graph.select(h), graph.select(x)
        x = output(graph, weights, h, f"{at}self_attn.", config, residual=x)
        h = norm(graph, weights, x, f"{at}post_attention_layernorm", config)
        x = fused_mlp(graph, weights, h, f"{at}mlp.", config, residual=x)
    head(graph, weights, x, config)
    return graph


ARCHITECTURE = Architecture(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    model_types=("phi3",),
    read_config=read_config,
    build=build,
)
