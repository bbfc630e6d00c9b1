"""`noria bench adaptive`: the trace is frozen, phases are kept apart, goodput is counted right, replays are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adaptive_trace
import msgspec
import pytest

from helpers.pages import read_page
from helpers.tiny_models import write_checkpoint
from noria.bench.adaptive import PACER, Turn, by_phase, calibrate, compete, verdict
from noria.bench.http import Record
from noria.bench.offline import Sampler, run_offline, sizes
from noria.bench.simulate import VirtualClock, numbered_requests, simulated_engine, small_machine
from noria.bench.trace import (
    Aims,
    Calibration,
    Load,
    Speed,
    Trace,
    TracePhase,
    aims,
    load_trace,
    read_calibration,
    read_trace,
)
from noria.bench.workloads import BenchRequest
from noria.cli.main import main
from noria.errors import ConfigError
from noria.pacer.base import StepShape

FROZEN = "709dbf27be0c2002f61fe59f8b7d6840b548862744f34d5ed5e1097a4873caef"
LOAD = Load(requests=4, prompt=2, output=2, small=1, large=4)
SPEED = Speed(batch=1, request=1.0, ttft=1.0, tpot=1.0)


def tiny_trace(**changes: Any) -> Trace:
    phases = [
        TracePhase(name="first", length=10.0, requests=[(0.0, 3, 2), (5.0, 3, 2)]),
        TracePhase(name="second", length=5.0, requests=[(1.0, 4, 1)]),
    ]
    return Trace(
        **({"about": "", "calibration": LOAD, "ttft_place": 0.5, "tpot_place": 0.5, "phases": phases} | changes)
    )


def record(ttft: float, tpot: float = 0.0, tokens: int = 2, error: str | None = None) -> Record:
    chunks = [ttft + tpot * index for index in range(tokens)]
    return Record(start=0.0, end=chunks[-1], chunks=chunks, output_tokens=tokens, error=error)


# ---------------------------------------------------------------------------------------------------- the trace


def test_the_trace_is_frozen() -> None:
    trace, digest = load_trace()
    assert digest == FROZEN
    assert [phase.name for phase in trace.phases] == ["calm", "ramp", "burst", "long prompts", "calm again"]
    assert [len(phase.requests) for phase in trace.phases] == [20, 374, 178, 352, 20]
    assert max(prompt + output for _, prompt, output in trace.rows()) <= 1024
    made = adaptive_trace.make_trace()
    assert read_trace(adaptive_trace.dump(made).encode()) == trace


def test_times_of_phases_and_requests() -> None:
    trace = tiny_trace()
    assert trace.rows() == [(0.0, 3, 2), (5.0, 3, 2), (11.0, 4, 1)]
    assert trace.owners() == [0, 0, 1]
    assert [(span.name, span.start, span.end) for span in trace.spans(2.0)] == [
        ("first", 0.0, 20.0),
        ("second", 20.0, 30.0),
    ]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "has no phases"),
        ([{"name": "a", "length": 1.0, "requests": []}], "phase 'a' are not in order"),
        ([{"name": "a", "length": 1.0, "requests": [[0.5, 1, 1], [0.2, 1, 1]]}], "phase 'a' are not in order"),
        ([{"name": "a", "length": 1.0, "requests": [[1.5, 1, 1]]}], "not in order within it"),
        ([{"name": "a", "length": 1.0, "requests": [[0.5, 0, 1]]}], r"cannot be used: Expected `int` >= 1"),
        ([{"name": "a", "length": 1.0, "requests": [[0.5, 10**9, 1]]}], r"cannot be used: Expected `int` <= 1048576"),
        ([{"name": "a", "length": 1.0, "requests": [[0.5, 1]]}], "cannot be used"),
    ],
)
def test_what_is_no_trace_is_refused(phases: list[Any], message: str) -> None:
    raw = msgspec.to_builtins(tiny_trace()) | {"phases": phases}
    with pytest.raises(ConfigError, match=message):
        read_trace(json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_place", 1e308),
        ("tpot_place", -1.0),
        *(("calibration", {name: 0}) for name in ("requests", "prompt", "output", "small")),
        ("calibration", {"large": 5000}),
    ],
)
def test_numbers_of_a_trace_have_ranges(field: str, value: Any) -> None:
    raw: dict[str, Any] = msgspec.to_builtins(tiny_trace())
    raw[field] = raw[field] | value if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=r"cannot be used: Expected `(int|float)` [<>]= "):
        read_trace(json.dumps(raw).encode())


def test_names_of_phases_are_texts(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = json.loads(small.read_text(encoding="utf-8"))
    raw["phases"][0]["name"] = "[/b]<script>"
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    html = tmp_path / "odd.html"
    assert bench("--simulate", "--trace", str(path), "--no-pacer", "--sizes", "4", "--html", str(html)) == 0
    assert "[/b]<script>" in capsys.readouterr().out
    assert "<script>" not in html.read_text(encoding="utf-8")


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace: .*none\.json cannot be read"):
        load_trace(tmp_path / "none.json")


# ---------------------------------------------------------------------------------------------------- accounting


def test_objectives_lie_between_what_the_sizes_give() -> None:
    small = Speed(batch=1, request=2.0, ttft=8.0, tpot=0.01)
    large = Speed(batch=4, request=1.0, ttft=2.0, tpot=0.04)
    found = Calibration(setup="m", small=small, large=large)
    assert found.unit == 1.0
    goals = aims(tiny_trace(), found)
    assert (goals.ttft, goals.tpot) == (pytest.approx(4.0), pytest.approx(0.02))
    assert aims(tiny_trace(tpot_place=1.0), found, ttft_ms=5.0) == Aims(ttft=0.005, tpot=pytest.approx(0.04))


def test_a_request_counts_where_it_arrived_and_only_within_both() -> None:
    goals = Aims(ttft=1.0, tpot=0.1)
    records = [record(0.5, 0.05), record(0.5, 0.2), record(0.9, tokens=1)]
    first, second = by_phase(tiny_trace(), 0.5, records, goals)
    assert (first["phase"], first["met"], first["requests"]) == ("first", 1, 2)
    assert first["goodput_requests_per_s"] == pytest.approx(1 / 5.0)
    assert second["goodput_requests_per_s"] == pytest.approx(1 / 2.5)
    assert first["tpot_ms"]["max"] == pytest.approx(200)
    assert not goals.met(record(1.1, 0.05))
    assert not goals.met(record(0.5, 0.05, error="gone"))


def test_the_verdict_compares_with_the_best_of_each_phase() -> None:
    """Of three phases' requests, "8" meets those of the first, "64" those of the second, the pacer of both."""
    late = record(9.0)
    good = record(0.1)
    answers = {"8": [good, good, late], "64": [good, late, good], PACER: [good, good, good]}
    goals = Aims(ttft=1.0, tpot=1.0)
    found = compete(list(answers), 3, tiny_trace(), 1.0, goals, lambda name: Turn(0.0, answers[name]))
    said = verdict(found)
    assert said["best_of_phases"] == {"met": 3.0, "sizes": ["8", "64"]}
    assert said["best_single"] == {"met": 2.0, "size": "8", "of_best_of_phases": pytest.approx(2 / 3)}
    assert said["pacer"]["of_best_of_phases"] == 1.0
    assert said["pacer"]["over_best_single"] == 1.5
    assert said["pacer"]["of_best_by_phase"] == [1.0, 1.0]
    assert len(said["pacer"]["turns"]) == 3
    assert "pacer" not in verdict(found[:2])
    assert verdict(found[2:]) == {}


