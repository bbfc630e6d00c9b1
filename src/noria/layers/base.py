"""What the layer helpers ask of a model: its sizes, and a place where weights come from.

Knows nothing of files or of how weights are packed. `ModelConfig` satisfies `DecoderConfig` by its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from noria.backends.base import Activation, Table, Weight
from noria.plan import Float32


class DecoderConfig(Protocol):
    """Sizes and constants of a decoder; meanings as in `noria.models.config.ModelConfig`."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def attention_scale(self) -> float: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def tied(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def output_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def embed_scale(self) -> float: ...
    @property
    def attention_softcap(self) -> float: ...
    @property
    def logit_softcap(self) -> float: ...


class Weights(Protocol):
    """Where a graph takes its weights from. Every call states the shape that it needs, so that one description of an
    architecture both checks a checkpoint and loads it."""

    def matrix(self, name: str, n: int, k: int) -> Weight:
        """The product's weight [n, k], packed."""
        ...

    def split(self, name: str, ns: Sequence[int], k: int) -> tuple[Weight, ...]:
        """A fused weight [sum of ns, k] cut along its rows, each part packed."""
        ...

    def vector(self, name: str, width: int) -> Float32:
        """A norm's weight or a bias, float32 [width]."""
        ...

    def table(self, name: str, vocab: int, width: int) -> Table:
        """An embedding table [vocab, width]."""
        ...
