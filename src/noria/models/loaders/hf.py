"""Safetensors directories as Hugging Face lays them out: `config.json` and weights under the names of transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.backends.base import DenseSource
from noria.errors import UnsupportedModelError
from noria.files.safetensors import SafetensorsCheckpoint
from noria.models.architecture import Keys
from noria.models.registry import architecture_of_class
from noria.plan import Float32

# A multimodal checkpoint keeps its language model under a prefix of its own.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_IGNORED_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class HFCheckpoint:
    """See `noria.models.loaders.Checkpoint`.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self._file = SafetensorsCheckpoint(path)
        keys = Keys(self._file.config, str(path / "config.json"))
        if (quantised := keys.mapping("quantization_config")) != {}:
            method = quantised.get("quant_method", "unknown")
            raise UnsupportedModelError(f"{path}: weights quantised by {method!r} are not supported; take the original")
        self.architecture = architecture_of_class(keys)
        self._stored = {_canonical(name): name for name in self._file.names if not _ignored(name)}
        self.config = replace(self.architecture.read_config(keys), stored_dtype=self._main_type())
        if self.config.tied:
            self._stored.pop("lm_head.weight", None)  # a copy of the embedding table
        self.names = frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._stored[name])

    def source(self, name: str) -> DenseSource:
        return DenseSource(self._floats(name))

    def vector(self, name: str) -> Float32:
        values = np.asarray(self._floats(name), np.float32)
        if name.endswith("norm.weight") and self.architecture.norm_offset:
            values = values + np.float32(self.architecture.norm_offset)
        return np.ascontiguousarray(values)

    def _floats(self, name: str) -> NDArray[Any]:
        stored = self._stored[name]
        if (dtype := self._file.dtype(stored)) not in _FLOATS:
            raise UnsupportedModelError(f"{stored} is stored as {dtype}; supported: {', '.join(_FLOATS)}")
        return self._file.array(stored)

    def _main_type(self) -> str:
        counts: Counter[str] = Counter()
        for stored in self._stored.values():
            counts[self._file.dtype(stored)] += prod(self._file.shape(stored))
        return _FLOATS.get(counts.most_common(1)[0][0], "bf16") if counts else "bf16"


def _canonical(name: str) -> str:
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name


def _ignored(name: str) -> bool:
    return name.startswith(_IGNORED_PREFIXES) or name.endswith(_IGNORED_SUFFIXES)