def test_turns_are_medians_and_everybody_has_a_turn_before_anybody_has_two() -> None:
    order: list[str] = []

    def run(name: str) -> Turn:
        order.append(name)
        turn = len(order) // 2
        return Turn(0.0, [record(0.1)] * turn + [record(9.0)] * (3 - turn))

    found = compete(["8", "16"], 3, tiny_trace(), 1.0, Aims(ttft=1.0, tpot=1.0), run)
    assert order == ["8", "16"] * 3
    assert [one.all_met for one in found] == [1.0, 2.0]
    assert (found[0].median, found[1].met(1)) == (1, 0.0)


# ---------------------------------------------------------------------------------------------------- virtual time


def test_steps_take_the_time_they_are_said_to_take() -> None:
    clock = VirtualClock()
    asked: list[StepShape] = []

    def seconds(shape: StepShape) -> float:
        asked.append(shape)
        return 0.01 * shape.tokens

    core = simulated_engine(adaptive_trace.fixed(8), clock, seconds)
    start, sampler = clock.now(), Sampler()
    requests = [BenchRequest("", tuple(range(1, 11)), 3, 0.0), BenchRequest("", tuple(range(20, 25)), 2, 5.0)]
    first, second = run_offline(core, requests, None, sampler=sampler, clock=clock)
    assert first.start == start
    assert first.ttft == pytest.approx(0.1)
    assert first.tpot == pytest.approx(0.01)
    assert second.start == start + 5.0  # when it was due, whenever the engine looked
    assert second.ttft == pytest.approx(0.05, abs=0.0011)
    assert [(one.prefill_tokens, one.decode_rows, one.decode_context) for one in asked[:3]] == [
        (10, 0, 0),
        (0, 1, 11),
        (0, 1, 12),
    ]
    assert sizes(sampler.samples)["batch"] == {"least": 8, "median": 8.0, "most": 8}


