"""The native backend against the reference: every op, scheme and cache type, on every ISA level.

Bounds. Both backends see the same rounded operands, so what differs is float32 arithmetic: a sum of t terms is within
(t + 3) * 2^-23 of the sum of their magnitudes (half of that is expected: FMA and blocking only help). Functions (exp,
tanh, sqrt) are taken to be good to 2^-18 of their result. Where a value is quantised *after* such an op, a rounding may
fall on the other side: the bound then allows a few codes of each row to differ by one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_harness import LIMITS, Piece, layout, make_batch, normal, values

from noria.backends.base import Backend, DenseSource, Graph, GroupedSource, RopeTable, Scheme, Value
from noria.backends.rtn import dequantise_source, quantise_int4, quantise_int8, round_bf16
from noria.errors import BackendError

EPS = 2.0**-23
SCHEMES = [
    Scheme("f32"),
    Scheme("bf16"),
    *(Scheme("int8", g) for g in (32, 64, 192, 512)),
    *(Scheme("int4", g) for g in (16, 32, 64)),
]
CACHES = ("f32", "bf16", "int8")
bounded = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows_of(backend: Backend, graph: Graph, x: np.ndarray) -> Value:
    """x as a value: token i has id i."""
    return graph.embed(backend.table(x, "f32"))


def assert_within(got: np.ndarray, expected: np.ndarray, bound: np.ndarray | float) -> None:
    assert got.shape == expected.shape
    excess = np.abs(got.astype(np.float64) - expected) - bound
    assert np.isfinite(got).all()
    assert excess.max() <= 0, (
        f"exceeds the bound by {excess.max():.3g} at {np.unravel_index(excess.argmax(), got.shape)}"
    )


# ---------------------------------------------------------------------------------------------------- row-wise ops


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@bounded
@given(tokens=st.integers(1, 40), width=st.integers(1, 150), scale=st.sampled_from([1.0, 25.298, 0.1]))
def test_embed(cpu: Backend, reference: Backend, dtype: str, tokens: int, width: int, scale: float) -> None:
    table = normal(50, width)
    batch = make_batch([(0, tokens)])
    batch.input_ids = np.random.default_rng(tokens).integers(0, 50, tokens).astype(np.int32)

    def build(backend: Backend, graph: Graph) -> Value:
        return graph.embed(backend.table(table, dtype), scale)

    np.testing.assert_array_equal(values(cpu, build, batch), values(reference, build, batch))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@bounded
@given(tokens=st.integers(1, 40), vocab=st.integers(1, 200), width=st.integers(1, 150))
def test_the_rows_of_a_packed_weight_embed_as_a_table_does(
    cpu: Backend, reference: Backend, dtype: Any, tokens: int, vocab: int, width: int
) -> None:
    table = normal(vocab, width)
    batch = make_batch([(0, tokens)])
    batch.input_ids = np.random.default_rng(tokens).integers(0, vocab, tokens).astype(np.int32)

    def build(backend: Backend, graph: Graph, shared: bool) -> Value:
        weight = backend.pack(DenseSource(table), Scheme(dtype))
        return graph.embed(backend.table_of(weight) if shared else backend.table(table, dtype), 3.7)

    own = values(cpu, lambda backend, graph: build(backend, graph, False), batch)
    for backend in (cpu, reference):
        shared = values(backend, lambda backend, graph: build(backend, graph, True), batch)
        np.testing.assert_array_equal(shared, own)


def test_a_weight_that_was_quantised_is_no_table(cpu: Backend, reference: Backend) -> None:
    for backend in (cpu, reference):
        weight = backend.pack(DenseSource(normal(8, 64)), Scheme("int8", 64))
        with pytest.raises(BackendError, match="f32 or bf16"):
            backend.table_of(weight)


@pytest.mark.parametrize("with_residual", [False, True])
@bounded
@given(tokens=st.integers(1, 40), width=st.integers(1, 700), magnitude=st.sampled_from([1e-3, 1.0, 300.0]))
def test_norm(cpu: Backend, reference: Backend, with_residual: bool, tokens: int, width: int, magnitude: float) -> None:
    x, weight = normal(tokens, width) * np.float32(magnitude), normal(width, seed=1)

    def build(backend: Backend, graph: Graph) -> Value:
        value = rows_of(backend, graph, x)
        return graph.norm(value, weight, 1e-5, value if with_residual else None)

    batch = make_batch([(0, tokens)])
    expected = values(reference, build, batch)
    normed = expected - x * with_residual
    assert_within(
        values(cpu, build, batch), expected, (width / 8 + 8) * EPS * np.abs(normed) + 2 * EPS * np.abs(expected)
    )


def test_select_keeps_order_and_repeats(cpu: Backend) -> None:
    x = normal(9, 20)
    batch = make_batch([(0, 9)])
    batch.output_rows = np.array([8, 0, 3, 3], np.int32)
    got = values(cpu, lambda backend, graph: rows_of(backend, graph, x), batch)
    np.testing.assert_array_equal(got, x[[8, 0, 3, 3]])


# ---------------------------------------------------------------------------------------------------- products


def terms(scheme: Scheme, k: int) -> int:
    """Roundings that a sum over k suffers: sums within a group are exact."""
    return 3 * -(-k // min(scheme.group, k)) if scheme.group else k


def held(w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The weight's values after packing."""
    if scheme.name == "bf16":
        return round_bf16(w)
    if scheme.group:
        return dequantise_source((quantise_int8 if scheme.name == "int8" else quantise_int4)(w, scheme.group))
    return w


