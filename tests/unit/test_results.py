"""RESULTS.md from stored measurements: verdicts, tables, charts, and the stages of a whole run."""

from __future__ import annotations

import json
import math
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import growth
import measure_all
import pytest
import report
import shapes
from demands import Facts, Verdict, verdicts

from noria.bench.charts import Bar, Series, bars, lines
from noria.bench.steps import Phase
from peers.base import Unavailable
from peers.perplexity import FIRST, LENGTH, Book, perplexity

WHERE = {"model": "smollm2", "commit": "abc", "cpu": "CPU", "isa": "amx", "threads": 2, "time": "now"}


def run(preset: str, engine: str, variant: str, turn: int, rate: float, ttft: float = 100.0) -> dict[str, Any]:
    latency = {"p50": ttft, "p99": 2 * ttft}
    figures = {"output_tokens_per_s": rate, "wall_s": 1000 / rate, "prompt_tokens": 1000, "output_tokens": 1000}
    figures |= {"completed": 1, "ttft_ms": latency, "tpot_ms": latency}
    outcome = {"figures": figures, "error": None, "memory_mb": 500.0}
    return {"preset": preset, "turn": turn, "engine": engine, "variant": variant, "outcome": outcome} | {
        "start_s": 1.0,
        "settings": [],
        "commit": "abc",
        "began": "now",
        "requests": None,
    }


def peers(ttft: float = 100.0) -> dict[str, Any]:
    runs = []
    for turn in range(3):
        runs += [run("W1", "Noria", "int8", turn, 1000.0 + turn, ttft), run("W1", "llama.cpp", "Q8_0", turn, 250.0)]
        runs += [run("W1", "OpenVINO GenAI", "int8", turn, 600.0, 150.0)]
    ratios = [
        {"preset": "W1", "noria": "int8", "against": name, "figure": "output tok/s", "ratio": ratio}
        | {"least": ratio, "most": ratio, "turns": 3}
        for name, ratio in (("OpenVINO GenAI int8", 1.67), ("llama.cpp Q8_0", 4.0))
    ]
    variants = {
        "Noria": [{"name": "int8", "scheme": "int8", "cache": "int8", "over": "HTTP"}],
        "llama.cpp": [{"name": "Q8_0", "scheme": "Q8_0", "cache": "f16", "over": "HTTP"}],
        "OpenVINO GenAI": [{"name": "int8", "scheme": "int8", "cache": "u8", "over": "in process"}],
    }
    values = {"machine": WHERE, "versions": {"llama.cpp": "b1"}, "variants": variants, "perplexity": {}}
    return values | {"ratios": ratios, "missing": {"vLLM": "no room"}, "runs": runs}


def found(facts: Facts, beginning: str) -> Verdict:
    return next(one for one in verdicts(facts) if one.demand.startswith(beginning))


def facts(**given: Any) -> Facts:
    return Facts(**{"peers": None, "shapes": None, "roofline": {}, "idle": None, "plan": None} | given)


def test_a_demand_is_met_missed_or_not_measured() -> None:
    known = facts(peers=peers())
    best = found(known, "W1, int8: 1.6 × the best peer")
    assert (best.met, best.aim_met) == (True, False)
    assert best.measured == "1.67 × OpenVINO GenAI int8 (of 3 turns)"
    assert found(known, "W1, int8: 3.5 × llama.cpp").aim_met is True
    assert found(known, "W1, int8: 2.2 × vLLM").met is None
    assert found(known, "W1: peak memory").met is True
    assert found(known, "W1, int8: TTFT and TPOT").met is False  # llama.cpp answers as soon
    assert found(facts(peers=peers(90.0)), "W1, int8: TTFT and TPOT").met is True
    assert all(one.met is None for one in verdicts(facts()))


def test_latencies_are_compared_under_the_same_load() -> None:
    given = peers(ttft=50.0)
    quick = run("W1", "transformers", "bf16", 0, 100.0, ttft=1.0)
    for requests, met in ((32, True), (100, False), (None, False)):  # W1 has 100 callers
        known = facts(peers=given | {"runs": [*given["runs"], quick | {"requests": requests}]})
        assert found(known, "W1, int8: TTFT").met is met


