"""Which architectures run, and how a checkpoint becomes a model.

Owns the list of architectures. A new one is a file beside this one, and an entry in `ARCHITECTURES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noria.backends.base import Backend, Graph, RopeTable
from noria.config import ModelOptions
from noria.errors import ConfigError, UnsupportedModelError
from noria.layers.rope import covered_length, rope_table
from noria.models import gemma3, llama, phi3, qwen2, qwen3
from noria.models.architecture import Architecture, Keys
from noria.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from noria.models.loaders import Checkpoint

ARCHITECTURES: tuple[Architecture, ...] = (
    llama.ARCHITECTURE,
    qwen2.ARCHITECTURE,
    qwen3.ARCHITECTURE,
    gemma3.ARCHITECTURE,
    phi3.ARCHITECTURE,
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to be compiled.

    Attributes:
        schemes: how weights are held, for people: "int4/32 + int8/64".
        weight_bytes: of packed weights, tables and norms.
        max_model_len: the context that rotations are fixed from.
    """

    config: ModelConfig
    graph: Graph
    schemes: str
    weight_bytes: int
    max_model_len: int


def architecture_of_class(keys: Keys) -> Architecture:
    """The architecture of a config.json: by class name, else by `model_type`.

    Raises:
        UnsupportedModelError: neither is known; lists what runs.
    """
    classes = keys.get("architectures", [])
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    kind = keys.get("model_type")
    for architecture in ARCHITECTURES:
        if names and names[0] in architecture.classes:
            return architecture
        if not names and kind in architecture.model_types:
            return architecture
    what = names[0] if names else f"model_type {kind!r}"
    runs = ", ".join(name for architecture in ARCHITECTURES for name in architecture.classes)
    raise UnsupportedModelError(f"{keys.where}: {what} is not supported; supported: {runs}")


def architecture_of_gguf(name: Any, where: str) -> Architecture:
    """The architecture of a GGUF file by its `general.architecture`.

    Raises:
        UnsupportedModelError: it is not known; lists what runs.
    """
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    runs = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise UnsupportedModelError(f"{where}: architecture {name!r} is not supported; supported: {runs}")


def resolve_max_model_len(config: ModelConfig, asked: int | None) -> int:
    """The longest context to be served: what was asked for, else what the model was made for.

    A scaling that states the length it starts from says what the model was made for; one that does not (linear,
    dynamic) is used beyond `max_position` only when asked.

    Raises:
        ConfigError: more than the checkpoint covers.
    """
    scaling = config.rope.scaling
    covered = covered_length(scaling, config.max_position)
    if asked is None:
        stated = scaling is not None and scaling.get("original_max_position_embeddings") is not None
        return covered if stated else config.max_position
    if asked > covered:
        how = f"with its RoPE scaling ({scaling['rope_type']})" if scaling else "and has no RoPE scaling"
        raise ConfigError(f"{asked} exceeds the {covered} tokens that the model covers {how}", "--max-model-len")
    if asked < 1:
        raise ConfigError(f"must be at least 1, got {asked}", "--max-model-len")
    return asked


def build_model(
    checkpoint: Checkpoint, backend: Backend, options: ModelOptions, max_model_len: int, positions: int | None = None
) -> Model:
    """Checks a checkpoint against its architecture, then packs its weights into a graph.

    Args:
        max_model_len: what `resolve_max_model_len` gave: rotations are fixed from it.
        positions: how many of them are tabulated (None: all), where memory cannot hold a longer context anyway.

    Raises:
        WeightsError: weights are missing, superfluous or of the wrong shape (before anything is packed).
    """
    from noria.models.weights import Inventory, PackedWeights

    config = checkpoint.config
    build = checkpoint.architecture.build
    inventory = Inventory()
    build(config, inventory, layer_ropes(config, max_model_len, 0))
    inventory.compare(checkpoint)
    ropes = layer_ropes(config, max_model_len, max_model_len if positions is None else min(positions, max_model_len))
    weights = PackedWeights(checkpoint, backend, options, inventory)
    graph = build(config, weights, ropes)
    rope_bytes = sum(table.cos.nbytes + table.sin.nbytes for table in {id(rope): rope for rope in ropes}.values())
    return Model(config, graph, weights.schemes, weights.nbytes + rope_bytes, max_model_len)


def layer_ropes(config: ModelConfig, max_model_len: int, positions: int) -> tuple[RopeTable, ...]:
    """[layers] rope tables of the first `positions`, shared between layers that rotate alike."""

    def table(rope: RopeConfig) -> RopeTable:
        return rope_table(rope.theta, rope.rotary_dim, rope.scaling, config.max_position, max_model_len, positions)

    local_rope = config.local_rope
    everywhere = table(config.rope)
    if local_rope is None or not any(config.windows):
        return (everywhere,) * config.layers
    local = table(local_rope)
    return tuple(local if window else everywhere for window in config.windows)