def product_bound(x: np.ndarray, w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """[rows, n]: for products whose operands are quantised from the very same floats.

    A code may still differ where x * (127 / max) falls on a tie; such inputs do not occur in random data here."""
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(held(w, scheme).astype(np.float64)).T
    if scheme.name == "int4":  # codes and minimums are summed apart, and may cancel
        magnitude *= 4
    return (terms(scheme, x.shape[1]) + 8) * EPS * magnitude + 1e-30


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@bounded
@given(tokens=st.integers(1, 40), n=st.integers(1, 140), k=st.integers(1, 500), seed=st.integers(0, 99))
def test_linear(cpu: Backend, reference: Backend, scheme: Scheme, tokens: int, n: int, k: int, seed: int) -> None:
    x, w = normal(tokens, k, seed=seed), normal(n, k, seed=seed + 1)

    def build(backend: Backend, graph: Graph) -> Value:
        return graph.linear(rows_of(backend, graph, x), [backend.pack(DenseSource(w), scheme)])

    batch = make_batch([(0, min(tokens, 90))])
    assert_within(values(cpu, build, batch), values(reference, build, batch), product_bound(x, w, scheme))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES[:3] + SCHEMES[-1:], ids=str)
def test_dense_sources_of_every_float_type(cpu: Backend, reference: Backend, scheme: Scheme, dtype: type) -> None:
    x, w = normal(5, 96), normal(70, 96, seed=1).astype(dtype)

    def build(backend: Backend, graph: Graph) -> Value:
        return graph.linear(rows_of(backend, graph, x), [backend.pack(DenseSource(w), scheme)])

    batch = make_batch([(0, 5)])
    bound = product_bound(x, w.astype(np.float32), scheme)
    assert_within(values(cpu, build, batch), values(reference, build, batch), bound)


