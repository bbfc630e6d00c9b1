"""Checkpoints behind one interface, whatever their files: what the model is, its weights under Hugging Face names."""

from __future__ import annotations

from typing import Protocol

from noria.backends.base import WeightSource
from noria.files.resolve import ModelFiles
from noria.models.architecture import Architecture
from noria.models.config import ModelConfig
from noria.plan import Float32


class Checkpoint(Protocol):
    """An opened model. Weights are read when they are asked for, one at a time."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def names(self) -> frozenset[str]:
        """Weights as Hugging Face names those of a Llama, without such as any model may ignore."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the weight."""
        ...

    def source(self, name: str) -> WeightSource:
        """A matrix [n, k], as close to its stored form as the schemes know. Rotated rows are in (i, i + d/2) order."""
        ...

    def vector(self, name: str) -> Float32:
        """A norm's weight (1 + w already added where the model wants it) or a bias, float32."""
        ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Opens a model's files and reads what it is.

    Raises:
        UnsupportedModelError: an architecture or a form of quantisation that Noria does not run.
        ModelError: required keys are missing or wrong. WeightsError: a damaged file.
    """
    if files.kind == "gguf":
        from noria.models.loaders.gguf import GGUFCheckpoint

        return GGUFCheckpoint(files.path)
    from noria.models.loaders.hf import HFCheckpoint

    return HFCheckpoint(files.path)
