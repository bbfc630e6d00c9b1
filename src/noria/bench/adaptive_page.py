"""Tables and a page of `noria bench adaptive`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from noria.bench.adaptive import PACER, Contestant, Turn
from noria.bench.charts import Scale, Series, Span, columns, lines
from noria.bench.load_page import distribution, medians, objectives
from noria.bench.page import Figure, Heading, Note, PageTable, Part
from noria.bench.tables import make_table
from noria.bench.trace import Aims, Calibration, Trace

_LINEAR: tuple[Scale, Scale] = ("linear", "linear")
_LOG: tuple[Scale, Scale] = ("linear", "log")
_SHARES = ("p50", "p90", "p99")
_BINS = 120  # of the arrival rate over time


def print_adaptive(console: Console, found: Sequence[Contestant], goals: Aims, said: dict[str, Any]) -> None:
    """Who met the objectives how often, latencies by phase, and the verdict."""
    console.print(f"objectives: TTFT {1e3 * goals.ttft:,.0f} ms, TPOT {1e3 * goals.tpot:,.1f} ms", highlight=False)
    for made in (_goodput(found), *_latencies(found)):
        table = make_table(made.title, *made.columns)
        for row in made.rows:
            table.add_row(*row, style="bold" if row[0] == PACER else None)
        console.print(table)
    for line in _sentences(said):
        console.print(line, highlight=False)


def adaptive_parts(
    found: Sequence[Contestant],
    trace: Trace,
    calibration: Calibration,
    goals: Aims,
    said: dict[str, Any],
) -> list[Part]:
    """The parts of a page."""
    spans = trace.spans(calibration.unit)
    names = [one.name for one in found]
    bars = columns(
        "Goodput by phase",
        "requests/s within both objectives",
        [*(span.name for span in spans), "all"],
        [(one.name, _rates(one, spans)) for one in found],
    )
    return [
        Heading("Goodput"),
        *(Note(line) for line in (_asked(trace, calibration, goals), *_sentences(said))),
        _goodput(found),
        Figure(bars),
        Heading("Latencies"),
        *_latencies(found),
        *_curves(found, goals),
        *(part for name in names if name == PACER or len(names) == 1 for part in _story(found, name, spans, goals)),
        *_compared(found, spans, goals),
    ]


def _asked(trace: Trace, calibration: Calibration, goals: Aims) -> str:
    small, large = calibration.small, calibration.large
    return (
        f"Objectives: TTFT {1e3 * goals.ttft:,.0f} ms, TPOT {1e3 * goals.tpot:,.1f} ms. Under the calibration's load "
        f"batch {small.batch} gave {1e3 * small.ttft:,.0f} and {1e3 * small.tpot:,.1f} ms, batch {large.batch} "
        f"{1e3 * large.ttft:,.0f} and {1e3 * large.tpot:,.1f} ms in the median. {trace.about}"
    )


def _sentences(said: dict[str, Any]) -> Iterator[str]:
    if "best_single" in said:
        single, ideal = said["best_single"], said["best_of_phases"]
        yield (
            f"Best size of each phase: {', '.join(ideal['sizes'])}; together {ideal['met']:,.0f} requests met the "
            f"objectives. Best single size: {single['size']} with {single['met']:,.0f}, {_percent(single)} of that."
        )
    if "pacer" in said:
        pacer = said["pacer"]
        over = pacer["over_best_single"]
        yield (
            f"Pacer: {pacer['met']:,.0f}, {_percent(pacer)} of the best size of each phase"
            + (f", {over:.2f} times the best single size." if over is not None else ".")
        )


def _percent(values: dict[str, Any]) -> str:
    share = values["of_best_of_phases"]
    return "–" if share is None else f"{share:.1%}"


def _rates(one: Contestant, spans: Sequence[Span]) -> list[float]:
    """Goodput of each phase and of the whole, requests per second."""
    rates = [one.met(index) / span.length for index, span in enumerate(spans)]
    return [*rates, one.all_met / spans[-1].end]


def _goodput(found: Sequence[Contestant]) -> PageTable:
    phases = found[0].phases[0]
    rows = []
    for one in found:
        cells = [f"{one.met(index):,.0f} of {phase['requests']:,}" for index, phase in enumerate(phases)]
        whole = one.whole[0]
        rate = one.all_met / whole["seconds"]
        sizes = one.whole[one.median].get("sizes", {}).get("batch")
        span = f"{sizes['least']:,.0f} … {sizes['most']:,.0f}" if sizes else "–"
        rows.append((one.name, *cells, f"{one.all_met:,.0f} of {whole['requests']:,}", f"{rate:,.2f}", span))
    names = [phase["phase"] for phase in phases]
    return PageTable("Requests within both objectives", ("size", *names, "all", "goodput/s", "batch"), rows)


def _latencies(found: Sequence[Contestant]) -> Iterator[PageTable]:
    """Percentiles by phase, of the replay that is shown."""
    names = [phase["phase"] for phase in found[0].phases[0]]
    for key, label, digits in (("ttft_ms", "TTFT", 0), ("tpot_ms", "TPOT", 1)):
        rows = []
        for one in found:
            shown = [*one.phases[one.median], one.whole[one.median]]
            rows.append((one.name, *(_shares(figures[key], digits) for figures in shown)))
        yield PageTable(f"{label} ms: {' / '.join(_SHARES)}", ("size", *names, "all"), rows)


def _shares(values: dict[str, float] | None, digits: int) -> str:
    return " / ".join(f"{values[share]:,.{digits}f}" for share in _SHARES) if values else "–"


def _curves(found: Sequence[Contestant], goals: Aims) -> Iterator[Part]:
    """Distributions over the whole trace."""
    for label, goal in (("TTFT", goals.ttft), ("TPOT", goals.tpot)):
        series = []
        for one in found:
            good = [record for record in one.turns[one.median].records if record.error is None]
            values = [record.ttft if label == "TTFT" else record.tpot for record in good]
            known = [value for value in values if value is not None]
            if known:
                series.append(Series(one.name, distribution(known)))
        if series:
            title = f"Share of requests within a {label} (objective {1e3 * goal:,.1f} ms)"
            yield Figure(lines(title, "milliseconds", "percent of requests", series, ("log", "linear")))


def _story(found: Sequence[Contestant], name: str, spans: Sequence[Span], goals: Aims) -> Iterator[Part]:
    """What was set, what waited and what came of it over time, of one contestant."""
    one = next(one for one in found if one.name == name)
    turn = one.turns[one.median]
    yield Heading(f"Over time: {name}")
    if turn.samples:
        state = ("batch size", "batch"), ("running", "running"), ("queue", "waiting")
        series = [Series(label, _column(turn, field)) for label, field in state]
        yield Figure(lines("Batch size and requests", "seconds", "requests", series, _LINEAR, spans))
        budget = [Series("token budget", _column(turn, "budget"))]
        yield Figure(lines("Token budget", "seconds", "tokens of a step", budget, _LINEAR, spans))
        rates = [Series("as it was", _arrivals(turn, spans)), Series("as measured", _column(turn, "arrival_rate"))]
        yield Figure(lines("Arrivals", "seconds", "requests/s", rates, _LINEAR, spans))
    yield Figure(
        lines("Latencies by time of arrival", "seconds", "milliseconds", _latency(turn), _LOG, spans, _levels(goals))
    )


def _compared(found: Sequence[Contestant], spans: Sequence[Span], goals: Aims) -> Iterator[Part]:
    """What waited, and latencies, of everybody."""
    if len(found) < 2:
        return
    yield Heading("Over time: everybody")
    turns = [(one.name, one.turns[one.median]) for one in found]
    queues = [Series(name, _column(turn, "waiting")) for name, turn in turns if turn.samples]
    if queues:
        yield Figure(lines("Queue", "seconds", "waiting requests", queues, _LINEAR, spans))
    for index, (label, goal) in enumerate((("TTFT", goals.ttft), ("TPOT", goals.tpot))):
        series = [Series(name, curves[index].points) for name, turn in turns if len(curves := _latency(turn)) > index]
        level = objectives(goal, None) if label == "TTFT" else objectives(None, goal)
        if series:
            title = f"{label} by time of arrival"
            yield Figure(lines(title, "seconds", "milliseconds", series, _LOG, spans, level))


def _levels(goals: Aims) -> Any:
    return objectives(goals.ttft, goals.tpot)


def _column(turn: Turn, name: str) -> list[tuple[float, float]]:
    return medians([(one.at - turn.start, float(getattr(one, name))) for one in turn.samples])


def _latency(turn: Turn) -> list[Series]:
    """TTFT and, if any request has one, TPOT in milliseconds over seconds."""
    good = [record for record in turn.records if record.error is None]
    first = [(record.start - turn.start, record.ttft) for record in good]
    further = [(record.start - turn.start, record.tpot) for record in good if record.tpot is not None]
    values = (("TTFT", first), ("TPOT", further))
    return [Series(label, medians(points, 1e3)) for label, points in values if points]


def _arrivals(turn: Turn, spans: Sequence[Span]) -> list[tuple[float, float]]:
    times = [record.start - turn.start for record in turn.records]
    counts, edges = np.histogram(times, _BINS, (0.0, spans[-1].end))
    width = spans[-1].end / _BINS
    return list(zip(((edges[1:] + edges[:-1]) / 2).tolist(), (counts / width).tolist(), strict=True))
