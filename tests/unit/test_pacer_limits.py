"""What a step takes at least on a machine whose limits are known, how those are measured, and where they are kept."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from helpers.tiny_models import CASES, write_checkpoint
from noria import _native
from noria.backends.counts import count_step
from noria.backends.work import step_work
from noria.bench.steps import Phase, StepBench
from noria.config import EngineOptions, ModelOptions
from noria.pacer import limits as module
from noria.pacer.base import StepShape
from noria.pacer.limits import DeviceLimits, KnownLimits, Measuring, arithmetic, least_seconds, machine_name
from noria.plan import AttentionWork, StepWork

WORK = StepWork(
    token={"int8": 200.0, "f32": 10.0},
    output={"int8": 50.0},
    weights=100.0,
    passing=1.0,
    attention=(AttentionWork(0, "bf16", 8.0, 4.0),),
)
LIMITS = DeviceLimits({"int8": 100.0, "f32": 10.0, "bf16": 4.0}, 10.0)


def shape_of(phase: Phase) -> StepShape:
    if phase.kind == "decode":
        return StepShape(phase.seqs, phase.seqs * phase.length)
    each = phase.length * (phase.length + 1) // 2
    return StepShape(0, 0, phase.seqs, phase.seqs * phase.length, phase.seqs * each)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("phase", [Phase("decode", 3, 20), Phase("prefill", 2, 9), Phase("decode", 1, 1)], ids=str)
def test_the_function_of_the_shape_is_the_count_of_the_step(name, phase, tmp_path):
    """One step, counted op by op, against what the function says that all steps have."""
    write_checkpoint(name, tmp_path)
    options = EngineOptions(model=ModelOptions(model=str(tmp_path), quantization="int8" if name == "llama" else "auto"))
    bench = StepBench(options, [phase])
    layout = bench.cache_layout
    counted, products, read, seen = count_step(bench.graph, bench.batch(phase), layout), Counter(), 0, Counter()
    for (op, _), work in counted.items():
        if op == "attention":
            seen.update(work.operations)
            seen["bytes"] += work.stored
        else:
            products.update(work.operations)
            read += work.stored
    work, shape = step_work(bench.graph, layout), shape_of(phase)
    expected = Counter({kind: each * shape.tokens for kind, each in work.token.items()})
    expected.update({kind: each * phase.seqs for kind, each in work.output.items()})
    if phase.kind == "decode":  # otherwise rows beyond the last op that needs all of them are fewer
        assert products == expected
    assert work.weights + work.passing * shape.tokens == pytest.approx(read)
    assert arithmetic(work) == set(products) | (set(seen) - {"bytes"})
    # Attention, at limits that let nothing else take any time.
    for kind in arithmetic(work):
        only = DeviceLimits({one: 1.0 if one == kind else 1e30 for one in arithmetic(work)}, 1e30)
        none = StepWork({}, {}, 0.0, 0.0, work.attention)
        if not any(one.window for one in work.attention):
            assert least_seconds(none, only)(shape) == pytest.approx(seen[kind], abs=1e-6)
    if not any(one.window for one in work.attention):
        slow = DeviceLimits(dict.fromkeys(arithmetic(work), 1e30), 1.0)
        assert least_seconds(StepWork({}, {}, 0.0, 0.0, work.attention), slow)(shape) == pytest.approx(seen["bytes"])


def test_the_longer_of_products_and_reading_counts():
    least = least_seconds(WORK, LIMITS)
    # One row: 100 + 1 bytes take 10.1 s, products 2 + 1 + 0.5 s; attention to 5 positions 2 s each.
    assert least(StepShape(1, 5)) == pytest.approx(10.1 + 10.0)
    # Ten rows: products take longer.
    assert least(StepShape(10, 50)) == pytest.approx(35.0 + 100.0)
    # A prompt of 10 tokens: one row of output.
    assert least(StepShape(0, 0, 1, 10, 55)) == pytest.approx(30.5 + 55 * 2.0)
    assert least(StepShape()) == pytest.approx(10.0)


def test_steps_that_are_alike_can_be_summed_up():
    least = least_seconds(WORK, LIMITS)
    assert least(StepShape(3 * 2, 3 * 9), 3) == pytest.approx(3 * least(StepShape(2, 9)))
    assert least(StepShape(0, 0, 2, 20, 110), 2) == pytest.approx(2 * least(StepShape(0, 0, 1, 10, 55)))


def test_a_window_bounds_what_is_seen():
    windowed = StepWork({}, {}, 0.0, 0.0, (AttentionWork(4, "f32", 10.0, 5.0), AttentionWork(0, "f32", 10.0, 5.0)))
    products = least_seconds(windowed, DeviceLimits({"f32": 1.0}, 1e30))
    assert products(StepShape(2, 6)) == pytest.approx(2 * 3 * 10 * 2)
    assert products(StepShape(2, 200)) == pytest.approx(2 * 4 * 10 + 200 * 10)
    reads = least_seconds(windowed, DeviceLimits({"f32": 1e30}, 1.0))
    assert reads(StepShape(0, 0, 1, 10, 955)) == pytest.approx((4 + 9) * 5 + (95.5 + 4.5) * 5)


# ---------------------------------------------------------------------------------------------------- measuring


def measure(measuring, most=10_000):
    """The limits, and the number of pieces."""
    for pieces in range(1, most):
        found = measuring.piece()
        if found is not None:
            return found, pieces
    raise AssertionError("it comes to no end")


@pytest.fixture
def small(monkeypatch):
    """Quick, whatever it may find."""
    for name, value in (("_TURNS", 200), ("_TRIES", 2), ("_TRY", 1e-5), ("_PIECE", 1 << 20), ("_PIECES", 3)):
        monkeypatch.setattr(module, name, value)


def test_limits_are_measured_in_pieces(small):
    found, pieces = measure(Measuring(2, {"int8", "f32"}))
    assert pieces > 20
    assert set(found.products) == {"int8", "f32"}
    assert all(rate > 1e6 for rate in (found.read, *found.products.values()))


def test_what_was_given_up_begins_anew(small):
    measuring = Measuring(1, {"f32"})
    for _ in range(4):
        assert measuring.piece() is None
    measuring.give_up()
    assert measuring.piece() is None
    assert measure(measuring)[0].read > 0


def test_memory_is_read_in_the_pieces_that_there_is_room_for(small, monkeypatch):
    made = []

    class Piece:
        def __init__(self, pool, size):
            made.append(size)

        def read(self, *args):
            return 1.0

    monkeypatch.setattr(module._native, "LimitMemory", Piece)
    monkeypatch.setattr(module, "available_memory", lambda: 8 * 2 * module._PIECE)  # of a control group's, maybe
    measure(Measuring(1, {"f32"}))
    assert made == [module._PIECE] * 2


def test_the_level_in_use_is_left_alone(small):
    before = _native.isa()
    measure(Measuring(1, {"int8"}))
    assert _native.isa() == before


# ---------------------------------------------------------------------------------------------------- the file


def test_limits_are_kept_by_machine(tmp_path):
    path = tmp_path / "deep" / "limits.json"
    known = KnownLimits(path)
    assert known.find("a", {"int8"}) is None
    known.keep("a", DeviceLimits({"int8": 5e9}, 1e9))
    known.keep("b", DeviceLimits({"f32": 6e9}, 2e9))
    again = KnownLimits(path)
    assert again.find("a", {"int8"}) == DeviceLimits({"int8": 5e9}, 1e9)
    assert again.find("b", {"f32"}) == DeviceLimits({"f32": 6e9}, 2e9)
    assert again.find("a", {"int8", "f32"}) is None  # another model may need more
    again.keep("a", DeviceLimits({"f32": 7e9}, 3e9))
    best = DeviceLimits({"int8": 5e9, "f32": 7e9}, 3e9, times=2)
    assert again.find("a", {"int8", "f32"}) == best
    assert not best.sure({"f32"})
    assert again.keep("a", DeviceLimits({"int8": 4e9}, 2e9)) == DeviceLimits(best.products, 3e9, times=3)
    assert again.find("a", {"int8", "f32"}).sure({"f32"})
    assert not again.find("a", {"int8", "f32"}).sure({"bf16"})
    assert [one.name for one in path.parent.iterdir()] == ["limits.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"products": {"int8": "much"}, "read": 1}}',
        b'{"a": {"products": {"int8": 0}, "read": 1e9}}',
        b'{"a": {"products": {"int8": 1e9}, "read": -1}}',
        b'{"a": {"products": {"int8": 1e300}, "read": 1e9}}',
        b"\xff\xfe",
        b'{"a": {"other": ' + b"[" * 100_000,
    ],
)
def test_a_file_that_makes_no_sense_is_ignored_and_written_anew(content, tmp_path):
    path = tmp_path / "limits.json"
    path.write_bytes(content)
    known = KnownLimits(path)
    assert known.find("a", {"int8"}) is None
    known.keep("a", DeviceLimits({"int8": 5e9}, 1e9))
    assert known.find("a", {"int8"}) == DeviceLimits({"int8": 5e9}, 1e9)


def test_the_file_is_bounded(tmp_path):
    known = KnownLimits(tmp_path / "limits.json")
    for number in range(70):
        known.keep(str(number), DeviceLimits({"f32": 1e9}, 1e9))
    kept = json.loads((tmp_path / "limits.json").read_text())
    assert list(kept) == [str(number) for number in range(6, 70)]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    known = KnownLimits(tmp_path / "file" / "limits.json")
    known.keep("a", DeviceLimits({"f32": 1e9}, 1e9))
    assert known.find("a", {"f32"}) is None


def test_the_file_lies_in_norias_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NORIA_HOME", str(tmp_path))
    KnownLimits().keep("a", DeviceLimits({"f32": 1e9}, 1e9))
    assert (tmp_path / "limits.json").is_file()


def test_a_machine_is_named_by_what_its_limits_depend_on():
    names = {machine_name("avx2", 2), machine_name("avx2", 4), machine_name("amx", 2)}
    assert len(names) == 3