@pytest.mark.parametrize(
    ("source", "scheme"),
    [
        (quantise_int4(normal(70, 96), 32), Scheme("int4", 32)),
        (quantise_int4(normal(70, 96), 16), Scheme("int4", 16)),
        (quantise_int4(normal(70, 96), 16), Scheme("int4", 32)),
        (quantise_int8(normal(70, 96), 32), Scheme("int8", 32)),
        (quantise_int8(normal(70, 96), 32), Scheme("int8", 64)),
        (quantise_int8(normal(70, 96), 32), Scheme("int4", 32)),
        (quantise_int4(normal(70, 96), 32), Scheme("int8", 96)),
        (quantise_int4(normal(70, 96), 32), Scheme("f32")),
        (quantise_int8(normal(70, 96), 32), Scheme("bf16")),
    ],
    ids=lambda value: f"{value.bits}bit/{value.group}" if isinstance(value, GroupedSource) else str(value),
)
def test_grouped_sources(cpu: Backend, reference: Backend, source: GroupedSource, scheme: Scheme) -> None:
    x = normal(5, 96, seed=3)

    def build(backend: Backend, graph: Graph) -> Value:
        return graph.linear(rows_of(backend, graph, x), [backend.pack(source, scheme)])

    batch = make_batch([(0, 5)])
    bound = product_bound(x, dequantise_source(source), scheme) * 2
    assert_within(values(cpu, build, batch), values(reference, build, batch), bound)