def test_shares_idle_planning_and_shapes_are_judged() -> None:
    phases = [{"phase": "decode", "seqs": 100, "of_limit": 0.66}, {"phase": "prefill", "seqs": 1, "of_limit": 0.5}]
    point = {"batch": 1, "context": shapes.CONTEXT, "median_ms": 50.0}
    case = {"case": {"stored": "Q4_0"}, "noria": {"points": [point]}}
    known = facts(
        roofline={"int8": {"phases": phases}},
        idle={"percent_of_a_core": 1.5},
        plan={"cases": [{"case": "decode", "p50_ms": 0.2, "p99_ms": 0.9}]},
        shapes={"cases": [case | {"llama.cpp": [{"batch": 1, "tokens_per_s": 10.0}]}]},
    )
    assert found(known, "W1 decode, int8").met is True
    assert found(known, "W3, int8: 70%").met is False
    assert found(known, "idle server").met is False
    assert found(known, "planning").met is True
    assert found(known, "1.5B shape, Q4_0: 1.1").measured == "2.00 ×"
    assert found(known, "1.5B shape, Q4_0: 2 ×").met is None


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    perplexity = {"about": {"chunks": 1, "text": "t", "scored": 255}, "perplexity": {"Noria int8": 13.4}}
    inputs = report.Inputs(peers(), perplexity, None, None, None, None, {})
    text = report.markdown(inputs)
    assert "| Noria | int8 | int8 | 13.40 | HTTP | 3 | 1,001.0 |" in text
    assert "- vLLM: no room" in text
    assert "1.67 × OpenVINO GenAI int8 (of 3 turns) | met, not the aim |" in text
    assert "not measured" in text
    assert "Nothing has been measured yet." in report.markdown(report.load(tmp_path))
    (tmp_path / "roofline-int8.json").write_text("{}", encoding="utf-8")
    assert not report.load(tmp_path).roofline
    chart = report.chart(peers())
    assert chart.index("Noria int8") < chart.index("OpenVINO GenAI int8") < chart.index("llama.cpp Q8_0")


def test_ops_above_three_per_cent_are_listed_with_a_reason() -> None:
    op = {"op": "linear 1→2 int8/64", "share": 0.5, "ms": 1.0, "operations": 10, "operations_per_s": 1e9}
    op |= {"bytes_per_s": 1e9, "bound_by": "int8", "of_limit": 0.5, "count": 30}
    small = op | {"op": "norm 8", "share": 0.02}
    phase = {
        "phase": "decode",
        "seqs": 100,
        "length": 192,
        "tokens": 100,
        "of_limit": 0.5,
        "step_ms": 2.0,
        "ops": [op, small],
    }
    phase |= {"tokens_per_s": 5.0, "median_step_ms": 2.5, "limit_ms": 1.0, "working_set_bytes": 1e6, "rest_ms": 0.1}
    text = report.phase_table("int8", {"weights": "int8", "cache": "int8", "isa": "amx"}, phase)
    assert "| linear 1→2 int8/64 | 50.0% | 1.00 | 1 | 1.0 | int8 | 50% | calls of 33 µs, of which" in text
    assert "100 rows do not fill tiles of 16 |" in text
    assert "bound by memory; codes are unpacked" in report.why(op, 1)
    assert "norm 8" not in text
    assert "All other ops together 2.0%" in text
    assert report.why(op | {"of_limit": 0.95}, 100) == "at the limit"
    assert report.why(op | {"op": "attention 9/3×64 int8"}, 100) == report.WHY["attention"]


