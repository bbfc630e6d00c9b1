"""What an architecture file provides, and careful access to the keys that a checkpoint describes itself with.

Knows nothing of files: `Keys` wraps a dictionary that came from a `config.json` or from GGUF metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noria.backends.base import Activation, Graph, RopeTable
from noria.errors import ModelError, UnsupportedModelError
from noria.layers.base import Weights
from noria.models.config import ModelConfig, RopeConfig

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
Builder = Callable[[ModelConfig, Weights, Sequence[RopeTable]], Graph]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of models.

    Attributes:
        name: key of the registry and name in GGUF files (`general.architecture`).
        classes: Hugging Face class names (`architectures` in config.json).
        model_types: Hugging Face `model_type`s.
        read_config: config.json → ModelConfig.
        build: describes the forward pass. Takes one rope table per layer.
        refine_gguf: adjusts what the GGUF loader read from the common keys, given the metadata under this name.
        norm_offset: added to the norm weights of a Hugging Face checkpoint (1 where the model computes 1 + w;
            GGUF files hold the sum already).
        paired_rope: GGUF files hold q and k rows in the order of rotated pairs (i, i + 1).
    """

    name: str
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    read_config: Callable[[Keys], ModelConfig]
    build: Builder
    refine_gguf: Callable[[ModelConfig, Keys], ModelConfig] = lambda config, keys: config
    norm_offset: float = 0.0
    paired_rope: bool = False


class Keys:
    """Checked access to a checkpoint's keys. A null counts as absent.

    Args:
        values: the dictionary.
        where: for messages: the file, or "config.json".
        prefix: put before every key.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is, or `default`."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def require(self, *keys: str) -> None:
        """Raises a ModelError that names every one of `keys` that is missing."""
        missing = [self.prefix + key for key in keys if self.get(key) is None]
        if missing:
            raise ModelError(f"{self.where} lacks the required {_plural('key', missing)} {', '.join(missing)}")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"must be an integer in {low}…{high}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "must be a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false", value)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """A nested dictionary; empty if absent."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "must be an object", value)
        return dict(value)

    def wrong(self, key: str, must: str, value: Any) -> ModelError:
        text = repr(value)
        return ModelError(f"{self.where}: {self.prefix}{key} {must}, is {text if len(text) < 80 else text[:77] + '…'}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            self.require(key)
        return value


def decoder_config(
    keys: Keys,
    architecture: str,
    *,
    head_dim: int | None = None,
    max_position: int = 2048,
    norm_eps: float = 1e-6,
    tied: bool = False,
    vocab: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    rope: RopeConfig | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
) -> ModelConfig:
    """What all decoders' config.json have in common. Further arguments: what holds where a key is absent.

    `rope`: given where the architecture reads it in a way of its own.
    """
    keys.require("hidden_size", "num_hidden_layers", "intermediate_size")
    keys.require(*(["num_attention_heads"] if heads is None else []), *(["vocab_size"] if vocab is None else []))
    hidden = keys.integer("hidden_size")
    layers = keys.integer("num_hidden_layers", high=1024)
    heads = keys.integer("num_attention_heads", heads, high=1024)
    kv_heads = keys.integer("num_key_value_heads", kv_heads or heads, high=1024)
    if heads % kv_heads:
        raise ModelError(f"{keys.where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    head_dim = keys.integer("head_dim", head_dim or hidden // heads, high=4096)
    max_position = keys.integer("max_position_embeddings", max_position)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=keys.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=keys.integer("vocab_size", vocab),
        norm_eps=keys.number("rms_norm_eps", norm_eps),
        rope=rope or rope_config(keys, keys_rope(keys), head_dim),
        max_position=max_position,
        attention_scale=head_dim**-0.5,
        windows=(0,) * layers,
        activation=_activation(keys, activation_key, activation),
        tied=keys.flag("tie_word_embeddings", tied),
    )


def _activation(keys: Keys, key: str, default: str) -> Activation:
    name = keys.get(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{keys.where}: {key} {name!r} is not supported; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def keys_rope(keys: Keys) -> dict[str, Any]:
    """The dictionary of RoPE parameters under its old or its new name; empty if there is none."""
    return keys.mapping("rope_scaling") or keys.mapping("rope_parameters")


def rope_config(keys: Keys, params: Mapping[str, Any], head_dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """RoPE as config.json states it: `rope_theta` and friends at the top level or among `params`."""
    inner = Keys(params, f"{keys.where}: rope parameters")
    theta = inner.number("rope_theta", keys.number("rope_theta", default_theta))
    share = inner.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if share > 1.0:
        raise ModelError(f"{keys.where}: partial_rotary_factor must be at most 1, is {share:g}")
    kind = str(inner.get("rope_type") or inner.get("type") or "default")
    scaling: dict[str, Any] | None = None
    if kind != "default":
        scaling = {**params, "rope_type": {"su": "longrope"}.get(kind, kind)}
        if (original := keys.get("original_max_position_embeddings")) is not None:
            scaling["original_max_position_embeddings"] = original
    return RopeConfig(theta, int(head_dim * share), scaling)


def layer_windows(keys: Keys, layers: int, window: int, is_local: Callable[[int], bool]) -> tuple[int, ...]:
    """[layers] sliding windows: from `layer_types` if the checkpoint lists them, else by the architecture's rule."""
    kinds = keys.get("layer_types")
    if kinds is None:
        return tuple(window if is_local(layer) else 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.wrong("layer_types", f"must list {layers} layers", kinds)
    if unknown := set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise keys.wrong("layer_types", "must be full_attention or sliding_attention", sorted(unknown))
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _plural(word: str, items: Sequence[str]) -> str:
    return word if len(items) == 1 else word + "s"
