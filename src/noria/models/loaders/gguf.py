"""GGUF files: metadata → ModelConfig, tensor names → Hugging Face names, rows of q and k back in their place.

Key and tensor names: docs/gguf.md of the ggml project.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from noria.backends.base import DenseSource, GroupedSource, WeightSource
from noria.errors import ModelError, UnsupportedModelError, WeightsError
from noria.files.blocks import dequantise, grouped
from noria.files.gguf import open_gguf
from noria.models.architecture import Keys
from noria.models.config import ModelConfig, RopeConfig
from noria.models.registry import architecture_of_gguf
from noria.plan import Float32

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN_NAMES = {  # where an architecture uses a name for something else
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_IGNORED_SUFFIXES = (".attn_rot_embd.weight",)
_FLOATS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class GGUFCheckpoint:
    """See `noria.models.loaders.Checkpoint`.

    Args:
        path: the file (the first, if the model is split).
    """

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self.architecture = architecture_of_gguf(self._file.metadata.get("general.architecture"), str(path))
        keys = Keys(self._file.metadata, str(path), self.architecture.name + ".")
        self.config = self.architecture.refine_gguf(self._read_config(keys), keys)
        self._stored = {
            _canonical(name, self.architecture.name): name
            for name in self._file.tensors
            if name not in _ROPE_TENSORS and not name.endswith(_IGNORED_SUFFIXES)
        }
        self.names = frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def source(self, name: str) -> WeightSource:
        tensor = self._file.tensors[self._stored[name]]
        raw, shape = self._rows(name, tensor.shape), tensor.shape
        if tensor.type in _FLOATS:
            return DenseSource(raw.view(_FLOATS[tensor.type]).reshape(shape))
        if (held := grouped(tensor.type, raw, shape)) is not None:
            return GroupedSource(held.bits, held.codes, held.scales, held.minimums, held.group)
        return DenseSource(dequantise(tensor.type, raw, shape))

    def vector(self, name: str) -> Float32:
        tensor = self._file.tensors[self._stored[name]]
        return dequantise(tensor.type, self._rows(name, tensor.shape), tensor.shape)

    def _rows(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Stored bytes; rows that were put in the order of rotated pairs (i, i + 1) back in order (i, i + d/2)."""
        raw = self._file.raw(self._stored[name])
        if not self.architecture.paired_rope or ".self_attn." not in name:
            return raw
        heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}.get(name.split(".")[-2])
        if heads is None:
            return raw
        order = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        rows: NDArray[np.uint8] = raw.reshape(shape[0], -1)[order]
        return rows.reshape(-1)

    def _read_config(self, keys: Keys) -> ModelConfig:
        keys.require(
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "attention.layer_norm_rms_epsilon",
        )
        tensors = self._file.tensors
        if "token_embd.weight" not in tensors:
            raise WeightsError(f"{keys.where} lacks the weight token_embd.weight")
        hidden, layers = keys.integer("embedding_length"), keys.integer("block_count", high=1024)
        heads = _same_everywhere(keys, "attention.head_count", None)
        kv_heads = _same_everywhere(keys, "attention.head_count_kv", heads)
        if heads % kv_heads:
            raise ModelError(f"{keys.where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
        head_dim = keys.integer("attention.key_length", hidden // heads, high=4096)
        if keys.integer("attention.value_length", head_dim, high=4096) != head_dim:
            raise UnsupportedModelError(f"{keys.where}: keys and values of different width are not supported")
        window = keys.integer("attention.sliding_window", 0, low=0)
        max_position = keys.integer("context_length")
        return ModelConfig(
            architecture=self.architecture.name,
            layers=layers,
            hidden=hidden,
            intermediate=_same_everywhere(keys, "feed_forward_length", None),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=tensors["token_embd.weight"].shape[0],
            norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(keys, head_dim, max_position),
            max_position=max_position,
            attention_scale=head_dim**-0.5,
            windows=(window if window < max_position else 0,) * layers,
            tied="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            stored_dtype=self._main_type(),
        )

    def _rope(self, keys: Keys, head_dim: int, max_position: int) -> RopeConfig:
        dim = keys.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
        if self.architecture.paired_rope and dim != head_dim:
            raise UnsupportedModelError(f"{keys.where}: partial rotation is not supported for {self.architecture.name}")
        theta = keys.number("rope.freq_base", 10000.0)
        return RopeConfig(theta, dim, self._tensor_scaling(keys, max_position) or _key_scaling(keys))

    def _tensor_scaling(self, keys: Keys, max_position: int) -> dict[str, Any] | None:
        """Scalings whose divisors are stored as tensors: those of Llama 3 and LongRoPE."""
        held = {name: self._float_tensor(name) for name in _ROPE_TENSORS if name in self._file.tensors}
        if "rope_freqs.weight" in held:
            return {"rope_type": "llama3", "freq_factors": held["rope_freqs.weight"]}
        if not held:
            return None
        if len(held) != 2:
            raise WeightsError(f"{keys.where} has {next(iter(held))}, but not its counterpart")
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": held["rope_factors_long.weight"],
            "short_factor": held["rope_factors_short.weight"],
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", max_position),
        }
        if keys.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
        return scaling

    def _float_tensor(self, name: str) -> Float32:
        tensor = self._file.tensors[name]
        return dequantise(tensor.type, self._file.raw(name), tensor.shape)

    def _main_type(self) -> str:
        bytes_of: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
                bytes_of[tensor.type] += tensor.nbytes
        kind = bytes_of.most_common(1)[0][0] if bytes_of else "F32"
        return kind.lower() if kind in _FLOATS else kind


def _key_scaling(keys: Keys) -> dict[str, Any] | None:
    """Scalings that are stated by keys alone: linear and YaRN."""
    kind = keys.get("rope.scaling.type")
    if kind is None:
        factor = keys.get("rope.scale_linear")  # what files said before there were types
        return None if factor in (None, 1.0) else {"rope_type": "linear", "factor": keys.number("rope.scale_linear")}
    if kind == "none" or keys.get("rope.scaling.factor") in (None, 0.0):
        return None
    scaling: dict[str, Any] = {"rope_type": str(kind), "factor": keys.number("rope.scaling.factor")}
    if (original := keys.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.get(f"rope.scaling.{theirs}") is not None:
            scaling[ours] = keys.number(f"rope.scaling.{theirs}")
    return scaling


def _same_everywhere(keys: Keys, key: str, default: int | None) -> int:
    """An integer that a file may also state layer by layer."""
    value = keys.get(key)
    if not isinstance(value, (list, np.ndarray)):
        return keys.integer(key, default)
    values = {int(item) for item in value}
    if len(values) != 1:
        raise UnsupportedModelError(f"{keys.where}: {keys.prefix}{key} differs between layers, which is not supported")
    return Keys({key: values.pop()}, keys.where).integer(key)


def _canonical(name: str, architecture: str) -> str:
    """The Hugging Face name; a name that is not known stays as it is, and will be reported as superfluous."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    stem = _OWN_NAMES.get(architecture, {}).get(stem) or _NAMES.get(stem, "")
    at_top = stem.startswith(("model.", "lm_head"))
    if not stem or at_top == (layer is not None):
        return name
    return f"{stem}.{kind}" if at_top else f"model.layers.{layer}.{stem}.{kind}"
