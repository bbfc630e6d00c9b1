"""What Noria needs to know of a model, whatever file it came from. Loaders fill it; architecture files read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from noria.backends.base import Activation


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `scaling`: None, or the checkpoint's own dictionary with `rope_type` normalised to one of
    linear, dynamic, llama3, yarn, longrope. `rotary_dim` ≤ head_dim."""

    theta: float
    rotary_dim: int
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: the registry's key: llama, qwen2, qwen3, gemma3, phi3.
        windows: [layers] sliding window in tokens, 0 for full attention.
        local_rope: rotation of the layers that have a window, where it differs (Gemma 3).
        max_position: longest context that the model was made for (before a RoPE scaling given by the user).
        attention_scale: factor of q·k. embed_scale: factor of embeddings.
        stored_dtype: f32, f16, bf16 or, for quantised files, the name of the main type.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    attention_scale: float
    windows: tuple[int, ...]
    local_rope: RopeConfig | None = None
    activation: Activation = "silu"
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    stored_dtype: str = "bf16"
    extra: dict[str, Any] = field(default_factory=dict)
