"""The tiny checkpoints of `tiny_models` as GGUF files, written by the `gguf` package the way converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray

from helpers.tiny_models import BOS, CASES, EOS, PAD, head_dim_of, make_tensors, vocabulary

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(name: str, path: Path, seed: int = 0, kind: str = "F32", **changes: Any) -> dict[str, Any]:
    """Writes `CASES[name]` with the weights that `write_checkpoint` gives it. Returns the Hugging Face config.

    Args:
        kind: type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1 … (32 must divide the widths).
    """
    config = {key: value for key, value in (CASES[name] | changes).items() if value is not None}
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, arch)
    _write_keys(writer, config)
    _write_tokens(writer)
    for key, values in make_tensors(config, seed).items():
        stored = _as_stored(key, values, config, arch)
        if stored.ndim == 1:
            writer.add_tensor(gguf_name(key, arch), stored)
        else:
            type_ = GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(key, arch), quants.quantize(stored, type_), raw_dtype=type_)
    _write_rope(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def gguf_name(key: str, arch: str) -> str:
    stem, _, kind = key.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{(_GEMMA_NAMES if arch == 'gemma3' else _LAYER_NAMES)[inner]}.{kind}"


def _as_stored(key: str, values: NDArray[Any], config: dict[str, Any], arch: str) -> NDArray[Any]:
    if arch == "gemma3" and key.endswith("norm.weight"):
        return values + np.float32(1.0)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(key.split(".")[-2])
    if arch != "llama" or heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _write_keys(writer: GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = head_dim_of(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    default_theta = 1e6 if config["model_type"] == "gemma3_text" else 10000.0
    writer.add_rope_freq_base(config.get("rope_theta", default_theta))
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window") and config["model_type"] != "qwen2":
        writer.add_sliding_window(config["sliding_window"])


def _write_rope(writer: GGUFWriter, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for length in ("long", "short"):
            values = np.array(scaling[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", values)
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))


def llama3_divisors(config: dict[str, Any]) -> NDArray[np.float32]:
    """What each frequency is divided by, as converters compute it."""
    scaling, dim = config["rope_scaling"], head_dim_of(config)
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / dim)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def _write_tokens(writer: GGUFWriter) -> None:
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, "<|bos|>", "<|eos|>", "<|pad|>"])
    writer.add_token_types([1] * len(tokens) + [3, 3, 3])
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
