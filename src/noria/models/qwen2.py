"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and a window on the upper layers if asked."""

from __future__ import annotations

from dataclasses import replace

from noria.models import llama
from noria.models.architecture import Architecture, Keys, decoder_config, layer_windows
from noria.models.config import ModelConfig


def read_config(keys: Keys) -> ModelConfig:
    config = decoder_config(keys, "qwen2", max_position=32768)
    return replace(config, qkv_bias=True, windows=upper_windows(keys, config.layers))


def upper_windows(keys: Keys, layers: int) -> tuple[int, ...]:
    """[layers] windows: with `use_sliding_window`, layers from `max_window_layers` on slide."""
    if not keys.flag("use_sliding_window"):
        return (0,) * layers
    # Absent means 4096, null means none.
    absent = "sliding_window" not in keys.values
    window = 4096 if absent else keys.integer("sliding_window") if keys.get("sliding_window") is not None else 0
    first = keys.integer("max_window_layers", 28, low=0)
    return layer_windows(keys, layers, window, lambda layer: layer >= first)


ARCHITECTURE = Architecture(
    name="qwen2",
    classes=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    read_config=read_config,
    build=llama.build,
)
