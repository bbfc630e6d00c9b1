"""`benchmarks/batching.py`: who is compared with whom, ratios turn by turn, and the page that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import batching
import pytest
import report
from batching import Part, Ratio, Variant

from helpers.tiny_models import write_checkpoint
from noria.bench.workloads import WorkloadSpec

SPEC = WorkloadSpec(requests=4, concurrency=2, input=4, output=3)


def figures(rate: float, end: float, tpot: float | None = 10.0) -> dict[str, Any]:
    latency = {"p50": end, "p99": 2 * end}
    gaps = None if tpot is None else {"p50": tpot}
    return {"output_tokens_per_s": rate, "ttft_ms": latency, "tpot_ms": gaps, "e2e_ms": latency, "running_most": 7}


def test_the_parts_are_what_is_asked_for() -> None:
    found = batching.parts(["static", "sweep", "W1", "W2"], None)
    assert found["static"].spec.input == (16, 512)
    assert [ratio.label for ratio in found["static"].ratios] == ["output tok/s", "median latency"] * 3
    assert [one.name for one in found["sweep"].variants] == [
        *(f"continuous {size}" for size in (32, 64, 128, 256, 512, 1024)),
        "paced",
    ]
    assert (found["sweep"].spec.requests, found["sweep"].spec.concurrency) == (500, 100)
    assert [one.size for one in found["W2"].variants] == [1, 256]
    assert batching.parts(["W1"], 9)["W1"].spec.requests == 9
    with pytest.raises(SystemExit, match="there is no part 'W9'"):
        batching.parts(["W9"], None)


def test_options_are_those_of_the_kind() -> None:
    static, paced = (Variant(kind, 32).options({"model": "m"}, 1) for kind in ("static", "paced"))
    assert (static.scheduler.continuous, static.pacer.enabled) == (False, False)
    assert (paced.scheduler.continuous, paced.pacer.enabled, paced.scheduler.max_num_seqs) == (True, True, 32)


def test_ratios_are_taken_turn_by_turn() -> None:
    """The machine is half as fast in the second turn; the ratio is not."""
    variants = (Variant("continuous", 8), Variant("static", 8))
    ratios = (
        Ratio("continuous 8", "static 8", ("output_tokens_per_s",), "rate"),
        Ratio("continuous 8", "static 8", ("e2e_ms", "p50"), "latency"),
    )
    order: list[str] = []

    def run(variant: Variant, spec: WorkloadSpec, turn: int) -> dict[str, Any]:
        order.append(variant.name)
        slow = 2.0 if turn == 1 else 1.0
        return figures(300 / slow, 20 * slow) if variant.kind == "continuous" else figures(100 / slow, 80 * slow)

    found = batching.measure(Part("t", SPEC, variants, ratios), 2, run)
    assert order == ["continuous 8", "static 8"] * 2
    assert [(one["figure"], one["ratio"], one["most"]) for one in found["ratios"]] == [
        ("rate", 3.0, 3.0),
        ("latency", 0.25, 0.25),
    ]
    where = {"commit": "abc", "cpu": "CPU", "isa": "amx", "threads": 2, "time": "now"}
    model = {"model": "m", "quantization": "int8"}
    stored = {"machine": where, "model": model, "turns": 2, "parts": {"x": found}}
    text = batching.markdown(stored)
    assert "| continuous 8 | 225.0 | 30.0 | 60.0 | 10.0 | 30.0 | 60.0 | 7 |" in text
    assert "| continuous 8 | static 8 | latency | 0.25 | 0.25 … 0.25 |" in text
    shown = report.markdown(report.Inputs(None, None, None, None, None, None, {}, stored))
    assert "\n## Kinds of batching\n" in shown
    assert "\n### t\n" in shown
    assert batching._median([figures(1, 1, None)], "tpot_ms", "p50") == "–"


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint("llama", tmp_path / "model")
    variants = (Variant("static", 2), Variant("continuous", 2), Variant("paced", 4))
    ratio = Ratio("continuous 2", "static 2", ("output_tokens_per_s",), "output tok/s")
    monkeypatch.setattr(batching, "parts", lambda names, requests: {"x": Part("Tiny", SPEC, variants, (ratio,))})
    out = tmp_path / "deep" / "found"
    flags = ["--model", str(tmp_path / "model"), "--repeat", "1", "--threads", "1", "--output", str(out)]
    monkeypatch.setattr("sys.argv", ["batching.py", *flags])
    assert batching.main() == 0
    assert "## Tiny" in capsys.readouterr().out
    found = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert found["parts"]["x"]["runs"]["paced"][0]["completed"] == 4
    assert found["parts"]["x"]["ratios"][0]["ratio"] > 0
    assert found["machine"]["cpu"]
