"""What a page shows of a run under load: figures, distributions of latencies, and how the run went over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from noria.bench.charts import Level, Series, lines
from noria.bench.http import Record
from noria.bench.offline import Sample
from noria.bench.page import Figure, Heading, Note, PageTable, Part

LATENCIES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "end to end"))
_SHARES = ("mean", "p50", "p90", "p99", "max")
_MOST_POINTS = 240  # of a line over time
_QUANTILES = np.linspace(0.0, 100.0, 101)


def load_parts(
    records: Sequence[Record],
    summary: dict[str, Any],
    summaries: Sequence[dict[str, Any]] = (),
    samples: Sequence[Sample] = (),
) -> list[Part]:
    """The parts of a page.

    Args:
        records, summary, samples: of the run that is shown. summaries: of all runs, where there were several.
    """
    return [
        Heading("Figures"),
        *figures(summary),
        *([_runs(summaries)] if len(summaries) > 1 else []),
        *([Heading("Latencies"), *_curves(records)] if summary["completed"] else [Note("No request was completed.")]),
        *([Heading("Over time"), *_over_time(records, samples)] if summary["completed"] else []),
    ]


def figures(summary: dict[str, Any]) -> Iterator[Part]:
    """Latencies and totals."""
    rows = [
        (label, *(f"{values[share]:,.1f}" for share in _SHARES)) for key, label in LATENCIES if (values := summary[key])
    ]
    if rows:
        yield PageTable("Milliseconds", ("", *_SHARES), rows)
    goodput = summary["goodput_requests_per_s"]
    totals = [
        ("output tokens/s", f"{summary['output_tokens_per_s']:,.1f}"),
        ("all tokens/s", f"{summary['total_tokens_per_s']:,.1f}"),
        ("requests/s", f"{summary['requests_per_s']:,.2f}"),
        *([("goodput, requests/s", f"{goodput:,.2f}")] if goodput is not None else []),
        ("completed", f"{summary['completed']:,} of {summary['requests']:,}"),
        ("prompt tokens", f"{summary['prompt_tokens']:,}"),
        ("of these from the prefix cache", f"{summary['cached_prompt_tokens']:,}"),
        ("output tokens", f"{summary['output_tokens']:,}"),
        ("seconds", f"{summary['wall_s']:,.2f}"),
        *_sizes(summary),
        *((message, f"{count:,} times") for message, count in summary["errors"].items()),
    ]
    yield PageTable("", ("", ""), totals)


def _sizes(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    names = {"batch": "batch size", "budget": "token budget", "running": "running", "waiting": "waiting"}
    for key, values in summary.get("sizes", {}).items():
        yield names[key], f"{values['least']:,.0f} … {values['most']:,.0f}, median {values['median']:,.0f}"


def _runs(summaries: Sequence[dict[str, Any]]) -> PageTable:
    rows = [
        (f"{turn + 1}", f"{one['output_tokens_per_s']:,.1f}", *(_half(one[key]) for key, _ in LATENCIES))
        for turn, one in enumerate(summaries)
    ]
    names = [f"{label} p50 ms" for _, label in LATENCIES]
    return PageTable("All runs, the slowest first; the median is shown", ("run", "output tokens/s", *names), rows)


def _half(values: dict[str, float] | None) -> str:
    return f"{values['p50']:,.1f}" if values else "–"


def _curves(records: Sequence[Record]) -> Iterator[Part]:
    good = [record for record in records if record.error is None]
    values = {
        "TTFT": [record.ttft for record in good if record.chunks],
        "TPOT": [record.tpot for record in good if record.tpot is not None],
        "ITL": [float(gap) for record in good for gap in np.diff(record.chunks)],
        "end to end": [record.end - record.start for record in good],
    }
    made = [Series(name, distribution(seconds)) for name, seconds in values.items() if seconds]
    if made:
        title = "Share of requests (ITL: of gaps) within a latency"
        yield Figure(lines(title, "milliseconds", "percent", made, ("log", "linear")))


def distribution(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Milliseconds at every percent."""
    places = np.percentile(np.asarray(seconds) * 1e3, _QUANTILES)
    return list(zip(places.tolist(), _QUANTILES.tolist(), strict=True))


