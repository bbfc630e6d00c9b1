"""Products whose float rows are never stored: the largest logits straight from the head, and a gated product straight
into the form that the next product reads. Both must be exactly what the long way round yields, at every ISA level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from noria.backends import get_backend
from noria.backends.base import Backend, Batch, CacheLayout, DenseSource, Graph, Limits, Scheme, SlotSampling
from noria.errors import BackendError
from noria.params import SamplingParams

ROWS, WIDTH = 23, 64
LIMITS = Limits(max_tokens=64, max_outputs=ROWS, max_seqs=1)
SCHEMES = [Scheme("f32"), Scheme("bf16"), Scheme("int8", 32), Scheme("int8", 64), Scheme("int4", 32)]


def normal(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def run(program: Any, backend: Backend, ids: NDArray[np.int32]) -> None:
    """One output row per token; no op of these graphs looks at anything else."""
    count = len(ids)
    every = np.arange(count, dtype=np.int32)
    batch = Batch(ids, every, every, np.array([0, count], np.int32), every[-1:] + np.int32(1),
                  np.zeros(1, np.int32), np.arange(8, dtype=np.int32)[None], every)  # fmt: skip
    assert program.run(batch, backend.new_cache(CacheLayout(1, 1, 8, 8, 8, "f32"))) == count


def head_of(backend: Backend, table: NDArray[np.float32], values: NDArray[np.float32], scheme: Scheme) -> Graph:
    graph = Graph()
    graph.hidden = graph.select(graph.embed(backend.table(table, "f32")))
    graph.head = backend.pack(DenseSource(values), scheme)
    return graph


def taken_from_logits(backend: Backend, logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """What the sampler takes of logits, greedily."""
    sampler = backend.new_sampler(1, logits.shape[1])
    sampler.admit(0, SlotSampling(SamplingParams(temperature=0.0, seed=0), 0, (), np.zeros(1, np.int32), 1))
    rows = np.zeros(len(logits), np.int32)
    return sampler.sample(logits.copy(), rows, rows)[0]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("vocab", [5, 64, 1000])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.3, 0.0), (2.0, 1.5)])
def test_largest_is_what_the_sampler_takes(isa: str, scheme: Scheme, vocab: int, scale: float, softcap: float) -> None:
    # Outputs far apart are equal: largest logits are tied across panels and threads. A small cap ties more of them.
    values = normal(vocab, WIDTH, seed=1)[np.random.default_rng(2).integers(0, max(vocab // 3, 1), vocab)]
    table = normal(ROWS, WIDTH, seed=3)
    table[4] = 0  # all logits are equal
    for threads in (1, 2, 3):
        backend = get_backend("cpu", threads)
        graph = head_of(backend, table, values, scheme)
        graph.logit_scale, graph.logit_softcap = scale, softcap
        program = backend.compile(graph, LIMITS)
        run(program, backend, np.arange(ROWS, dtype=np.int32))
        expected = taken_from_logits(backend, np.array(program.logits(0, ROWS)))
        assert expected[4] == 0
        assert program.largest(0, ROWS).tolist() == expected.tolist()
        assert program.largest(7, 12).tolist() == expected[7:12].tolist()
        assert program.largest(3, 3).tolist() == []


def test_largest_of_logits_that_are_no_numbers(isa: str) -> None:
    backend = get_backend("cpu", 2)
    values = np.ones((130, WIDTH), np.float32)
    values[:, 1] = np.arange(130) - 60
    table = np.zeros((4, WIDTH), np.float32)
    table[0, 1] = np.inf  # minus infinity, NaN at 60, infinity from 61 on
    table[1, 1] = np.nan
    table[2, 1] = -np.inf  # infinity up to 59
    table[3, :2] = 3e38  # above float32's range from 61 on
    program = backend.compile(head_of(backend, table, values, Scheme("f32")), LIMITS)
    run(program, backend, np.arange(4, dtype=np.int32))
    expected = taken_from_logits(backend, np.array(program.logits(0, 4)))
    assert expected.tolist() == [61, 0, 0, 61]
    assert program.largest(0, 4).tolist() == expected.tolist()


def test_largest_of_rows_that_were_not_computed(isa: str) -> None:
    backend = get_backend("cpu", 2)
    graph = head_of(backend, normal(ROWS, WIDTH, seed=1), normal(70, WIDTH, seed=2), Scheme("f32"))
    program = backend.compile(graph, LIMITS)
    run(program, backend, np.arange(9, dtype=np.int32))
    assert len(program.largest(0, 9)) == 9
    for start, stop in [(0, 10), (-1, 3), (5, 4)]:
        with pytest.raises(BackendError):
            program.largest(start, stop)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("between", [64, 192, 80])
def test_a_gated_product_writes_the_next_ones_form(
    isa: str, scheme: Scheme, activation: Any, biased: bool, between: int
) -> None:
    backend = get_backend("cpu", 2)
    gate, up = (backend.pack(DenseSource(normal(between, WIDTH, seed=s) / 8), Scheme("bf16")) for s in (1, 2))
    down = backend.pack(DenseSource(normal(48, between, seed=3) / 8), scheme)
    biases = [normal(between, seed=s) if biased else None for s in (4, 5)]
    table = normal(ROWS, WIDTH, seed=6)
    table[5] = 0

    def program(also_floats: bool) -> Any:
        graph = Graph()
        x = graph.embed(backend.table(table, "f32"))
        gated = graph.gated_linear(x, gate, up, activation, *biases)
        if also_floats:  # then they are stored, and converted afterwards
            graph.norm(gated, np.ones(between, np.float32), 1e-5)
        graph.hidden = graph.select(graph.linear(gated, [down]))
        graph.head = backend.pack(DenseSource(np.eye(48, dtype=np.float32)), Scheme("f32"))
        return backend.compile(graph, LIMITS)

    straight, long_way = program(False), program(True)
    if between == 192 and scheme.name != "f32":
        assert straight.buffer_bytes < long_way.buffer_bytes
    for count in (1, 3, 4, 5, ROWS):
        ids = np.arange(count, dtype=np.int32)
        for made in (straight, long_way):
            run(made, backend, ids)
        np.testing.assert_array_equal(straight.logits(0, count), long_way.logits(0, count))


@pytest.mark.parametrize("scheme", [Scheme("int8", 32), Scheme("int8", 64), Scheme("int4", 32)], ids=str)
def test_rows_that_are_no_numbers_do_not_depend_on_their_number(isa: str, scheme: Scheme) -> None:
    backend = get_backend("cpu", 1)
    gate, up = (backend.pack(DenseSource(np.eye(64, WIDTH, dtype=np.float32)), Scheme("f32")) for _ in range(2))
    table = normal(8, WIDTH, seed=1)
    table[1, 3] = 3e38  # squared: infinite
    table[2, 5::16] = 3e38
    table[3] = 3e38
    table[4, 9] = np.nan
    table[5, 7::16] = np.nan
    table[6] = np.nan
    graph = Graph()
    gated = graph.gated_linear(graph.embed(backend.table(table, "f32")), gate, up, "silu")
    graph.hidden = graph.select(graph.linear(gated, [backend.pack(DenseSource(normal(48, 64, seed=2)), scheme)]))
    graph.head = backend.pack(DenseSource(np.eye(48, dtype=np.float32)), Scheme("f32"))
    program = backend.compile(graph, LIMITS)

    def rows(ids: list[int]) -> NDArray[np.float32]:
        run(program, backend, np.array(ids, np.int32))
        return np.array(program.logits(0, len(ids)))

    together = rows(list(range(8)))
    for row in range(8):
        np.testing.assert_array_equal(rows([row])[0], together[row])
