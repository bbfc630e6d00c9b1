"""Tiny random checkpoints of every architecture, as Hugging Face lays them out, with a small byte-level tokeniser.

`write_checkpoint(name, folder)` writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
generation_config.json; `CASES` maps names to their config.json. Widths are no multiples of 64, so that kernels meet
their tails; windows are shorter than the prompts of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = dict[str, NDArray[Any]]

VOCAB = 320
BOS, EOS, PAD = 317, 318, 319
_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}


def _config(kind: str, class_name: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [class_name], "model_type": kind, **_COMMON, **keys}


def _llama(**keys: Any) -> dict[str, Any]:
    return _config("llama", "LlamaForCausalLM", rms_norm_eps=1e-5, **keys)


def _phi3(**keys: Any) -> dict[str, Any]:
    return _config("phi3", "Phi3ForCausalLM", rms_norm_eps=1e-5, **keys)


def _gemma3(**keys: Any) -> dict[str, Any]:
    keys = {"head_dim": 32, "sliding_window": 20, "tie_word_embeddings": True, "query_pre_attn_scalar": 24, **keys}
    return _config("gemma3_text", "Gemma3ForCausalLM", **keys)


CASES: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "llama_tied": _llama(tie_word_embeddings=True, head_dim=32, rope_theta=100000.0),
    "llama_biases": _llama(attention_bias=True, mlp_bias=True, num_key_value_heads=6),
    "llama_linear": _llama(rope_scaling={"type": "linear", "factor": 4.0}),
    "llama_dynamic": _llama(rope_scaling={"type": "dynamic", "factor": 2.0}),
    "llama_llama3": _llama(
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama_yarn": _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        }
    ),
    "mistral": _config("mistral", "MistralForCausalLM", sliding_window=16, head_dim=32),
    "qwen2": _config("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2_window": _config(
        "qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM", head_dim=32, rope_theta=1000000.0),
    "gemma3": _gemma3(num_hidden_layers=7, num_key_value_heads=1, num_attention_heads=4),
    "gemma3_linear": _gemma3(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        final_logit_softcapping=10.0,
    ),
    "phi3": _phi3(sliding_window=30),
    "phi3_longrope": _phi3(
        head_dim=None,
        num_attention_heads=3,
        num_key_value_heads=3,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0 + 0.05 * i for i in range(12)],
            "long_factor": [1.5 + 0.5 * i for i in range(12)],
        },
    ),
}


def write_checkpoint(name: str, folder: Path, seed: int = 0, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    """Writes a checkpoint and returns its config.

    Args:
        name: one of `CASES`. changes: keys of config.json to replace.
        dtype: float32, float16 or bfloat16, of the stored weights.
    """
    config = {key: value for key, value in (CASES[name] | changes).items() if value is not None}
    config["dtype"] = dtype
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: values.astype(_DTYPES[dtype]) for key, values in make_tensors(config, seed).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS], "pad_token_id": PAD}
    for file, values in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (folder / file).write_text(json.dumps(values, indent=1), encoding="utf-8")
    return config


def head_dim_of(config: dict[str, Any]) -> int:
    default = {"qwen3": 128, "gemma3_text": 256}.get(config["model_type"])
    return int(config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"])


def make_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random float32 weights, of a size that keeps activations near 1 and attention uneven."""
    rng = np.random.default_rng(seed)
    kind, hidden, head_dim = config["model_type"], config["hidden_size"], head_dim_of(config)

    def matrix(n: int, k: int, size: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((n, k)) * (size / k**0.5)).astype(np.float32)

    def vector(width: int, size: float = 0.2) -> NDArray[np.float32]:
        return (rng.standard_normal(width) * size).astype(np.float32)

    def norm_weight(width: int) -> NDArray[np.float32]:
        return vector(width) if kind == "gemma3_text" else vector(width) + np.float32(1.0)

    # A large tied table would make every token predict itself.
    table_size = 3.0 if not config["tie_word_embeddings"] else 0.3 if kind == "gemma3_text" else 1.0
    tensors: Tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, table_size)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for key, (n, k) in _products(config, head_dim).items():
            tensors[f"{at}{key}.weight"] = matrix(n, k, 1.5 if "q_proj" in key or "k_proj" in key else 1.0)
            if _has_bias(config, key):
                tensors[f"{at}{key}.bias"] = vector(n)
        for key in _norms(kind):
            tensors[f"{at}{key}.weight"] = norm_weight(head_dim if "self_attn" in key else hidden)
    tensors["model.norm.weight"] = norm_weight(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, 3.0)
    return tensors


def _products(config: dict[str, Any], head_dim: int) -> dict[str, tuple[int, int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    ends = {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, inner)}
    if config["model_type"] == "phi3":
        return {"self_attn.qkv_proj": (q + 2 * kv, hidden), "mlp.gate_up_proj": (2 * inner, hidden), **ends}
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        **ends,
    }


def _has_bias(config: dict[str, Any], key: str) -> bool:
    if key.startswith("mlp."):
        return bool(config.get("mlp_bias"))
    if config["model_type"] == "qwen2":
        return not key.endswith("o_proj")
    return bool(config.get("attention_bias"))


def _norms(kind: str) -> tuple[str, ...]:
    around = ("input_layernorm", "post_attention_layernorm")
    if kind == "gemma3_text":
        around += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return around + (("self_attn.q_norm", "self_attn.k_norm") if kind in ("qwen3", "gemma3_text") else ())


# ------------------------------------------------------------------------------------------------ tokeniser

_WORDS = (  # noqa: SIM905
    "the and ing tion er re on at en or es is it an in to of he th ou al ar st nd ll ve le as me se de ro li ri"
    " ha wa be no so we do my by if go us am up"
).split()


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each of the 256 bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """[317] texts of the ordinary tokens, and the merges that make those beyond the 256 bytes."""
    tokens, merges = byte_letters(), []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens and len(tokens) < BOS:
                tokens.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    filler = iter(f"{a}{b}" for a in "QXZVJ" for b in "QXZVJKWY")
    while len(tokens) < BOS:
        pair = next(filler)
        tokens.append(pair)
        merges.append((pair[0], pair[1]))
    return tokens, merges


def tokenizer() -> dict[str, Any]:
    """A tokenizer.json: byte-level BPE with three control tokens."""
    tokens, merges = vocabulary()
    special = [(BOS, "<|bos|>"), (EOS, "<|eos|>"), (PAD, "<|pad|>")]
    added = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in special
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: index for index, text in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """With a chat template in the manner of ChatML, over plain text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "model_max_length": 512,
        "chat_template": (
            "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        ),
    }