def test_perplexities_of_another_text_are_not_mixed_up(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    book = Book(path, {"text": "a"})
    book.take("Noria int8", lambda: 12.0)
    book.take("vLLM bf16", lambda: 13.0)
    again = Book(path, {"text": "a"}, ["Noria"])
    again.take("Noria int8", lambda: 11.0)
    again.take("vLLM bf16", lambda: 1.0)  # known
    assert json.loads(path.read_text(encoding="utf-8"))["perplexity"] == {"vLLM bf16": 13.0, "Noria int8": 11.0}
    with pytest.raises(Unavailable, match="something else"):
        Book(path, {"text": "b"})
    half = [0.0] * FIRST + [math.log(0.5)] * (LENGTH - 1 - FIRST)
    assert perplexity([half, half]) == pytest.approx(2.0)


# ---------------------------------------------------------------------------------------------------- charts


def test_charts_are_xml_within_their_bounds() -> None:
    chart = lines("a <b> & c", "x", "y", [Series("one", [(1, 0.5), (10, 5.0)]), Series("flat", [(1, 2.0)])])
    root = ElementTree.fromstring(chart)
    name = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{name}circle")
    assert len(circles) == 3
    assert all(0 < float(dot.attrib["cx"]) < 720 and 0 < float(dot.attrib["cy"]) < 400 for dot in circles)
    low, high = circles[0].attrib, circles[1].attrib
    assert float(low["cx"]) < float(high["cx"])
    assert float(low["cy"]) > float(high["cy"])  # more is higher
    assert "prefers-color-scheme: dark" in chart
    rows = ElementTree.fromstring(
        bars("t", "u", [Bar("ours", 100.0, strong=True), Bar("theirs", 50.0, "(in process)")])
    )
    ours, theirs = rows.findall(f"{name}rect")
    assert float(ours.attrib["width"]) == pytest.approx(2 * float(theirs.attrib["width"]), rel=0.01)
    assert ours.attrib["fill"] != theirs.attrib["fill"]


def test_the_grid_of_growth_covers_lines_and_columns() -> None:
    points = {(phase.seqs, phase.length) for phase in growth.grid((1, 2, 256), (128, 256, 8192))}
    assert points == {(1, 128), (2, 128), (256, 128), (1, 256), (1, 8192), (2, 8192), (256, 8192)}
    made = {"model": "m", "quantization": "int8", "weights": "int8", "cache": "int8", "isa": "amx", "threads": 2}
    points_ = [
        {"batch": 1, "context": 128, "undisturbed_ms": 2.0},
        {"batch": 2, "context": 1024, "undisturbed_ms": 4.0},
    ]
    text = growth.markdown(made | {"points": points_})
    assert "| 1 | 2.00 (500) |  |" in text
    assert "| 2 |  | 4.00 (500) |" in text
    assert set(growth.plots(made | {"points": points_})) == {"batch", "context"}


def test_a_model_grows(tmp_path: Path) -> None:
    from helpers.tiny_models import write_checkpoint

    write_checkpoint("llama", tmp_path / "model")
    found = growth.measure(
        str(tmp_path / "model"), "int8", [Phase("decode", n, c) for c in (16, 32) for n in (1, 2)], 0.01, 1
    )
    assert [(point["batch"], point["context"]) for point in found["points"]] == [(1, 16), (2, 16), (1, 32), (2, 32)]
    assert all(point["median_ms"] > 0 for point in found["points"])


def test_the_peers_lines_are_understood() -> None:
    line = {"pl": 32, "speed_tg": 144.8, "speed_pp": 196.8}
    assert shapes.parse(f"banner\n{json.dumps(line)}\n") == [(32, 144.8)]


# ---------------------------------------------------------------------------------------------------- a whole run


def test_a_stage_that_fails_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    def stage(code: str, most: float = 20.0) -> measure_all.Stage:
        return measure_all.Stage("it", (sys.executable, "-c", code), tmp_path / "none.json", 1.0, most)

    env, log = measure_all.environment(), tmp_path / "log"
    assert measure_all.run(stage("print('well')"), log, env)
    assert not measure_all.run(stage("raise SystemExit(3)"), log, env)
    began = time.monotonic()
    assert not measure_all.run(stage("import time; time.sleep(60)", 0.5), log, env)
    assert time.monotonic() - began < 20
    assert "well" in log.read_text(encoding="utf-8")


def test_what_a_commit_has_measured_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert not measure_all.measured(path, "abc")
    path.write_text('{"machine": {"commit": "abc"}}', encoding="utf-8")
    assert measure_all.measured(path, "abc")
    assert not measure_all.measured(path, "def")
    assert not measure_all.measured(path, None)
