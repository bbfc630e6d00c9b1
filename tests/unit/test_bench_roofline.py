"""The roofline: work is counted as by hand, every op that runs is counted, and reports hold together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_models import CASES, write_checkpoint
from noria import _native
from noria.backends.base import Batch, CacheLayout, Graph, RopeTable, Scheme, Table, Weight
from noria.backends.counts import count_step, visible_keys
from noria.bench.limits import (
    ARITHMETICS,
    MachineLimits,
    Rate,
    ReadLimit,
    best_rate,
    measure_limits,
    pinned_threads,
    read_levels,
)
from noria.bench.roofline import bound, report, working_set
from noria.bench.steps import Phase, StepBench
from noria.cli.main import main
from noria.config import DeviceOptions, EngineOptions, ModelOptions
from noria.errors import ConfigError

LIMITS = MachineLimits(
    isa="made up",
    threads=2,
    pinned=True,
    products={"int8": Rate(100e9, 200e9), "bf16": Rate(50e9, 100e9), "f32": Rate(25e9, 50e9)},
    instructions={"int8": "a", "bf16": "b", "f32": "c"},
    reads=(
        ReadLimit("L2", 1 << 20, Rate(50e9, 100e9)),
        ReadLimit("L3", 32 << 20, Rate(20e9, 40e9)),
        ReadLimit("memory", 256 << 20, Rate(10e9, 20e9)),
    ),
    wake_asleep=5e-5,
    wake_awake=1e-6,
    run=5e-7,
)


def weight(scheme: str, group: int, n: int, k: int) -> Weight:
    """With a byte per code and a scale of 4 bytes per group, or plain floats."""
    nbytes = {"int8": n * k + 4 * n * -(-k // (group or 1)), "int4": n * k // 2 + 8 * n * -(-k // (group or 1))}
    return Weight(Scheme(scheme, group), n, k, nbytes.get(scheme, 4 * n * k), None)


def batch(*spans: tuple[int, int]) -> Batch:
    """Sequence i computes positions spans[i][0] … spans[i][1] - 1; its last token's logits are wanted."""
    counts = [stop - start for start, stop in spans]
    positions = np.concatenate([np.arange(*span) for span in spans]).astype(np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    nothing = np.zeros(len(spans), np.int32)
    tables = np.zeros((len(spans), 8), np.int32)
    ends = np.array([stop for _, stop in spans], np.int32)
    return Batch(positions, positions, positions, starts, ends, nothing, tables, starts[1:] - 1)


def small_graph() -> Graph:
    """One layer of 4 query and 2 KV heads of 8 dims, width 64, in int8 with groups of 32; gate and up in int4."""
    graph = Graph()
    table = Table(10, 64, 10 * 64 * 2, None)
    ones = np.ones(64, np.float32)
    rope = RopeTable(np.ones((9, 4), np.float32), np.ones((9, 4), np.float32))
    x = graph.embed(table)
    h = graph.norm(x, ones, 1e-5)
    qkv = graph.linear(h, (weight("int8", 32, 32, 64), weight("int8", 32, 16, 64), weight("int8", 32, 16, 64)))
    q = graph.rope_cache(qkv, 0, 4, 2, 8, rope)
    h = graph.attention(q, 0, 4, 2, 8, 1.0, window=0)
    h, x = graph.select(h), graph.select(x)
    x = graph.linear(h, (weight("int8", 32, 64, 32),), residual=x)
    h = graph.norm(x, ones, 1e-5)
    h = graph.gated_linear(h, weight("int4", 32, 96, 64), weight("int4", 32, 96, 64), "silu")
    x = graph.linear(h, (weight("f32", 0, 64, 96),), residual=x)
    graph.hidden = graph.norm(x, ones, 1e-5)
    graph.head = weight("bf16", 0, 10, 64)
    return graph


def test_a_small_step_is_counted_as_by_hand() -> None:
    layout = CacheLayout(1, 2, 8, 8, 4, "int8")
    works = count_step(small_graph(), batch((0, 3), (4, 5)), layout)  # 4 tokens, 2 of them outputs
    form = 64 + 8 * 2  # codes, and a scale and a sum for each of two groups
    embed = works["embed", 0]
    assert (embed.stored, embed.passing) == (4 * 64 * 2, 4 * 64 * 4)
    assert works["norm", 1].passing == 4 * (4 * 64 + form)
    qkv = works["linear", 2]
    assert qkv.operations == {"int8": 2 * 4 * 64 * 64}
    assert qkv.stored == 64 * 64 + 64 * 2 * 4
    assert qkv.passing == 4 * (form + 4 * 64)
    rope = works["rope_cache", 3]
    assert (rope.stored, rope.passing) == (2 * 4 * 2 * (8 + 4), 4 * 4 * (64 + 32))
    attention = works["attention", 4]
    assert attention.operations == {"int8": 4 * (1 + 2 + 3 + 5) * 4 * 8}
    assert attention.stored == 2 * (3 + 5) * 2 * (8 + 4)
    # Only rows that need logits go on.
    assert works["select", 5].passing == 2 * 2 * 4 * 32
    assert works["convert", 5].passing == 2 * (4 * 32 + 32 + 8)
    assert works["linear", 7].operations == {"int8": 2 * 2 * 64 * 32}
    gated = works["gated_linear", 9]
    assert gated.operations == {"int8": 2 * 2 * 2 * 96 * 64}
    assert gated.stored == 2 * (96 * 32 + 8 * 96 * 2)
    # 96 floats per row are padded to 128 for the product, which is a conversion of its own.
    assert works["convert", 9].passing == 2 * (4 * 96 + 4 * 96)
    assert works["linear", 10].operations == {"f32": 2 * 2 * 64 * 96}
    assert works["head", None].operations == {"bf16": 2 * 2 * 10 * 64}
    assert works["head", None].passing == 2 * (2 * 64 + 4)
    assert ("convert", 2) not in works


@pytest.mark.parametrize(("window", "seen", "held"), [(0, 1 + 2 + 3 + 10, 3 + 10), (2, 1 + 2 + 2 + 2, 3 + 2)])
def test_keys_that_tokens_see(window: int, seen: int, held: int) -> None:
    assert visible_keys(batch((0, 3), (9, 10)), window) == (seen, held)


def test_an_op_is_bound_by_the_longest_of_its_bounds() -> None:
    works = count_step(small_graph(), batch((0, 3), (4, 5)), CacheLayout(1, 2, 8, 8, 4, "int8"))
    work = works["linear", 2]
    by_bytes = bound(work, LIMITS, stored_rate=1e9)
    assert (by_bytes.by, by_bytes.seconds) == ("stored", pytest.approx(work.stored / 1e9))
    by_products = bound(work, LIMITS, stored_rate=1e18)
    assert (by_products.by, by_products.seconds) == ("int8", pytest.approx(work.operations["int8"] / 200e9))
    copied = bound(works["select", 5], LIMITS, stored_rate=1e9)
    assert (copied.by, copied.seconds) == ("L2", pytest.approx(works["select", 5].passing / 100e9))


def test_activations_are_read_from_the_nearest_level_that_holds_them() -> None:
    assert [LIMITS.read(size << 20).level for size in (1, 4, 5, 32, 33, 5000)] == [
        "L2",
        "L2",
        "L3",
        "L3",
        *["memory"] * 2,
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_op_that_runs_is_counted_and_no_other(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    options = EngineOptions(model=ModelOptions(model=str(tmp_path), quantization="int8" if name == "llama" else "auto"))
    phases = [Phase("decode", 3, 20), Phase("prefill", 2, 9)]
    bench = StepBench(options, phases)
    for phase in phases:
        works = count_step(bench.graph, bench.batch(phase), bench.cache_layout)
        times = bench.measure(phase, 0.0)
        assert set(times.ops) == set(works)
        found = report(phase, works, times, LIMITS, 1e9)
        assert sum(row.count for row in found.rows) == len(works)
        assert sum(row.stored for row in found.rows) == working_set(works.values())
        assert found.limit == pytest.approx(sum(bound(work, LIMITS, 1e9).seconds for work in works.values()))


def test_weights_are_counted_once_per_step(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    phase = Phase("decode", 1, 1)
    bench = StepBench(EngineOptions(model=ModelOptions(model=str(tmp_path), dtype="f32")), [phase])
    works = count_step(bench.graph, bench.batch(phase), bench.cache_layout)
    layout = bench.cache_layout
    cache = 2 * layout.block_bytes // layout.block_size  # one token of all layers, written and read
    ropes = 2 * layout.head_dim // 2 * 4
    table = (320 - 1) * 96 * 4  # but one row
    assert working_set(works.values()) - cache == bench.weight_bytes - ropes - table


def test_limits_are_measured() -> None:
    found = measure_limits(2, seconds=0.002, most_bytes=8 << 20)
    assert set(found.products) == set(ARITHMETICS)
    rates = [*found.products.values(), *(read.rate for read in found.reads)]
    assert all(rate.one > 0 and rate.all > 0 for rate in rates)
    assert min(found.wake_asleep, found.wake_awake, found.run) > 0
    assert json.loads(json.dumps(found.as_json()))["products"]["int8"]["all"] > 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_threads_are_let_go_again() -> None:
    before = os.sched_getaffinity(0)
    pool = _native.Pool(2)
    with pinned_threads(pool) as pinned:
        assert len(os.sched_getaffinity(0)) == (1 if pinned else len(before))
    assert os.sched_getaffinity(0) == before
    assert not _native.limit_pin(_native.Pool(len(before) + 1), True)  # one for each there is not
    assert os.sched_getaffinity(0) == before


def topology(l2: int, l3: int, available: int = 16 << 30) -> dict[str, Any]:
    return {"l2_bytes": l2, "l3_bytes": l3, "memory_available_bytes": available}


def test_levels_are_stretches_that_the_level_below_does_not_hold() -> None:
    levels = read_levels(topology(2 << 20, 480 << 20), 2)
    assert [level.level for level in levels] == ["L2", "L3", "memory"]
    assert levels[0].private
    assert levels[0].bytes == 1 << 20
    assert 2 * 2 * (2 << 20) < levels[1].bytes <= 240 << 20
    assert levels[2].bytes == 960 << 20
    # An L3 that is hardly larger than the L2s cannot be told from them; a cache that is not reported is left out.
    assert [level.level for level in read_levels(topology(2 << 20, 8 << 20), 4)] == ["L2", "memory"]
    assert [level.level for level in read_levels(topology(0, 0), 4)] == ["memory"]
    assert read_levels(topology(1 << 20, 32 << 20, available=64 << 20), 2)[-1].bytes == 16 << 20


def test_the_best_rate_is_the_best_of_the_tries() -> None:
    asked: list[int] = []

    def work(repeats: int) -> int:
        asked.append(repeats)
        return repeats if len(asked) != 3 else 10**9

    assert best_rate(work, 1e-9) > 1e9
    assert len(asked) >= 6


def test_a_long_context_is_filled_with_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("llama", tmp_path / "model")
    monkeypatch.setattr("noria.bench.steps._COMPUTED", 32)
    phases = [Phase("decode", seqs, length) for seqs, length in ((1, 100), (2, 100), (3, 20))]
    options = EngineOptions(model=ModelOptions(model=str(tmp_path / "model")), device=DeviceOptions(threads=1))
    bench = StepBench(options, phases)
    computed: list[int] = []
    copied: list[tuple[int, int]] = []

    class Spy:
        def run(self, batch: Batch, cache: Any) -> None:
            computed.extend(batch.positions.tolist())

        def copy_blocks(self, pairs: np.ndarray[Any, Any]) -> None:
            copied.extend((int(a), int(b)) for a, b in pairs)

    spied: Any = bench
    spied.program = spied._cache = Spy()
    bench.prepare(phases[0])
    assert computed == list(range(32))
    assert copied == [(0, 2), (1, 3), (0, 4), (1, 5), (0, 6)]
    bench.prepare(phases[1])  # the same context: one more sequence
    assert len(computed) == 32
    assert copied[5:] == [(block, block + 7) for block in range(7)]
    bench.prepare(phases[2])
    assert computed[32:] == list(range(19))
    assert copied[12:] == [(0, 2), (1, 3), (0, 4), (1, 5)]


def test_more_memory_than_there_is_cannot_be_read() -> None:
    pool = _native.Pool(2)
    memory = _native.LimitMemory(pool, 1 << 20)
    assert memory.read(pool, 1 << 20, True, repeats=3) == 3 << 20
    assert memory.read(pool, 1 << 20, False, ahead=4096) == 1 << 20
    with pytest.raises(ValueError, match="less memory"):
        memory.read(pool, (1 << 20) + 1, True)
    with pytest.raises(ValueError, match="too little"):
        memory.read(pool, 512, True)
    with pytest.raises(ValueError, match="scheme"):
        _native.limit_products(pool, "int9", 1, 1)


def test_limits_are_those_of_the_best_level() -> None:
    before, levels = _native.isa(), _native.available_isas()
    try:
        _native.select_isa(levels[0])
        found = measure_limits(1, 0.002, 8 << 20)
        assert found.isa == levels[-1]
        assert _native.isa() == levels[0]  # the kernels go on at theirs
        _native.select_isa(levels[-1])
        assert found.instructions["int8"] == _native.limit_instruction("int8")
    finally:
        _native.select_isa(before)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_operations_are_counted_at_every_level(isa: str) -> None:
    pool, before = _native.Pool(1), _native.isa()
    try:
        _native.select_isa(isa)
        for scheme in ("f32", "bf16", "int8", "int4"):
            one = _native.limit_products(pool, scheme, 1, 1)
            assert one > 0
            assert _native.limit_products(pool, scheme, 10, 3) == 30 * one
            assert _native.limit_instruction(scheme)
    finally:
        _native.select_isa(before)


def test_the_command_reports_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noria.bench.limits.measure_limits", lambda threads: LIMITS)
    write_checkpoint("llama", tmp_path / "model")
    path = tmp_path / "out.json"
    flags = ["--batch", "1,2", "--context", "30", "--chunk", "12", "--seconds", "0", "--json", str(path)]
    with pytest.raises(SystemExit) as end:
        main(["bench", "roofline", "--model", str(tmp_path / "model"), *flags])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "decode 2 × 30" in text
    assert "prefill 12" in text
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(one["phase"], one["seqs"], one["length"]) for one in found["phases"]] == [
        ("decode", 1, 30),
        ("decode", 2, 30),
        ("prefill", 1, 12),
    ]
    for phase in found["phases"]:
        assert phase["step_ms"] > 0
        assert phase["of_limit"] > 0
        assert {op["bound_by"] for op in phase["ops"]} <= {"int8", "bf16", "f32", "stored", "L2", "L3", "memory"}
    assert found["limits"]["isa"] == "made up"
    assert found["machine"]["cpu"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0", "--chunk", "0"], "nothing is left"),
        (["--batch", "two"], "--batch: must be positive numbers"),
        (["--preset", "W9"], "there is no preset"),
        (["--context", "600"], "exceed the model's context"),
    ],
)
def test_wrong_phases_are_refused(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("noria.bench.limits.measure_limits", lambda threads: LIMITS)
    write_checkpoint("llama", tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["bench", "roofline", "--model", str(tmp_path), *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_presets_say_what_is_measured() -> None:
    from noria.cli.bench_machine import _phases

    assert _phases("w1", None, None, None) == [Phase("decode", 100, 192), Phase("prefill", 8, 128)]
    assert _phases("W3", None, None, None) == [Phase("prefill", 1, 1024)]
    assert _phases("W2", "4", None, None) == [Phase("decode", 4, 192), Phase("prefill", 1, 128)]


def test_other_backends_have_no_clocks(tmp_path: Path) -> None:
    options = ModelOptions(model=str(tmp_path))
    reference = EngineOptions(model=options, device=DeviceOptions(backend="reference"))
    with pytest.raises(ConfigError, match="--backend"):
        StepBench(reference, [Phase("decode", 1, 1)])
