"""Native execution of graphs: its plan (forms, buffers, residuals in place) against the reference, and its checks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from noria import _native
from noria.backends import get_backend
from noria.backends.base import (
    Backend,
    Batch,
    CacheLayout,
    DenseSource,
    Graph,
    Limits,
    RopeTable,
    Scheme,
    Value,
)
from noria.errors import BackendError, ConfigError

CPU = {threads: get_backend("cpu", threads) for threads in (1, 2)}
REFERENCE = get_backend("reference")
LIMITS = Limits(max_tokens=64, max_outputs=8, max_seqs=8)
VOCAB = 50
SCHEMES = [Scheme("f32"), Scheme("bf16"), Scheme("int8", 32), Scheme("int4", 16)]
HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK = 4, 2, 16, 2, 8
LAYOUT = CacheLayout(LAYERS, KV_HEADS, HEAD_DIM, BLOCK, 32, "f32")


def normal(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def weight(backend: Backend, n: int, k: int, scheme: Scheme, seed: int) -> Any:
    return backend.pack(DenseSource(normal(n, k, seed=seed) / np.float32(np.sqrt(k))), scheme)


def make_batch(spans: list[tuple[int, int]], ids: list[NDArray[np.int32]], outputs: list[int] | None = None) -> Batch:
    """Sequence i computes positions spans[i]; its blocks are 4 * i … 4 * i + 3, in descending order."""
    counts = [stop - start for start, stop in spans]
    tables = np.array([[4 * slot + 3 - b for b in range(4)] for slot in range(8)], np.int32)
    positions = np.concatenate([np.arange(*span) for span in spans] or [np.empty(0)]).astype(np.int32)
    owner = np.repeat(np.arange(len(spans)), counts)
    return Batch(
        input_ids=np.concatenate([i[a:b] for i, (a, b) in zip(ids, spans, strict=True)]).astype(np.int32),
        positions=positions,
        kv_positions=(tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        kv_lengths=np.array([stop for _, stop in spans], np.int32),
        slots=np.arange(len(spans), dtype=np.int32),
        block_tables=tables,
        output_rows=np.array(range(len(positions)) if outputs is None else outputs, np.int32),
    )


def all_logits(program: Any, rows: int) -> NDArray[np.float32]:
    step = LIMITS.max_outputs
    return np.concatenate([np.array(program.logits(i, min(i + step, rows))) for i in range(0, rows, step)])


def transformer(backend: Backend, scheme: Scheme, width: int = 64) -> Graph:
    """Two layers with fused qkv, rotations, a gated MLP and a tied head: the shape of a real model."""
    angles = np.arange(64)[:, None] / 100.0 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    rope = RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    graph = Graph()
    x = graph.embed(backend.table(normal(VOCAB, width, seed=1), "bf16"), 2.0)
    for layer in range(LAYERS):
        seed = 100 * layer
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        h = graph.norm(x, normal(width, seed=seed), 1e-5)
        parts = [weight(backend, n, width, scheme, seed + i) for i, n in enumerate((q, kv, kv))]
        qkv = graph.linear(h, parts, bias=normal(q + 2 * kv, seed=seed + 5))
        queries = graph.rope_cache(qkv, layer, HEADS, KV_HEADS, HEAD_DIM, rope)
        mixed = graph.attention(queries, layer, HEADS, KV_HEADS, HEAD_DIM, 0.25)
        x = graph.linear(mixed, [weight(backend, width, q, scheme, seed + 6)], residual=x)
        h = graph.norm(x, normal(width, seed=seed + 7), 1e-5)
        gated = graph.gated_linear(
            h, weight(backend, 96, width, scheme, seed + 8), weight(backend, 96, width, scheme, seed + 9), "silu"
        )
        x = graph.linear(gated, [weight(backend, width, 96, scheme, seed + 10)], residual=x)
    graph.hidden = graph.norm(graph.select(x), normal(width, seed=11), 1e-5)
    graph.head = weight(backend, VOCAB, width, scheme, 12)
    graph.logit_softcap = 30.0
    return graph


# ---------------------------------------------------------------------------------------------------- the plan

Step = tuple[int, int, int, int]  # kind, and three numbers that choose operands


def random_graph(backend: Backend, steps: list[Step], schemes: list[Scheme], widths: list[int]) -> Graph:
    """Ops over any earlier values: values are read again late, twice, by different schemes, and as residuals."""
    graph = Graph()
    values = [graph.embed(backend.table(normal(VOCAB, width, seed=width), "f32")) for width in widths]
    for i, (kind, a, b, c) in enumerate(steps):
        x = values[a % len(values)]
        like = [v for v in values if v.width == x.width]
        scheme = schemes[c % len(schemes)]
        if kind == 0:
            residual = like[b % len(like)] if c % 2 else None
            values.append(graph.norm(x, normal(x.width, seed=i), 1e-5, residual))
            continue
        target = widths[b % len(widths)]
        if kind == 1:
            first = max(1, target // 3)
            parts = [weight(backend, first, x.width, scheme, i)]
            parts.append(weight(backend, target - first, x.width, schemes[(c + 1) % len(schemes)], i + 1))
            wide = [v for v in values if v.width == target]
            residual = wide[c % len(wide)] if c % 3 else None
            values.append(graph.linear(x, parts, normal(target, seed=i) if c % 2 else None, residual))
        else:
            pair = [weight(backend, target, x.width, scheme, i + j) for j in (2, 3)]
            values.append(graph.gated_linear(x, *pair, "gelu_tanh" if c % 2 else "silu"))
    total: Value = graph.select(values[-1])
    for value in values[:-1]:  # everything is read at the very end too
        if value.width == total.width:
            total = graph.norm(graph.select(value), normal(total.width, seed=3), 1e-5, total)
    graph.hidden = total
    graph.head = backend.pack(DenseSource(np.eye(total.width, dtype=np.float32)), Scheme("f32"))
    return graph


steps = st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 11)] * 3), min_size=1, max_size=14)


@settings(max_examples=60, deadline=None)
@given(
    steps=steps,
    schemes=st.sampled_from([SCHEMES[:1], SCHEMES[:2], SCHEMES]),
    widths=st.sampled_from([[64], [64, 128], [24, 72], [2, 65, 130]]),
    tokens=st.integers(1, 20),
)
def test_any_graph_computes_what_the_reference_computes(
    steps: list[Step], schemes: list[Scheme], widths: list[int], tokens: int
) -> None:
    batch = make_batch([(0, tokens)], [np.arange(tokens, dtype=np.int32)])
    found = []
    for backend in (CPU[2], REFERENCE):
        graph = random_graph(backend, steps, schemes, widths)
        program = backend.compile(graph, LIMITS)
        found.append(all_logits(program, program.run(batch, backend.new_cache(LAYOUT))))
    # Float32 arithmetic alone stays within 1e-4; a code that rounds the other way is a whole step of a coarse scheme.
    bound = 1e-4 if len(schemes) == 1 else 0.15
    scale = np.abs(found[1]).max() + 1e-3
    assert np.abs(found[0] - found[1]).max() <= bound * scale


def test_buffers_are_reused() -> None:
    """Twenty layers need no more work space than two."""

    def chain(layers: int) -> int:
        graph = Graph()
        x = graph.embed(CPU[1].table(normal(VOCAB, 64, seed=0), "f32"))
        for i in range(layers):
            h = graph.norm(x, np.ones(64, np.float32), 1e-5)
            x = graph.linear(h, [weight(CPU[1], 64, 64, Scheme("int8", 32), i)], residual=x)
        graph.hidden = x
        return CPU[1].compile(graph, LIMITS).buffer_bytes

    assert chain(20) == chain(2)


def test_a_norm_read_by_products_alone_makes_no_floats() -> None:
    def program(extra_reader: bool) -> Any:
        graph = Graph()
        x = graph.embed(CPU[1].table(normal(VOCAB, 64, seed=0), "f32"))
        h = graph.norm(x, np.ones(64, np.float32), 1e-5)
        wide = graph.linear(h, [weight(CPU[1], 64, 64, Scheme("int8", 32), 1)], residual=h if extra_reader else None)
        graph.hidden = graph.linear(wide, [weight(CPU[1], 64, 64, Scheme("f32"), 2)])
        return CPU[1].compile(graph, LIMITS)

    made = program(False)
    batch = make_batch([(0, 3)], [np.arange(3, dtype=np.int32)])
    made.profile(True)
    made.run(batch, CPU[1].new_cache(LAYOUT))
    assert [entry["name"] for entry in made.times()] == ["embed", "norm", "linear", "linear"], "no conversion apart"
    assert made.buffer_bytes <= program(True).buffer_bytes


# ---------------------------------------------------------------------------------------------------- independence

PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 30).astype(np.int32) for i in range(5)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("cache_type", ["f32", "bf16", "int8"])
def test_neighbours_chunks_and_threads_change_no_bit(scheme: Scheme, cache_type: Any) -> None:
    layout = replace(LAYOUT, dtype=cache_type)
    graph = transformer(CPU[1], scheme)

    def rows(threads: int, steps: list[list[tuple[int, int]]], ids: list[NDArray[np.int32]]) -> NDArray[np.float32]:
        """The last logits of the first sequence."""
        program, cache = CPU[threads].compile(graph, LIMITS), CPU[threads].new_cache(layout)
        for spans in steps:
            count = program.run(make_batch(spans, ids), cache)
            logits = all_logits(program, count)
        return logits[steps[-1][0][1] - steps[-1][0][0] - 1]

    alone = rows(1, [[(0, 20)]], PROMPTS[:1])
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(rows(2, [[(0, 20)]], PROMPTS[:1]), alone)
    np.testing.assert_array_equal(rows(2, [[(0, 20), (0, 7), (0, 1), (0, 30)]], PROMPTS[:4]), alone)
    np.testing.assert_array_equal(rows(2, [[(0, 3)], [(3, 16)], [(16, 19)], [(19, 20)]], PROMPTS[:1]), alone)
    mixed = [[(0, 19), (0, 29)], [(19, 20), (29, 30)]]
    np.testing.assert_array_equal(rows(2, mixed, PROMPTS[:2]), alone)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_of_many_threads_change_no_bit(scheme: Scheme) -> None:
    """So many rows that each thread has some of its own, in pieces that do not divide evenly."""
    spans, ids = [(0, 28)] * 7 + [(0, 31)], [np.random.default_rng(i).integers(0, VOCAB, 31) for i in range(8)]
    batch = make_batch(spans, [i.astype(np.int32) for i in ids])
    rows = len(batch.input_ids)
    limits = Limits(max_tokens=rows, max_outputs=rows, max_seqs=8)
    results = []
    for threads in (1, 2, 3, 5):
        backend = get_backend("cpu", threads)
        program = backend.compile(transformer(backend, scheme), limits)
        assert program.run(batch, backend.new_cache(LAYOUT)) == rows
        results.append((np.array(program.logits(0, rows)), program.largest(0, rows)))
    for logits, largest in results[1:]:
        np.testing.assert_array_equal(logits, results[0][0])
        np.testing.assert_array_equal(largest, results[0][1])


def test_a_transformer_agrees_with_the_reference() -> None:
    found = []
    for backend in (CPU[2], REFERENCE):
        program = backend.compile(transformer(backend, Scheme("f32")), LIMITS)
        cache = backend.new_cache(LAYOUT)
        program.run(make_batch([(0, 12), (0, 30)], PROMPTS[:2]), cache)
        count = program.run(make_batch([(12, 13), (30, 31)], [np.full(40, 7, np.int32)] * 2, outputs=[1]), cache)
        assert count == 1
        found.append(np.array(program.logits(0, 1)))
    np.testing.assert_allclose(found[0], found[1], atol=2e-4)


# ---------------------------------------------------------------------------------------------------- checks

Spoil = Callable[[Batch], Any]


def changed(name: str, index: int, value: int) -> Spoil:
    def spoil(batch: Batch) -> None:
        array = getattr(batch, name).copy()
        array.reshape(-1)[index] = value
        setattr(batch, name, array)

    return spoil


def retyped(name: str, dtype: Any) -> Spoil:
    return lambda batch: setattr(batch, name, getattr(batch, name).astype(dtype))


SPOILT: list[tuple[str, Spoil]] = [
    ("input_ids", changed("input_ids", 3, VOCAB)),
    ("input_ids", changed("input_ids", 3, -1)),
    ("positions", changed("positions", 0, -1)),
    ("positions", changed("positions", 2, 1000)),
    ("positions", changed("positions", 2, 1)),
    ("kv_positions", changed("kv_positions", 1, 32 * BLOCK)),
    ("kv_positions", changed("kv_positions", 1, -5)),
    ("slots", changed("slots", 1, 8)),
    ("slots", changed("slots", 1, -1)),
    ("kv_length", changed("kv_lengths", 0, 33)),
    ("kv_length", changed("kv_lengths", 0, 1)),
    ("positions", changed("kv_lengths", 0, 9)),
    ("kv_length", changed("kv_lengths", 0, 2**31 - 1)),
    ("query_starts", changed("query_starts", 0, 1)),
    ("query_starts", changed("query_starts", 1, 100)),
    ("query_starts", changed("query_starts", 1, -1)),
    ("query_starts", changed("query_starts", 2, 7)),
    ("block_tables", changed("block_tables", 0, 32)),
    ("block_tables", changed("block_tables", 4, -1)),
    ("output_rows", changed("output_rows", 0, 13)),
    ("output_rows", changed("output_rows", 0, -1)),
    *((field.name, retyped(field.name, np.int64)) for field in fields(Batch)),
    ("input_ids", lambda batch: setattr(batch, "input_ids", batch.input_ids[:-1])),
    ("kv_lengths", lambda batch: setattr(batch, "kv_lengths", batch.kv_lengths[:-1])),
    ("block_tables", lambda batch: setattr(batch, "block_tables", batch.block_tables[:, ::2])),
    ("positions", lambda batch: setattr(batch, "positions", None)),
    ("tokens", lambda batch: setattr(batch, "output_rows", np.zeros(65, np.int32))),
]


@pytest.mark.parametrize(("named", "spoil"), SPOILT)
def test_a_batch_that_leads_outside_is_an_error_and_touches_nothing(named: str, spoil: Spoil) -> None:
    program = CPU[2].compile(transformer(CPU[2], Scheme("f32")), LIMITS)
    cache = CPU[2].new_cache(LAYOUT)
    good = make_batch([(0, 8), (0, 5)], PROMPTS[:2])
    assert program.run(good, cache) == 13
    before = [np.array(part) for part in cache.native.read(0, good.kv_positions)]
    bad = make_batch([(0, 8), (0, 5)], [PROMPTS[2], PROMPTS[3]])
    spoil(bad)
    with pytest.raises(BackendError, match=named if named != "tokens" else "output rows"):
        program.run(bad, cache)
    for held, now in zip(before, cache.native.read(0, good.kv_positions), strict=True):
        np.testing.assert_array_equal(held, now)


def test_too_many_tokens_or_sequences_are_an_error() -> None:
    program = CPU[1].compile(transformer(CPU[1], Scheme("f32")), Limits(max_tokens=10, max_outputs=2, max_seqs=1))
    cache = CPU[1].new_cache(LAYOUT)
    with pytest.raises(BackendError, match="11 tokens"):
        program.run(make_batch([(0, 11)], PROMPTS[:1]), cache)
    with pytest.raises(BackendError, match="2 sequences"):
        program.run(make_batch([(0, 2), (0, 2)], PROMPTS[:2]), cache)


def test_logits_are_given_for_computed_rows_only() -> None:
    program = CPU[1].compile(transformer(CPU[1], Scheme("f32")), LIMITS)
    with pytest.raises(BackendError, match="hidden rows"):
        program.logits(0, 1)
    assert program.run(make_batch([(0, 20)], PROMPTS[:1]), CPU[1].new_cache(LAYOUT)) == 20
    assert program.logits(4, 12).shape == (8, VOCAB)
    assert program.logits(3, 3).shape == (0, VOCAB)
    for start, stop in ((0, 9), (-1, 2), (19, 21), (5, 4)):
        with pytest.raises(BackendError, match="hidden rows"):
            program.logits(start, stop)


def test_an_empty_batch_and_a_batch_without_outputs() -> None:
    program = CPU[2].compile(transformer(CPU[2], Scheme("int8", 32)), LIMITS)
    cache = CPU[2].new_cache(LAYOUT)
    empty = make_batch([(0, 0)], PROMPTS[:1])
    assert program.run(empty, cache) == 0
    assert program.run(make_batch([(0, 9)], PROMPTS[:1], outputs=[]), cache) == 0
    assert program.run(make_batch([(9, 10)], PROMPTS[:1]), cache) == 1


def test_a_cache_of_another_shape_is_refused() -> None:
    program = CPU[1].compile(transformer(CPU[1], Scheme("f32")), LIMITS)
    batch = make_batch([(0, 3)], PROMPTS[:1])
    for field, value in (("layers", 1), ("kv_heads", 4), ("head_dim", 32)):
        other = CPU[1].new_cache(replace(LAYOUT, **{field: value}))
        with pytest.raises(BackendError, match="cache"):
            program.run(batch, other)


def test_a_graph_that_does_not_fit_together_is_refused() -> None:
    graph = Graph()
    x = graph.embed(CPU[1].table(normal(VOCAB, 64, seed=0), "f32"))
    graph.linear(x, [weight(CPU[1], 8, 32, Scheme("f32"), 0)])
    with pytest.raises(BackendError, match="op 1 of the graph"):
        CPU[1].compile(graph, LIMITS)
    late = Graph()
    value = late.value(64)
    late.norm(value, np.ones(64, np.float32), 1e-5)
    with pytest.raises(BackendError, match="before that is made"):
        CPU[1].compile(late, LIMITS)


def test_a_program_keeps_what_it_needs() -> None:
    """Weights, vectors and views outlive the objects that they were made from."""
    program = CPU[2].compile(transformer(CPU[2], Scheme("bf16")), LIMITS)
    program.graph = Graph()
    gc.collect()
    cache = CPU[2].new_cache(LAYOUT)
    program.run(make_batch([(0, 6)], PROMPTS[:1]), cache)
    view = program.logits(0, 6)
    expected = view.copy()
    del program, cache
    gc.collect()
    np.testing.assert_array_equal(view, expected)


def test_a_program_and_its_weights_may_go_while_threads_still_read_ahead() -> None:
    """After a small step, waiting threads ask for the next one's weights, in whose place others may be by then."""
    batch, expected = make_batch([(0, 1)], PROMPTS[:1]), None
    for turn in range(30):
        backend = CPU[2]
        program = backend.compile(transformer(backend, Scheme("int8", 32), width=64 * (1 + turn % 3)), LIMITS)
        program.run(batch, backend.new_cache(LAYOUT))
        logits = np.array(program.logits(0, 1))
        if turn % 3 == 0:
            expected = logits if expected is None else expected
            np.testing.assert_array_equal(logits, expected)
        del program