def test_linear_with_parts_bias_and_residual(cpu: Backend, reference: Backend) -> None:
    k, sizes = 256, (100, 64, 60, 32)
    schemes = [Scheme("bf16"), Scheme("int8", 64), Scheme("int4", 32), Scheme("f32")]
    x, bias = normal(20, k), normal(sum(sizes), seed=9)
    weights = [normal(n, k, seed=n) for n in sizes]

    def build(backend: Backend, graph: Graph) -> Value:
        value = rows_of(backend, graph, x)
        parts = [backend.pack(DenseSource(w), s) for w, s in zip(weights, schemes, strict=True)]
        return graph.linear(value, parts, bias, residual=value)

    batch = make_batch([(0, 20)])
    expected = values(reference, build, batch)
    bound = np.concatenate([product_bound(x, w, s) for w, s in zip(weights, schemes, strict=True)], axis=1)
    assert_within(values(cpu, build, batch), expected, bound + 4 * EPS * (np.abs(expected) + np.abs(bias) + np.abs(x)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gated_linear(cpu: Backend, reference: Backend, scheme: Scheme, activation: str, with_bias: bool) -> None:
    tokens, n, k = 17, 90, 200
    x, gate, up = normal(tokens, k) * 0.3, normal(n, k, seed=1), normal(n, k, seed=2)
    biases = (normal(n, seed=3), normal(n, seed=4)) if with_bias else (None, None)

    def build(backend: Backend, graph: Graph) -> Value:
        parts = (backend.pack(DenseSource(w), scheme) for w in (gate, up))
        return graph.gated_linear(rows_of(backend, graph, x), *parts, activation, *biases)

    batch = make_batch([(0, tokens)])
    expected = values(reference, build, batch)
    # |activation'| < 1.2; |activation(g)| and |u| are below the magnitudes that the bounds scale.
    a, b = (product_bound(x, w, scheme) for w in (gate, up))
    g, u = (np.abs(x) @ np.abs(held(w, scheme)).T + 4 for w in (gate, up))
    assert_within(values(cpu, build, batch), expected, 1.2 * a * u + b * g + 2.0**-17 * np.abs(expected) + 1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_norm_and_activation_before_a_product(cpu: Backend, reference: Backend, scheme: Scheme) -> None:
    """What a backend fuses: norm → gated product → product with residual."""
    tokens, k, n = 19, 192, 256
    x, weight = normal(tokens, k), normal(k, seed=5) * 0.2 + 1
    gate, up, down = normal(n, k, seed=1) / 14, normal(n, k, seed=2) / 14, normal(k, n, seed=3) / 16

    def build(backend: Backend, graph: Graph) -> Value:
        value = rows_of(backend, graph, x)
        g, u, d = (backend.pack(DenseSource(w), scheme) for w in (gate, up, down))
        hidden = graph.gated_linear(graph.norm(value, weight, 1e-5), g, u, "silu")
        return graph.linear(hidden, [d], residual=value)

    batch = make_batch([(0, tokens)])
    got, expected = values(cpu, build, batch), values(reference, build, batch)
    step = {"f32": 0.0, "bf16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 127}[scheme.name]
    assert_within(got, expected, 1e-4 + 0.5 * step)
    assert np.sqrt(np.mean((got - expected) ** 2)) < 1e-5 + 0.05 * step


def test_logits_are_scaled_capped_and_sliced(cpu: Backend, reference: Backend) -> None:
    x, head = normal(70, 128), normal(333, 128, seed=1)
    out = {}
    for backend in (cpu, reference):
        piece = Piece(backend, lambda b, g: rows_of(b, g, x))
        graph = Graph()
        graph.hidden = graph.select(rows_of(backend, graph, x))
        graph.head = backend.pack(DenseSource(head), Scheme("int8", 64))
        graph.logit_scale, graph.logit_softcap = 0.5, 20.0
        piece.program = backend.compile(graph, LIMITS)
        out[backend.name] = piece.run(make_batch([(0, 70)]))
        np.testing.assert_array_equal(piece.program.logits(3, 5), out[backend.name][3:5])
    assert_within(out["cpu"], out["reference"], product_bound(x, head, Scheme("int8", 64)) + 20 * 2.0**-17)


# ---------------------------------------------------------------------------------------------------- attention


def rope_table(rotary_dim: int, positions: int = 128) -> RopeTable:
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def attention_piece(qkv: np.ndarray, heads: int, kv_heads: int, dim: int, rope: RopeTable | None = None, **kwargs):
    """Build: rope + cache, then attention. Token ids are rows of qkv."""
    norms = kwargs.pop("norms", (None, None))

    def build(backend: Backend, graph: Graph) -> Value:
        value = rows_of(backend, graph, qkv)
        q = graph.rope_cache(value, 0, heads, kv_heads, dim, rope, *norms)
        return graph.attention(q, 0, heads, kv_heads, dim, dim**-0.5, **kwargs)

    return build


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [(4, 2, 64, 64), (3, 1, 80, 80), (2, 2, 96, 48), (4, 4, 40, 0), (2, 1, 256, 256)],
)
def test_rope_yields_the_queries(
    cpu: Backend, reference: Backend, with_norms: bool, heads: int, kv_heads: int, dim: int, rotary: int
) -> None:
    qkv = normal(50, (heads + 2 * kv_heads) * dim)
    norms = (normal(dim, seed=1), normal(dim, seed=2)) if with_norms else (None, None)
    rope = rope_table(rotary) if rotary else None

    def build(backend: Backend, graph: Graph) -> Value:
        return graph.rope_cache(rows_of(backend, graph, qkv), 0, heads, kv_heads, dim, rope, *norms)

    batch, cache = make_batch([(0, 30), (77, 96), (5, 6)]), layout(kv_heads, dim)
    expected = values(reference, build, batch, cache)
    largest = np.abs(expected).reshape(50, heads, dim).max(axis=2).repeat(dim, axis=1)
    assert_within(values(cpu, build, batch, cache), expected, 16 * EPS * largest)


# The largest error of an output, as a share of the largest value in the cache: exp and the running sums in float32;
# in a narrow cache, keys whose rounding falls on the other side after rope.
ATTENTION_BOUND = {"f32": 2e-5, "bf16": 2.0**-8, "int8": 1 / 64}
ATTENTION_RMS = {"f32": 2e-6, "bf16": 2e-4, "int8": 1e-3}


def assert_attention(got: np.ndarray, expected: np.ndarray, dtype: str, qkv: np.ndarray) -> None:
    assert_within(got, expected, ATTENTION_BOUND[dtype] * float(np.abs(qkv).max()))
    assert np.sqrt(np.mean((got - expected) ** 2)) <= ATTENTION_RMS[dtype]


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (3, 1, 80), (2, 1, 96), (4, 1, 256), (2, 2, 40)]
)
def test_attention_shapes(cpu: Backend, reference: Backend, dtype: str, heads: int, kv_heads: int, dim: int) -> None:
    spans = [(0, 60), (0, 1), (0, 17)]
    qkv = normal(78, (heads + 2 * kv_heads) * dim)
    build, cache = attention_piece(qkv, heads, kv_heads, dim, rope_table(dim)), layout(kv_heads, dim, dtype)
    batch = make_batch(spans)
    assert_attention(values(cpu, build, batch, cache), values(reference, build, batch, cache), dtype, qkv)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (7, 0.0), (40, 0.0), (0, 30.0), (24, 5.0)])