def test_virtual_runs_repeat_exactly() -> None:
    rows = numbered_requests([(0.1 * turn, 20 + turn, 5) for turn in range(30)])
    runs = [adaptive_trace.simulate(adaptive_trace.fixed(4), rows, small_machine, 0.2) for _ in range(2)]
    assert runs[0].records == runs[1].records


def test_the_calibration_tells_the_sizes_apart() -> None:
    trace, _ = load_trace()
    load = numbered_requests([(0.0, trace.calibration.prompt, trace.calibration.output)] * 64)
    found = calibrate(
        "m", trace, lambda size: adaptive_trace.simulate(adaptive_trace.fixed(size), load, small_machine, 0.0).records
    )
    assert found.small.ttft > found.large.ttft
    assert found.small.tpot < found.large.tpot
    assert found.small.request > found.large.request == found.unit


def test_no_single_size_does_for_all_phases_but_the_pacer_does() -> None:
    """In virtual time, with the sizes that are the best of some phase; the others reach less."""
    found = adaptive_trace.compete_in_virtual_time(load_trace()[0], ("8", "64", PACER), 1.0, 0.0)
    said = verdict(found)
    assert said["best_of_phases"]["sizes"][1:4] == ["64", "64", "8"]
    assert said["best_single"]["of_best_of_phases"] <= 0.75
    assert said["pacer"]["of_best_of_phases"] >= 0.95
    assert said["pacer"]["over_best_single"] >= 1.25


