"""config.json → ModelConfig: defaults as Hugging Face has them, errors that name keys."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tiny_models import CASES
from noria.errors import ModelError, UnsupportedModelError
from noria.models.architecture import Keys
from noria.models.config import ModelConfig, RopeConfig
from noria.models.registry import architecture_of_class

LEAST = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def read(values: dict[str, Any]) -> ModelConfig:
    keys = Keys(values, "config.json")
    return architecture_of_class(keys).read_config(keys)


def test_defaults_of_a_llama() -> None:
    config = read(LEAST)
    assert (config.kv_heads, config.head_dim, config.max_position) == (4, 16, 2048)
    assert (config.norm_eps, config.rope, config.tied) == (1e-6, RopeConfig(10000.0, 16), False)
    assert config.windows == (0, 0, 0, 0)
    assert config.attention_scale == 0.25


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_required_keys_are_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"config.json lacks the required key {key}"):
        read(
            {name: value for name, value in LEAST.items() if name != key} | ({key: None} if key == "vocab_size" else {})
        )


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(ModelError, match="keys hidden_size, intermediate_size"):
        read({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("num_hidden_layers", 10**6),
        ("num_attention_heads", True),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", -1),
        ("attention_bias", "yes"),
        ("rope_scaling", "linear"),
    ],
)
def test_wrong_values_are_named(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        read(LEAST | {key: value})


def test_other_activations_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_act 'relu2' is not supported; silu"):
        read(LEAST | {"hidden_act": "relu2"})
    with pytest.raises(UnsupportedModelError, match="hidden_act"):
        read(LEAST | {"hidden_act": ["silu"]})


def test_heads_must_share_evenly() -> None:
    with pytest.raises(ModelError, match="4 attention heads cannot share 3"):
        read(LEAST | {"num_key_value_heads": 3})


def test_unknown_architecture_lists_what_runs() -> None:
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM .*LlamaForCausalLM.*Phi3ForCausalLM"):
        read(LEAST | {"architectures": ["MambaForCausalLM"]})


def test_model_type_where_no_class_is_named() -> None:
    assert read({**LEAST, "architectures": None, "model_type": "qwen2"}).architecture == "qwen2"


@pytest.mark.parametrize(("given", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 7}, 7)])
def test_mistral_window(given: dict[str, Any], window: int) -> None:
    values = LEAST | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
    assert read(values | given).windows == (window,) * 4


def test_qwen2_windows_begin_at_a_layer_and_only_if_asked() -> None:
    values = LEAST | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 3}
    assert read(values).windows == (0, 0, 0, 0)
    assert read(values | {"use_sliding_window": True}).windows == (0, 0, 0, 32)
    assert read(values | {"use_sliding_window": True, "sliding_window": None}).windows == (0, 0, 0, 0)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(values | {"use_sliding_window": True, "layer_types": kinds}).windows == (32, 0, 32, 0)
    with pytest.raises(ModelError, match="layer_types must list 4 layers"):
        read(values | {"use_sliding_window": True, "layer_types": kinds[:3]})


def test_qwen2_has_biases_on_qkv_alone() -> None:
    config = read(LEAST | {"architectures": ["Qwen2ForCausalLM"]})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_gemma3_4b_as_the_hub_has_it() -> None:
    """Of a multimodal checkpoint's text part most keys are left to their defaults."""
    config = read(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (8, 4, 256, 262208)
    assert config.windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert config.rope.theta == 1e6
    assert config.rope.scaling is not None
    assert config.rope.scaling["factor"] == 8.0
    assert config.local_rope == RopeConfig(10000.0, 256)
    assert config.tied
    assert config.embed_scale == 2560**0.5
    assert config.attention_scale == 1 / 16


def test_gemma3_nested_rope_parameters() -> None:
    values = CASES["gemma3"] | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    config = read(values)
    assert config.rope.theta == 5e5
    assert config.local_rope == RopeConfig(2e4, 32)


def test_scaling_under_either_name_and_either_type_key() -> None:
    old = read(LEAST | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    new = read(LEAST | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}).rope
    assert old.theta == new.theta == 5e5
    assert old.scaling is not None
    assert new.scaling is not None
    assert old.scaling["rope_type"] == new.scaling["rope_type"] == "linear"
    assert read(LEAST | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).rope == RopeConfig(7.0, 16)


def test_phi3_partial_rotation_and_its_names_for_longrope() -> None:
    for kind in ("su", "longrope", "yarn"):
        values = dict(CASES["phi3_longrope"])
        values["rope_scaling"] = values["rope_scaling"] | {"type": kind}
        rope = read(values).rope
        assert rope.rotary_dim == 24
        assert rope.scaling is not None
        assert rope.scaling["rope_type"] == "longrope"
        assert rope.scaling["original_max_position_embeddings"] == 32


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_read(name: str) -> None:
    config = read(CASES[name])
    assert config.layers == len(config.windows) == CASES[name]["num_hidden_layers"]
