"""The reference backend against definitions written out in another way."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from noria.backends.base import (
    Batch,
    CacheLayout,
    DenseSource,
    Graph,
    Limits,
    RopeTable,
    Scheme,
)
from noria.backends.reference import ReferenceBackend
from noria.backends.rtn import quantise_int4, quantise_int8, round_bf16
from noria.errors import BackendError

BACKEND = ReferenceBackend()
LIMITS = Limits(64, 16, 8)
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 8


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def batch(starts: list[int], counts: list[int], outputs: list[int] | None = None, table_seed: int = 0) -> Batch:
    """Sequence i computes counts[i] tokens from position starts[i]; its blocks lie scattered in the pool."""
    tokens = sum(counts)
    tables = np.random.default_rng(table_seed).permutation(64).reshape(8, 8).astype(np.int32)
    slots = np.arange(len(starts), dtype=np.int32)[::-1].copy()
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).astype(np.int32)
    owner = np.repeat(slots, counts)
    return Batch(
        input_ids=np.arange(tokens, dtype=np.int32),
        positions=positions,
        kv_positions=(tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        kv_lengths=np.array([s + c for s, c in zip(starts, counts, strict=True)], np.int32),
        slots=slots,
        block_tables=tables,
        output_rows=np.array(range(tokens) if outputs is None else outputs, np.int32),
    )


def cache(dtype: str = "f32", layers: int = 1):
    return BACKEND.new_cache(CacheLayout(layers, KV_HEADS, DIM, BLOCK, 64, dtype))


def run(graph: Graph, at: Batch, held=None) -> np.ndarray:
    program = BACKEND.compile(graph, LIMITS)
    program.run(at, held if held is not None else cache())
    return program.values[graph.ops[-1].out.index]


def embedded(x: np.ndarray) -> tuple[Graph, object]:
    graph = Graph()
    return graph, graph.embed(BACKEND.table(x, "f32"))


def test_embed_norm_select() -> None:
    x = normal(10, 16)
    graph, value = embedded(x)
    weight = normal(16, seed=1)
    graph.select(graph.norm(value, weight, 1e-5, residual=value))
    out = run(graph, batch([0], [10], outputs=[9, 2]))
    expected = x[[9, 2]] / np.sqrt((x[[9, 2]] ** 2).mean(1, keepdims=True) + 1e-5) * weight + x[[9, 2]]
    assert out == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scheme", [Scheme("f32"), Scheme("bf16"), Scheme("int8", 24), Scheme("int4", 24)])
def test_linear_parts_bias_residual(scheme: Scheme) -> None:
    x, a, b = normal(6, 60), normal(40, 60, seed=1), normal(20, 60, seed=2)
    graph, value = embedded(x)
    parts = [BACKEND.pack(DenseSource(w), scheme) for w in (a, b)]
    bias = normal(60, seed=3)
    graph.linear(value, parts, bias, residual=value)
    out = run(graph, batch([0], [6]))
    bound = {"f32": 1e-5, "bf16": 0.15, "int8": 0.4, "int4": 4.0}[scheme.name]
    expected = np.concatenate([x @ a.T, x @ b.T], axis=1) + bias + x
    assert np.abs(out - expected).max() < bound
    if scheme.name != "f32":
        assert np.abs(out - expected).max() > bound / 100  # the scheme's rounding is really there


def test_int8_product_is_made_of_exact_integer_sums() -> None:
    x, w, group = normal(3, 70), normal(5, 70, seed=1), 32
    graph, value = embedded(x)
    graph.linear(value, [BACKEND.pack(DenseSource(w), Scheme("int8", group))])
    left, right = quantise_int8(x, group), quantise_int8(w, group)
    expected = np.zeros((3, 5))
    for g in range(3):
        k = slice(g * group, (g + 1) * group)
        sums = left.codes[:, k].astype(np.int64) @ right.codes[:, k].astype(np.int64).T
        expected += sums * np.outer(left.scales[:, g], right.scales[:, g]).astype(np.float64)
    assert run(graph, batch([0], [3])) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_pack_keeps_a_grouped_source_exactly() -> None:
    source = quantise_int4(normal(6, 64), 32)
    held = BACKEND.pack(source, Scheme("int4", 32)).data
    assert held[3, 40] == np.float32(source.codes[3, 40] * source.scales[3, 1]) + source.minimums[3, 1]
    with pytest.raises(BackendError, match="group"):
        BACKEND.pack(source, Scheme("int4"))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear(activation: str, biases: bool) -> None:
    x, gate, up = normal(4, 16), normal(24, 16, seed=1), normal(24, 16, seed=2)
    graph, value = embedded(x)
    a, b = (normal(24, seed=3), normal(24, seed=4)) if biases else (None, None)
    graph.gated_linear(value, *(BACKEND.pack(DenseSource(w), Scheme("f32")) for w in (gate, up)), activation, a, b)
    z = (x @ gate.T).astype(np.float64) + (0 if a is None else a)
    gelu = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    expected = (z / (1 + np.exp(-z)) if activation == "silu" else gelu) * (x @ up.T + (0 if b is None else b))
    assert run(graph, batch([0], [4])) == pytest.approx(expected, abs=1e-4)


def attention_graph(qkv: np.ndarray, rope: RopeTable | None = None, **kwargs) -> Graph:
    graph, value = embedded(qkv)
    norms = kwargs.pop("norms", (None, None))
    q = graph.rope_cache(value, 0, HEADS, KV_HEADS, DIM, rope, *norms)
    graph.attention(q, 0, HEADS, KV_HEADS, DIM, kwargs.pop("scale", DIM**-0.5), **kwargs)
    return graph


def plain_attention(q, k, v, scale, window=0, softcap=0.0) -> np.ndarray:
    """One sequence from position 0, one query and head at a time. q [t, heads, d], k and v [t, kv_heads, d]."""
    out = np.zeros_like(q)
    for p in range(len(q)):
        first = max(0, p - window + 1) if window else 0
        for h in range(HEADS):
            shared = h // (HEADS // KV_HEADS)
            scores = k[first : p + 1, shared] @ q[p, h] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[p, h] = weights / weights.sum() @ v[first : p + 1, shared]
    return out


def split(qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    heads = qkv.reshape(len(qkv), -1, DIM)
    return heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 2.0), (3, 1.5)])
def test_attention_of_two_sequences(window: int, softcap: float) -> None:
    qkv = normal(30, (HEADS + 2 * KV_HEADS) * DIM)
    out = run(attention_graph(qkv, window=window, softcap=softcap), batch([0, 0], [19, 11]))
    for rows in (slice(0, 19), slice(19, 30)):
        expected = plain_attention(*split(qkv[rows]), DIM**-0.5, window, softcap)
        assert out[rows].reshape(expected.shape) == pytest.approx(expected, abs=1e-5)


def test_rope_turns_pairs_and_scores_depend_on_distance() -> None:
    angles = np.arange(32)[:, None] * np.array([1.0, 0.1, 0.01])
    rope = RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    qkv = normal(12, (HEADS + 2 * KV_HEADS) * DIM)
    out = run(attention_graph(qkv, rope), batch([0], [12])).reshape(12, HEADS, DIM)
    q, k, v = split(qkv)
    turns = np.exp(1j * angles[:12, None, :])

    def turned(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., :3] + 1j * x[..., 3:6]) * turns
        return np.concatenate([pairs.real, pairs.imag, x[..., 6:]], axis=-1)

    assert out == pytest.approx(plain_attention(turned(q), turned(k), v, DIM**-0.5), abs=1e-5)


def test_head_norms() -> None:
    qkv, weights = normal(7, (HEADS + 2 * KV_HEADS) * DIM), (normal(DIM, seed=4), normal(DIM, seed=5))
    out = run(attention_graph(qkv, norms=weights), batch([0], [7])).reshape(7, HEADS, DIM)
    q, k, v = split(qkv)
    q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w for x, w in zip((q, k), weights, strict=True))
    assert out == pytest.approx(plain_attention(q, k, v, DIM**-0.5), abs=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_chunks_read_what_earlier_steps_wrote(dtype: str) -> None:
    qkv = normal(20, (HEADS + 2 * KV_HEADS) * DIM)
    whole = run(attention_graph(qkv), batch([0], [20]), cache(dtype))
    held = cache(dtype)
    parts = [run(attention_graph(qkv[a:b]), batch([a], [b - a]), held) for a, b in ((0, 9), (9, 10), (10, 20))]
    assert np.concatenate(parts) == pytest.approx(whole, abs=1e-6)


def test_cache_types_hold_their_own_numbers() -> None:
    keys, values = normal(3, KV_HEADS, DIM), normal(3, KV_HEADS, DIM, seed=1)
    at = np.array([5, 77, 6], np.int32)
    read = {}
    for dtype in ("f32", "bf16", "int8"):
        held = cache(dtype)
        held.write(0, at, keys, values)
        read[dtype] = held.read(0, at)
    assert (read["f32"][0] == keys).all()
    assert (read["bf16"][1] == round_bf16(values)).all()
    step = np.abs(keys).max(-1, keepdims=True) / 127
    assert (np.abs(read["int8"][0] - keys) <= 0.5001 * step).all()
    assert read["int8"][0].max() == pytest.approx(keys.max(), rel=1e-6)


def test_copied_blocks_are_equal_in_all_layers() -> None:
    held = cache("int8", layers=2)
    for layer in range(2):
        held.write(layer, np.arange(BLOCK, dtype=np.int32), normal(BLOCK, KV_HEADS, DIM), normal(BLOCK, KV_HEADS, DIM))
    held.copy_blocks(np.array([[0, 5], [5, 9]], np.int32))
    for layer in range(2):
        first, second = held.read(layer, np.arange(BLOCK)), held.read(layer, np.arange(9 * BLOCK, 10 * BLOCK))
        assert (first[0] == second[0]).all()
        assert np.abs(second[1]).max() > 0


def test_logits_scale_and_cap() -> None:
    x, head = normal(8, 16), normal(40, 16, seed=1)
    graph, value = embedded(x)
    graph.hidden, graph.head = (
        graph.select(value),
        BACKEND.pack(DenseSource(head.astype(ml_dtypes.bfloat16)), Scheme("f32")),
    )
    graph.logit_scale, graph.logit_softcap = 2.0, 3.0
    program = BACKEND.compile(graph, LIMITS)
    assert program.run(batch([0], [8], outputs=[7, 1, 3]), cache()) == 3
    expected = 3 * np.tanh(x[[1, 3]] @ round_bf16(head).T * 2 / 3)
    assert program.logits(1, 3) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(BackendError, match="hidden rows"):
        program.logits(0, 4)


def test_steps_over_the_limits_are_refused() -> None:
    graph, _ = embedded(normal(80, 4))
    with pytest.raises(BackendError, match="limits"):
        BACKEND.compile(graph, LIMITS).run(batch([0, 0], [40, 40]), cache())