# ---------------------------------------------------------------------------------------------------- the command


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", "adaptive", *arguments])
    return int(end.value.code or 0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trace of two phases: a group of short prompts with long answers, then one of long prompts."""
    load = Load(requests=32, prompt=64, output=32, small=4, large=32)
    group = [(0.1 * index, 16, 40) for index in range(24)]
    prompts = [(0.1 * index, 200, 8) for index in range(16)]
    phases = [
        TracePhase(name="short", length=150.0, requests=group),
        TracePhase(name="long <prompts>", length=150.0, requests=prompts),
    ]
    path = tmp_path / "trace.json"
    path.write_bytes(msgspec.json.encode(tiny_trace(calibration=load, phases=phases)))
    return path


def test_the_command_reports_everybody(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "page.html", tmp_path / "figures.json"
    wanted = ("--simulate", "--trace", str(small), "--sizes", "4,32", "--repeat", "2", "--max-batch-size", "64")
    assert bench(*wanted, "--json", str(figures), "--html", str(out)) == 0
    said = capsys.readouterr().out
    assert "long <prompts>" in said
    assert "Best single size" in said
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert [one["name"] for one in found["contestants"]] == ["4", "32", "pacer"]
    assert found["verdict"]["pacer"]["met"] == found["contestants"][2]["met"]
    turn = found["contestants"][2]["turns"][1]
    assert [phase["phase"] for phase in turn["phases"]] == ["short", "long <prompts>"]
    assert turn["whole"]["requests"] == 40
    samples = found["contestants"][2]["samples"]
    assert {len(column) for column in samples.values()} == {len(samples["at"])}
    assert max(samples["batch"]) <= 64
    page = read_page(out.read_text(encoding="utf-8"))
    series = {"4", "32", "pacer", "batch size", "running", "queue", "token budget", "as it was", "TTFT", "TPOT"}
    assert series <= set(page.lines)
    assert {"long <prompts>", "TTFT objective", "TPOT objective"} <= set(page.texts)
    assert page.charts == 10


def test_objectives_and_calibration_can_be_given(tmp_path: Path, small: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    wanted = ("--simulate", "--trace", str(small), "--no-pacer", "--sizes", "4")
    assert bench(*wanted, "--json", str(first)) == 0
    before = json.loads(first.read_text(encoding="utf-8"))
    before["calibration"]["large"]["request"] *= 2
    first.write_text(json.dumps(before), encoding="utf-8")
    again = ("--calibration", str(first), "--slo-ttft-ms", "50", "--json", str(second))
    assert bench(*wanted, *again) == 0
    after = json.loads(second.read_text(encoding="utf-8"))
    assert after["calibration"] == before["calibration"]
    assert after["objectives_ms"] == {"ttft": 50.0, "tpot": pytest.approx(before["objectives_ms"]["tpot"])}
    seconds = [found["contestants"][0]["turns"][0]["whole"]["seconds"] for found in (before, after)]
    assert seconds[1] == pytest.approx(2 * seconds[0])  # the unit is the machine's


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sizes", "0", "--no-pacer"), "--sizes: nothing is left to be replayed"),
        (("--sizes", "8,x"), "--sizes: must be positive numbers"),
        (("--sizes", "2000"), "--sizes: must be in 1…1024, got 2000"),
        (("--max-batch-size", "0"), "--max-batch-size: must be in 1…1024, got 0"),
        (("--trace", "none.json"), "--trace: none.json cannot be read"),
        (("--calibration", "none.json"), "--calibration: none.json cannot be read"),
        (("--slo-tpot-ms", "0"), "--slo-tpot-ms: must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(
    flags: tuple[str, ...], message: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--simulate", "--trace", str(small), *flags) == 2
    assert message in capsys.readouterr().err


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no calibration"):
        read_calibration(path, "m")
    found = Calibration(setup="m", small=SPEED, large=SPEED)
    path.write_bytes(msgspec.json.encode({"calibration": found}))
    assert read_calibration(path, "m") == found
    with pytest.raises(ConfigError, match="was calibrated with m; this is other"):
        read_calibration(path, "other")


def test_a_real_engine_replays(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "model")
    phases = [TracePhase(name="only", length=50.0, requests=[(2.0 * index, 5, 4) for index in range(12)])]
    trace, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    load = Load(requests=8, prompt=5, output=4, small=1, large=8)
    trace.write_bytes(msgspec.json.encode(tiny_trace(calibration=load, phases=phases)))
    shared = ("--model", str(tmp_path / "model"), "--threads", "1", "--trace", str(trace))
    assert bench(*shared, "--sizes", "2", "--max-batch-size", "4", "--json", str(figures)) == 0
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert [one["turns"][0]["whole"]["completed"] for one in found["contestants"]] == [12, 12]
    assert found["calibration"]["large"]["request"] > 0
    assert found["machine"]["cpu"]
