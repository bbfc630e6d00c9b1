"""Sampling defaults and end tokens that come with a model.

From `generation_config.json`, `config.json` and the tokeniser's own files; from a GGUF's metadata otherwise; for models
with a short name also from the catalogue, which a GGUF cannot carry. Values
that make no sense are an error that names file and key, not something to sample with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noria.errors import WeightsError
from noria.files.catalog import KNOWN
from noria.files.gguf import open_gguf
from noria.files.resolve import ModelFiles
from noria.files.safetensors import read_json
from noria.params import MIN_REPETITION_PENALTY

MAX_END_TOKENS = 64
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Texts that end a turn or a document in the field's formats, taken as end tokens if a GGUF has them as control tokens
# but its metadata does not name them (older converters did not).
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
)
_CONTROL = 3


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers advise; None where they say nothing (`do_sample` is not advice but a switch of theirs).

    `end_token_ids`: any of them ends an answer; in the order in which the files name them.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    end_token_ids: tuple[int, ...] = ()


def load_generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """Reads a model's defaults.

    Raises:
        WeightsError: a file is damaged or a value is out of range; names file and key.
    """
    path = files.folder / "generation_config.json"
    own = files.kind == "safetensors" or len(list(files.folder.glob("*.gguf"))) == len(files.weight_files)
    known = KNOWN.get(files.name)
    values = {**(known.sampling if known else {}), **(read_json(path) if own and path.is_file() else {})}
    ends = (*_ids(values.get("eos_token_id"), path), *end_token_ids(files))
    return GenerationDefaults(
        temperature=_number(values, "temperature", 0.0, 100.0, path),
        top_p=_number(values, "top_p", 0.0, 1.0, path, open_low=True),
        top_k=_whole(values, "top_k", path),
        min_p=_number(values, "min_p", 0.0, 1.0, path),
        repetition_penalty=_number(values, "repetition_penalty", MIN_REPETITION_PENALTY, 100.0, path),
        end_token_ids=tuple(dict.fromkeys(ends))[:MAX_END_TOKENS],
    )


def end_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """End tokens that a model's own files name, `generation_config.json` aside.

    Raises:
        WeightsError: a file is damaged or names what is no token id.
    """
    ends = _gguf_ends(files.path) if files.kind == "gguf" else _config_ends(files.folder)
    return tuple(dict.fromkeys(ends))[:MAX_END_TOKENS]


def _gguf_ends(path: Path) -> list[int]:
    values = open_gguf(path).metadata
    ends = [values[f"tokenizer.ggml.{key}"] for key in _GGUF_END_KEYS if f"tokenizer.ggml.{key}" in values]
    tokens, types = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and types is not None and len(types) == len(tokens):
        control = {tokens[i]: int(i) for i in (np.asarray(types) == _CONTROL).nonzero()[0]}
        ends += [control[text] for text in _END_TEXTS if text in control]
    return _ids(ends, path)


def _config_ends(folder: Path) -> list[int]:
    ends: list[int] = []
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
        for part in (config, config.get("text_config")):
            if isinstance(part, Mapping):
                ends += _ids(part.get("eos_token_id"), path)
    path = folder / "tokenizer_config.json"
    if path.is_file():
        config = read_json(path)
        eos, added = config.get("eos_token"), config.get("added_tokens_decoder")
        text = eos.get("content") if isinstance(eos, Mapping) else eos
        if isinstance(added, Mapping):
            ends += [
                int(i) for i, t in added.items() if isinstance(t, Mapping) and t.get("content") == text and i.isdigit()
            ]
    return ends


def _ids(value: Any, path: Path) -> list[int]:
    if value is None:
        return []
    ids = list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not -1 <= i < 2**31:
            raise WeightsError(f"{path}: eos_token_id: {i!r} is no token id")
    return [i for i in ids if i >= 0]


def _number(
    values: Mapping[str, Any], key: str, low: float, high: float, path: Path, open_low: bool = False
) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (open_low and value == low):
        raise WeightsError(f"{path}: {key}: must be {'above' if open_low else 'in'} {low:g}…{high:g}, is {value!r}")
    return float(value)


def _whole(values: Mapping[str, Any], key: str, path: Path) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 2**31:
        raise WeightsError(f"{path}: {key}: must be a whole number from -1, is {value!r}")
    return value