def test_attention_windows_and_caps(
    cpu: Backend, reference: Backend, dtype: str, block_size: int, window: int, softcap: float
) -> None:
    qkv = normal(100, 5 * 64) * 2
    build = attention_piece(qkv, 3, 1, 64, window=window, softcap=softcap)
    cache, batch = layout(1, 64, dtype, block_size=block_size), make_batch([(0, 70), (0, 30)], block_size)
    assert_attention(values(cpu, build, batch, cache), values(reference, build, batch, cache), dtype, qkv)


@pytest.mark.parametrize("dtype", CACHES)
@bounded
@given(data=st.data())
def test_attention_over_steps(cpu: Backend, reference: Backend, dtype: str, data: st.DataObject) -> None:
    """Random prefixes, then chunks of random lengths over them: mixed prefill and decode."""
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    cuts = [data.draw(st.integers(0, length - 1)) for length in lengths]
    window = data.draw(st.sampled_from([0, 5, 33]))
    qkv = normal(sum(lengths), 4 * 32)
    starts = np.cumsum([0, *lengths])
    ids = [np.arange(a, b, dtype=np.int32) for a, b in pairwise(starts)]
    out = {}
    for backend in (cpu, reference):
        piece = Piece(backend, attention_piece(qkv, 2, 1, 32, window=window), layout(1, 32, dtype))
        prefixes = [i for i, cut in enumerate(cuts) if cut]
        for i in prefixes:  # one by one; a batch names sequences by their place, so all are listed below
            spans = [(0, cuts[j]) if j == i else (0, 0) for j in range(len(cuts))]
            piece.run(only(make_batch(spans, ids=ids), i))
        out[backend.name] = piece.run(make_batch(list(zip(cuts, lengths, strict=True)), ids=ids))
    assert_attention(out["cpu"], out["reference"], dtype, qkv)


def only(batch, index: int):
    """The batch with one of its sequences, in the same slot."""
    rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
    count = rows.stop - rows.start
    batch.input_ids, batch.positions, batch.kv_positions = (
        array[rows].copy() for array in (batch.input_ids, batch.positions, batch.kv_positions)
    )
    batch.query_starts = np.array([0, count], np.int32)
    batch.kv_lengths, batch.slots = batch.kv_lengths[index : index + 1].copy(), batch.slots[index : index + 1].copy()
    batch.output_rows = np.arange(count, dtype=np.int32)
    return batch


@pytest.mark.parametrize("dtype", CACHES)
def test_copied_blocks_serve_another_sequence(cpu: Backend, dtype: str) -> None:
    """Copy the blocks of one sequence to another's: its next token must see the same past."""
    qkv = normal(40, 4 * 32)
    piece = Piece(cpu, attention_piece(qkv, 2, 1, 32), layout(1, 32, dtype))
    both = make_batch([(0, 20), (0, 20)])
    piece.run(only(make_batch([(0, 20), (0, 20)]), 0))
    first, second = both.block_tables[both.slots[0]][:3], both.block_tables[both.slots[1]][:3]
    piece.cache.copy_blocks(np.stack([first, second], axis=1).astype(np.int32))
    ids = [np.full(21, 25, np.int32), np.full(21, 25, np.int32)]
    out = piece.run(make_batch([(20, 21), (20, 21)], ids=ids))
    np.testing.assert_array_equal(out[0], out[1])
    alone = values(
        cpu, attention_piece(qkv, 2, 1, 32), only(make_batch([(0, 1)], ids=[ids[0]]), 0), layout(1, 32, dtype)
    )
    assert np.abs(out[0] - alone[0]).max() > 0.01  # the past was seen


