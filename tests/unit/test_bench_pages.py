"""`--html`: pages that need nothing else, with all figures and lines, and nothing in them that was not escaped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.pages import read_page
from helpers.tiny_models import write_checkpoint
from noria.bench.charts import Level, Series, Span, columns, lines
from noria.bench.http import Record, Target
from noria.bench.limits import MachineLimits, measure_limits
from noria.bench.load_page import distribution, load_parts, medians
from noria.bench.page import Figure, Heading, Note, PageTable, command_line, page
from noria.bench.report import summarise
from noria.bench.workloads import BenchRequest
from noria.cli.main import main

WILD = '<script>alert("&")</script>'


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    return int(end.value.code or 0)


def record(start: float, ttft: float, tokens: int, tpot: float) -> Record:
    chunks = [start + ttft + tpot * index for index in range(tokens)]
    return Record(start=start, end=chunks[-1], chunks=chunks, prompt_tokens=5, output_tokens=tokens)


def test_everything_is_escaped() -> None:
    chart = lines(WILD, WILD, WILD, [Series(WILD, [(1.0, 1.0), (2.0, 2.0)])], spans=[Span(WILD, 1, 2)])
    bars = columns(WILD, WILD, [WILD], [(WILD, [1.0])])
    parts = [Heading(WILD), Note(WILD), PageTable(WILD, [WILD], [[WILD]]), Figure(chart), Figure(bars)]
    text = page(WILD, {WILD: WILD, "command": WILD}, parts)
    found = read_page(text)
    assert "<script" not in text
    assert found.cells.count(WILD) == 5
    assert found.lines.keys() == {WILD}
    assert found.charts == 2


def test_axes_hold_lines_spans_and_levels() -> None:
    series = [Series("up", [(0.0, 0.0), (10.0, 5.0)]), Series("flat", [(0.0, 2.0), (10.0, 2.0)])]
    chart = lines("t", "x", "y", series, ("linear", "linear"), [Span("late", 8.0, 20.0)], [Level("aim", 9.0)])
    found = read_page(page("t", {}, [Figure(chart)]))
    (left, bottom), (right, top) = found.lines["up"]
    assert left < right < 720 - 150  # the span reaches further than the lines
    assert top < bottom == 400 - 52
    assert found.lines["flat"][0][1] == found.lines["flat"][1][1]
    assert {"late", "aim"} <= set(found.texts)
    log = lines("t", "x", "y", [Series("some", [(0.0, 1.0), (1.0, 0.0), (1.0, 10.0), (10.0, 100.0)])])
    assert len(read_page(page("t", {}, [Figure(log)])).lines["some"]) == 2  # zero has no logarithm


def test_columns_are_as_high_as_their_values() -> None:
    chart = columns("t", "y", ["a", "b"], [("one", [1.0, 4.0]), ("two", [2.0, 0.0])])
    heights = [float(part.split('height="')[1].split('"')[0]) for part in chart.split("<rect ")[1:5]]
    assert heights[2] == pytest.approx(4 * heights[0], rel=0.01)
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)
    assert heights[3] == 0.5


def test_a_load_s_page_shows_every_latency() -> None:
    records = [record(0.1 * turn, 0.2 + 0.01 * turn, 4, 0.03) for turn in range(50)]
    records.append(Record(start=1.0, end=1.5, error=WILD))
    summary = summarise(records, slo_ttft=0.5)
    parts = load_parts(records, summary, [summary, summary])
    found = read_page(page("load", {"machine": "m"}, parts))
    assert {"TTFT", "TPOT", "ITL", "end to end", "output tokens/s", "in flight"} <= set(found.lines)
    assert WILD in found.cells
    assert "goodput, requests/s" in found.cells
    curve = found.lines["ITL"]
    assert len(curve) == 101
    failed = read_page(page("load", {}, load_parts(records[-1:], summarise(records[-1:]))))
    assert failed.charts == 0


def test_curves_are_right() -> None:
    curve = distribution([0.001 * value for value in range(101)])
    assert curve[50] == (pytest.approx(50.0), 50.0)
    line = medians([(float(x), float(x % 2)) for x in range(10_000)])
    assert len(line) <= 240
    assert line[0][0] < 50
    assert medians([]) == []
    assert medians([(1.0, 2.0)]) == [(1.0, 2.0)]


def test_keys_are_not_shown() -> None:
    shown = command_line(["bench", "serve", "--api-key", "sk-1", "--api-key=sk-2", "--url", "http://a b"])
    assert shown == "noria bench serve --api-key KEY --api-key=KEY --url 'http://a b'"


@pytest.fixture(scope="module")
def limits() -> MachineLimits:
    return measure_limits(2, seconds=0.002, most_bytes=4 << 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", path)
    return str(path)


def test_offline_writes_a_page(tmp_path: Path, model: str) -> None:
    out = tmp_path / "deep" / "page.html"
    load = ("--num-requests", "12", "--concurrency", "4", "--input-len", "3:9", "--output-len", "8")
    assert run("offline", "--model", model, *load, "--repeat", "2", "--threads", "1", "--html", str(out)) == 0
    found = read_page(out.read_text(encoding="utf-8"))
    assert {"TTFT", "TPOT", "end to end", "output tokens/s", "running", "waiting", "batch size"} <= set(found.lines)
    assert {"machine", "ISA", "threads", "command"} <= set(found.cells)
    assert out.stat().st_size < 200_000


def test_serve_writes_a_page(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(target: Target, request: BenchRequest) -> Record:
        return record(10.0, 0.1 * len(request.prompt_ids), request.output_tokens, 0.01)

    monkeypatch.setattr("noria.bench.http.ask", answer)
    out = tmp_path / "page.html"
    load = ("--num-requests", "9", "--input-len", "3:9", "--output-len", "4", "--url", "http://127.0.0.1:1/<x>")
    assert run("serve", "--model", "m", "--tokenizer", model, *load, "--html", str(out)) == 0
    found = read_page(out.read_text(encoding="utf-8"))
    assert {"TTFT", "TPOT", "ITL", "end to end", "output tokens/s", "in flight"} <= set(found.lines)
    assert "9 of 9" in found.cells


def test_offline_can_be_paced_or_not(tmp_path: Path, model: str) -> None:
    out = tmp_path / "found.json"
    load = ("--num-requests", "3", "--input-len", "3", "--output-len", "2", "--threads", "1", "--json", str(out))
    for flags, enabled in (((), True), (("--no-adaptive-batch-size",), False)):
        assert run("offline", "--model", model, *load, "--slo-tpot-ms", "50", *flags) == 0
        found = json.loads(out.read_text(encoding="utf-8"))
        assert (found["options"]["pacer"]["enabled"], found["options"]["pacer"]["slo_tpot_ms"]) == (enabled, 50.0)
        assert found["median"]["goodput_requests_per_s"] is not None


def test_a_page_that_cannot_be_written_is_an_error(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--num-requests", "1", "--input-len", "3", "--output-len", "2", "--threads", "1")
    assert run("offline", "--model", model, *load, "--html", str(tmp_path)) == 2
    assert "--html: cannot write" in capsys.readouterr().err


def test_the_machine_s_pages(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, limits: Any) -> None:
    monkeypatch.setattr("noria.bench.limits.measure_limits", lambda threads: limits)
    monkeypatch.setattr("noria.bench.onednn.load_onednn", lambda threads: None)
    out, figures = tmp_path / "page.html", tmp_path / "page.json"
    shared = ("--model", model, "--threads", "2", "--seconds", "0.001", "--html", str(out))
    steps = ("--batch", "1,3", "--context", "9", "--chunk", "16")
    assert run("roofline", *shared, *steps, "--json", str(figures)) == 0
    found = read_page(out.read_text(encoding="utf-8"))
    assert {"decode, undisturbed", "decode, limit", "prefill, undisturbed", "prefill, limit"} <= set(found.lines)
    ops = {row["op"] for phase in json.loads(figures.read_text(encoding="utf-8"))["phases"] for row in phase["ops"]}
    assert ops <= set(found.cells)
    assert run("kernels", *shared, "--rows", "1,3", "--context", "9", "--json", str(figures)) == 0
    found = read_page(out.read_text(encoding="utf-8"))
    products = {row["product"] for row in json.loads(figures.read_text(encoding="utf-8"))["products"]}
    assert products <= set(found.lines)
    assert run("roofline", "--limits-only", "--html", str(out)) == 0
    assert read_page(out.read_text(encoding="utf-8")).charts == 0
