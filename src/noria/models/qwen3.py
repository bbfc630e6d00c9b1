"""Qwen3, dense (Yang et al. 2025): Llama whose query and key heads are normed before their rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from noria.backends.base import Graph, RopeTable
from noria.layers.base import Weights
from noria.models import llama
from noria.models.architecture import Architecture, Keys, decoder_config
from noria.models.config import ModelConfig
from noria.models.qwen2 import upper_windows


def read_config(keys: Keys) -> ModelConfig:
    config = decoder_config(keys, "qwen3", head_dim=128, max_position=32768)
    bias = keys.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias, windows=upper_windows(keys, config.layers))


def build(config: ModelConfig, weights: Weights, ropes: Sequence[RopeTable]) -> Graph:
    return llama.build(config, weights, ropes, qk_norm=True)


ARCHITECTURE = Architecture(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    read_config=read_config,
    build=build,
)
