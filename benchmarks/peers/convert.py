"""A model that Noria can open, written the way Hugging Face lays models out, for engines that read nothing else.

Weights are dequantised, so every engine starts from the same values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from noria.errors import NoriaError
from noria.files.generation import load_generation_defaults
from noria.files.gguf import open_gguf
from noria.files.resolve import ModelFiles
from noria.frontend.tokenizer import Tokenizer, load_tokenizer
from noria.models.config import ModelConfig
from noria.models.loaders import Checkpoint, open_checkpoint
from noria.quantize.schemes import dequantise_source
from peers.base import Place, Unavailable

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def hf_folder(place: Place) -> Path:
    """The model as a directory of safetensors, converted if need be. Raises Unavailable."""
    if place.files.kind == "safetensors" and place.files.path.is_dir():
        return place.files.path
    target = place.folder("models") / f"{place.files.path.stem}-bf16"
    if not (target / "config.json").exists():
        try:
            convert(place.files, target)
        except NoriaError as error:
            raise Unavailable(f"the model cannot be converted: {error}") from error
    return target


def convert(files: ModelFiles, target: Path, dtype: str = "bfloat16") -> None:
    """Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        target: the directory; it is there when everything is in it.
        dtype: bfloat16 or float32.

    Raises:
        Unavailable: an architecture whose config.json this does not know how to write.
        NoriaError: the model cannot be read.
    """
    checkpoint = open_checkpoint(files)
    tokenizer = load_tokenizer(files)
    config = config_json(checkpoint.config, dtype)
    ends = load_generation_defaults(files).end_token_ids
    generation: dict[str, Any] = {"eos_token_id": list(ends), "do_sample": False}
    if tokenizer.bos_id is not None:
        config["bos_token_id"] = generation["bos_token_id"] = tokenizer.bos_id
    if ends:
        config["eos_token_id"] = ends[0]
        generation["pad_token_id"] = ends[0]
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(_tensors(checkpoint, _DTYPES[dtype]), part / "model.safetensors", metadata={"format": "pt"})
    (part / "tokenizer.json").write_text(tokenizer.raw.to_str(), encoding="utf-8")
    for name, values in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", _tokenizer_config(files, tokenizer, checkpoint.config.max_position)),
    ):
        (part / name).write_text(json.dumps(values, indent=1), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a plain decoder. Raises Unavailable for what it could not say."""
    if config.architecture not in CLASSES or any(config.windows) or config.rope.scaling:
        raise Unavailable(f"no config.json is written for this {config.architecture} (windows or RoPE scaling)")
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,  # where transformers 4 looks for it; 5 looks among the parameters
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias and config.architecture != "qwen2",
        "mlp_bias": config.mlp_bias,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _tensors(checkpoint: Checkpoint, dtype: Any) -> dict[str, NDArray[Any]]:
    tensors = {}
    for name in sorted(checkpoint.names):
        if len(checkpoint.shape(name)) == 1:
            values = checkpoint.vector(name)
        else:
            values = dequantise_source(checkpoint.source(name))
        tensors[name] = np.ascontiguousarray(values.astype(dtype))
    return tensors


def _tokenizer_config(files: ModelFiles, tokenizer: Tokenizer, longest: int) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    config |= {"clean_up_tokenization_spaces": False, **tokenizer.names}
    template = open_gguf(files.path).metadata.get("tokenizer.chat_template") if files.kind == "gguf" else None
    if isinstance(template, str):
        config["chat_template"] = template
    if "eos_token" in config:
        config.setdefault("pad_token", config["eos_token"])
    return config
