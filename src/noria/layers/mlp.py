"""The gated MLP: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from noria.backends.base import Graph, Value
from noria.layers.base import DecoderConfig, Weights


def gated_mlp(
    graph: Graph, weights: Weights, x: Value, at: str, config: DecoderConfig, residual: Value | None = None
) -> Value:
    """`at`: prefix of the weights, with its dot ("model.layers.0.mlp.")."""
    n, k = config.intermediate, config.hidden
    gate, up = weights.matrix(f"{at}gate_proj.weight", n, k), weights.matrix(f"{at}up_proj.weight", n, k)
    if config.mlp_bias:
        biases = weights.vector(f"{at}gate_proj.bias", n), weights.vector(f"{at}up_proj.bias", n)
        inner = graph.gated_linear(x, gate, up, config.activation, *biases)
    else:
        inner = graph.gated_linear(x, gate, up, config.activation)
    return down(graph, weights, inner, at, config, residual)


def fused_mlp(
    graph: Graph, weights: Weights, x: Value, at: str, config: DecoderConfig, residual: Value | None = None
) -> Value:
    """The same over a checkpoint that holds gate and up as one weight `gate_up_proj`, gate first."""
    n = config.intermediate
    gate, up = weights.split(f"{at}gate_up_proj.weight", (n, n), config.hidden)
    return down(graph, weights, graph.gated_linear(x, gate, up, config.activation), at, config, residual)


def down(
    graph: Graph, weights: Weights, inner: Value, at: str, config: DecoderConfig, residual: Value | None = None
) -> Value:
    """Back to [rows, hidden] (+ residual)."""
    bias = weights.vector(f"{at}down_proj.bias", config.hidden) if config.mlp_bias else None
    weight = weights.matrix(f"{at}down_proj.weight", config.hidden, config.intermediate)
    return graph.linear(inner, [weight], bias, residual)
