"""GGUF metadata → ModelConfig, beyond what the tiny checkpoints say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from noria.errors import ModelError, UnsupportedModelError, WeightsError
from noria.files.resolve import resolve
from noria.models.config import ModelConfig, RopeConfig
from noria.models.loaders import open_checkpoint

LEAST = {
    "block_count": 6,
    "context_length": 1024,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def read(folder: Path, arch: str, tensors: dict[str, int] | None = None, **keys: Any) -> ModelConfig:
    """`keys` without the architecture's prefix, dots written as __; `tensors`: name → length of a vector of 1.5."""
    writer = GGUFWriter(folder / "some.gguf", arch)
    named = {key.replace("__", "."): value for key, value in keys.items()}
    for key, value in (LEAST | named).items():
        match value:
            case bool():
                writer.add_bool(f"{arch}.{key}", value)
            case int():
                writer.add_uint32(f"{arch}.{key}", value)
            case float():
                writer.add_float32(f"{arch}.{key}", value)
            case str():
                writer.add_string(f"{arch}.{key}", value)
            case list():
                writer.add_array(f"{arch}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float32))
    for name, length in (tensors or {}).items():
        writer.add_tensor(name, np.full(length, 1.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(resolve(str(folder / "some.gguf"))).config


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, "qwen2")
    assert (config.kv_heads, config.head_dim, config.vocab, config.tied) == (4, 16, 10, True)
    assert config.rope == RopeConfig(10000.0, 16)
    assert config.windows == (0,) * 6


def test_biases_are_seen_in_the_tensors(tmp_path: Path) -> None:
    names = {"blk.0.attn_q.bias": 64, "blk.0.attn_output.bias": 64, "blk.0.ffn_gate.bias": 96, "output.weight": 64}
    config = read(tmp_path, "llama", names)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.tied) == (True, True, True, False)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 256,
                "rope__scaling__yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16.0},
        ),
    ],
)
def test_scalings_by_keys(tmp_path: Path, keys: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert read(tmp_path, "qwen2", **keys).rope.scaling == scaling


def test_scalings_by_tensors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    llama3 = read(tmp_path / "a", "llama", {"rope_freqs.weight": 8}).rope.scaling
    assert llama3 is not None
    assert llama3["rope_type"] == "llama3"
    np.testing.assert_array_equal(llama3["freq_factors"], np.full(8, 1.5))
    both = {"rope_factors_long.weight": 8, "rope_factors_short.weight": 8}
    keys = {"rope__scaling__original_context_length": 128, "rope__scaling__attn_factor": 1.25}
    longrope = read(tmp_path, "phi3", both, **keys).rope.scaling
    assert longrope is not None
    assert (longrope["rope_type"], longrope["attention_factor"]) == ("longrope", 1.25)
    assert longrope["original_max_position_embeddings"] == 128


def test_half_a_longrope(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="rope_factors_long"):
        read(tmp_path, "phi3", {"rope_factors_long.weight": 8})


def test_gemma3(tmp_path: Path) -> None:
    keys = {"attention__sliding_window": 512, "attention__key_length": 32, "attention__value_length": 32}
    config = read(tmp_path, "gemma3", rope__freq_base=1e6, **keys)
    assert config.windows == (512, 512, 512, 512, 512, 0)
    assert config.local_rope == RopeConfig(10000.0, 32)
    assert (config.activation, config.embed_scale, config.attention_scale) == ("gelu_tanh", 8.0, 32**-0.5)


def test_gemma3_27b_scales_by_the_width_per_head(tmp_path: Path) -> None:
    keys = {"attention__sliding_window": 512, "attention__key_length": 32, "attention__value_length": 32}
    assert read(tmp_path, "gemma3", block_count=62, **keys).attention_scale == 16**-0.5


def test_gemma3_scaling_is_not_counted_twice(tmp_path: Path) -> None:
    keys = {"attention__sliding_window": 512, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    scaling = read(tmp_path, "gemma3", **keys).rope.scaling
    assert scaling is not None
    assert scaling["original_max_position_embeddings"] * scaling["factor"] == 1024


def test_a_window_of_the_whole_context_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, "phi3", attention__sliding_window=4096).windows == (0,) * 6


def test_sizes_by_layer_must_agree(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert read(tmp_path / "a", "llama", attention__head_count_kv=[2] * 6).kv_heads == 2
    with pytest.raises(UnsupportedModelError, match=r"llama\.feed_forward_length differs between layers"):
        read(tmp_path, "llama", feed_forward_length=[96] * 5 + [64])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"attention__head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"attention__value_length": 8}, "different width"),
        ({"rope__dimension_count": 8}, "partial rotation is not supported for llama"),
        ({"embedding_length": 0}, "embedding_length must be an integer in 1"),
        ({"context_length": "long"}, "context_length must be an integer"),
    ],
)
def test_what_cannot_run_is_named(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(tmp_path, "llama", **keys)