def test_the_profile_names_every_op_that_ran() -> None:
    program = CPU[1].compile(transformer(CPU[1], Scheme("int8", 32)), LIMITS)
    cache = CPU[1].new_cache(LAYOUT)
    program.profile(True)
    for _ in range(3):
        all_logits(program, program.run(make_batch([(0, 6)], PROMPTS[:1]), cache))
    times = program.times()
    assert {"embed", "norm", "linear", "convert", "rope_cache", "attention", "gated_linear", "select", "head"} == {
        entry["name"] for entry in times
    }
    assert all(entry["calls"] == 3 and entry["rows"] == 18 and entry["seconds"] > 0 for entry in times)
    program.profile(False)
    program.run(make_batch([(0, 6)], PROMPTS[:1]), cache)
    assert program.times() == []


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="cpu, reference"):
        get_backend("gpu")


def isa_in_a_new_process(forced: str) -> str:
    code = (
        "from noria.backends import get_backend\n"
        "try: print(get_backend('cpu', 1).isa)\n"
        "except Exception as error: print(repr(error))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"NORIA_ISA": forced}, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def test_the_environment_forces_a_level() -> None:
    lowest = _native.available_isas()[0]
    assert isa_in_a_new_process(lowest) == lowest
    refusal = isa_in_a_new_process("vax")
    assert refusal.startswith("ConfigError")
    assert lowest in refusal