def _over_time(records: Sequence[Record], samples: Sequence[Sample]) -> Iterator[Part]:
    start = min(record.start for record in records)
    good = [record for record in records if record.error is None and record.chunks]
    yield Figure(
        lines("Throughput", "seconds", "output tokens/s", [Series("output tokens/s", _rate(good, start))], _LINEAR)
    )
    yield Figure(
        lines(
            "Latencies by time of arrival",
            "seconds",
            "milliseconds",
            latencies_over_time(good, start),
            ("linear", "log"),
        )
    )
    own = samples_over_time(samples, start) if samples else [Series("in flight", _in_flight(records, start))]
    yield Figure(lines("Requests", "seconds", "requests", own, _LINEAR))


_LINEAR: tuple[Any, Any] = ("linear", "linear")


def latencies_over_time(records: Sequence[Record], start: float) -> list[Series]:
    """Milliseconds over seconds since `start`, medians of requests that arrived about then."""
    values = {
        "TTFT": [(record.start - start, record.ttft) for record in records],
        "TPOT": [(record.start - start, record.tpot) for record in records if record.tpot is not None],
        "end to end": [(record.start - start, record.end - record.start) for record in records],
    }
    return [Series(name, medians(points, 1e3)) for name, points in values.items() if points]


def samples_over_time(samples: Sequence[Sample], start: float) -> list[Series]:
    """What ran, waited and was allowed to run."""
    values = {
        "running": [(one.at - start, float(one.running)) for one in samples],
        "waiting": [(one.at - start, float(one.waiting)) for one in samples],
        "batch size": [(one.at - start, float(one.batch)) for one in samples],
    }
    return [Series(name, medians(points)) for name, points in values.items()]


def medians(points: Sequence[tuple[float, float]], unit: float = 1.0) -> list[tuple[float, float]]:
    """A line of bounded length: the median of the points in each of so many equal stretches."""
    if not points:
        return []
    xs, ys = np.array(points, float).T
    low, high = float(xs.min()), float(xs.max())
    places = np.minimum((xs - low) / max(high - low, 1e-9) * _MOST_POINTS, _MOST_POINTS - 1).astype(int)
    return [
        (float(xs[places == place].mean()), float(np.median(ys[places == place])) * unit)
        for place in np.unique(places).tolist()
    ]


def _rate(records: Sequence[Record], start: float) -> list[tuple[float, float]]:
    """Tokens per second; the tokens of a request are spread over its pieces."""
    times = np.concatenate([record.chunks for record in records]) - start
    weights = np.concatenate(
        [np.full(len(record.chunks), record.output_tokens / len(record.chunks)) for record in records]
    )
    end = max(float(times.max()), 1e-9)
    count = max(1, min(_MOST_POINTS, round(end / 0.25)))
    sums, edges = np.histogram(times, count, (0.0, end), weights=weights)
    centres = (edges[1:] + edges[:-1]) / 2
    return list(zip(centres.tolist(), (sums * count / end).tolist(), strict=True))


def _in_flight(records: Sequence[Record], start: float) -> list[tuple[float, float]]:
    starts = np.sort([record.start - start for record in records])
    ends = np.sort([record.end - start for record in records])
    times = np.linspace(0.0, float(ends[-1]), _MOST_POINTS)
    alive = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")
    return list(zip(times.tolist(), alive.astype(float).tolist(), strict=True))


def objectives(ttft: float | None, tpot: float | None) -> list[Level]:
    """Levels in milliseconds. Args in seconds."""
    found = (("TTFT objective", ttft), ("TPOT objective", tpot))
    return [Level(name, 1e3 * seconds) for name, seconds in found if seconds is not None]
