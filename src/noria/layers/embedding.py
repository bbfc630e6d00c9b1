"""Both ends of a decoder: token ids → hidden states, hidden states → the head that makes logits."""

from __future__ import annotations

from noria.backends.base import Graph, Value
from noria.layers.base import DecoderConfig, Weights
from noria.layers.norm import norm

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def embed(graph: Graph, weights: Weights, config: DecoderConfig) -> Value:
    """Hidden states [tokens, hidden] of the step's input ids."""
    return graph.embed(weights.table(EMBEDDING, config.vocab, config.hidden), config.embed_scale)


def head(graph: Graph, weights: Weights, x: Value, config: DecoderConfig) -> None:
    """Ends the graph: last norm over the rows that need logits, and the head (the embedding table if tied)."""
    graph.hidden = norm(graph, weights, x, "model.norm", config)
    graph.head = weights.matrix(EMBEDDING if config.tied else HEAD, config.vocab, config.hidden)
    graph.logit_softcap = config.logit_softcap