# ---------------------------------------------------------------------------------------------------- whole models


def small_model(scheme: Scheme, seed: int = 0):
    """Two layers with everything: embedding scale, head norms, rope, window, soft caps, biases, gated product."""
    width, heads, kv_heads, dim, inner = 96, 4, 2, 32, 160

    def w(n: int, k: int, salt: int) -> DenseSource:
        return DenseSource(normal(n, k, seed=seed + salt) / np.float32(k**0.5))

    def build(backend: Backend, graph: Graph) -> Value:
        x = graph.embed(backend.table(normal(200, width, seed=seed), "bf16"), 2.0)
        for layer in range(2):
            salt = 100 * (layer + 1)
            parts = [
                backend.pack(w(n * dim, width, salt + i), scheme) for i, n in enumerate((heads, kv_heads, kv_heads))
            ]
            h = graph.norm(x, normal(width, seed=salt + 3) * 0.1 + 1, 1e-6)
            qkv = graph.linear(h, parts, normal((heads + 2 * kv_heads) * dim, seed=salt + 4))
            norms = (np.ones(dim, np.float32), normal(dim, seed=salt + 5) * 0.1 + 1)
            q = graph.rope_cache(qkv, layer, heads, kv_heads, dim, rope_table(dim), *norms)
            a = graph.attention(q, layer, heads, kv_heads, dim, dim**-0.5, 20 * layer, 30.0 * layer)
            x = graph.linear(a, [backend.pack(w(width, heads * dim, salt + 6), scheme)], residual=x)
            gate, up = (backend.pack(w(inner, width, salt + 7 + i), scheme) for i in range(2))
            h = graph.gated_linear(graph.norm(x, np.ones(width, np.float32), 1e-6), gate, up, "gelu_tanh")
            x = graph.linear(h, [backend.pack(w(width, inner, salt + 9), scheme)], residual=x)
        return graph.norm(x, np.ones(width, np.float32), 1e-6)

    return build, lambda dtype: layout(kv_heads, dim, dtype, layers=2)


MODEL_SCHEMES = [Scheme("f32"), Scheme("bf16"), Scheme("int8", 64), Scheme("int4", 32)]
KNOWN = [np.random.default_rng(i).integers(0, 200, 90).astype(np.int32) for i in range(6)]


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("scheme", MODEL_SCHEMES, ids=str)
def test_small_model(cpu: Backend, reference: Backend, scheme: Scheme, dtype: str) -> None:
    build, cache = small_model(scheme)
    batch = make_batch([(0, 60), (0, 3), (0, 33)], ids=KNOWN)
    got, expected = values(cpu, build, batch, cache(dtype)), values(reference, build, batch, cache(dtype))
    exact = scheme.name == "f32" and dtype == "f32"
    rms = float(np.sqrt(np.mean((got - expected) ** 2)))  # outputs are normed: their own is 1
    assert rms < (1e-5 if exact else 5e-3), rms
    assert_within(got, expected, 1e-4 if exact else 0.1)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("scheme", MODEL_SCHEMES, ids=str)
def test_neighbours_chunks_and_threads_change_no_bit(
    cpu: Backend, cpu_one_thread: Backend, scheme: Scheme, dtype: str
) -> None:
    build, cache = small_model(scheme)
    length = 75
    alone = values(cpu_one_thread, build, make_batch([(0, length)], ids=KNOWN), cache(dtype))
    among = values(cpu, build, make_batch([(0, length), (0, 90), (0, 1), (0, 40)], ids=KNOWN), cache(dtype))
    np.testing.assert_array_equal(among[:length], alone)
    for chunk in (1, 7, 16, 64):
        piece = Piece(cpu, build, cache(dtype))
        cuts = [*range(0, length, chunk), length]
        steps = [piece.run(make_batch([(a, b), (a, b)], ids=[KNOWN[0], KNOWN[1]]))[: b - a] for a, b in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(steps), alone)
