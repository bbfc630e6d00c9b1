"""What a page shows of the machine's limits, of a model's steps beside them, and of products by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noria.bench.charts import Bar, Series, bars, lines
from noria.bench.limits import ARITHMETICS, MachineLimits
from noria.bench.page import Figure, Heading, Note, PageTable, Part
from noria.bench.products import ProductTime
from noria.bench.roofline import OpRow, PhaseReport


def limits_parts(limits: MachineLimits) -> Iterator[Part]:
    """Products and reads."""
    yield Heading("The machine's limits")
    rates = [(f"{kind} products, GOP/s", limits.products[kind]) for kind in ARITHMETICS]
    rates += [(f"reads from {read.level}, GB/s", read.rate) for read in limits.reads]
    rows = [(name, f"{rate.one / 1e9:,.1f}", f"{rate.all / 1e9:,.1f}") for name, rate in rates]
    yield PageTable(f"ISA level {limits.isa}", ("", "one thread", f"all {limits.threads}"), rows)


def phases_parts(model: str, reports: Sequence[PhaseReport]) -> Iterator[Part]:
    """A table and bars for each phase, and their shares and times beside each other."""
    yield Heading("Steps")
    yield Note(model)
    rows = [
        (
            one.phase.title,
            f"{1e3 * one.times.whole:,.2f}",
            f"{1e3 * one.times.median:,.2f}",
            f"{1e3 * one.limit:,.2f}",
            f"{one.of_limit:.0%}",
            f"{one.phase.tokens / one.times.whole:,.0f}",
        )
        for one in reports
    ]
    yield PageTable("Milliseconds of a step", ("", "undisturbed", "median", "limit", "of limit", "tokens/s"), rows)
    yield from _latencies(reports)
    for one in reports:
        yield Heading(one.phase.title)
        yield Figure(bars(f"{one.phase.title}: where its time goes", "µs a step", [_bar(row) for row in one.rows]))
        cells = [_cells(row, one.times.whole) for row in one.rows]
        yield PageTable("", ("op", "×", "ms", "of step", "bound by", "of limit"), cells)


def _latencies(reports: Sequence[PhaseReport]) -> Iterator[Part]:
    series = []
    for kind in ("decode", "prefill"):
        own = sorted((one for one in reports if one.phase.kind == kind), key=lambda one: one.phase.tokens)
        if own:
            tokens = [float(one.phase.tokens) for one in own]
            times = [1e3 * one.times.whole for one in own], [1e3 * one.limit for one in own]
            series.append(Series(f"{kind}, undisturbed", list(zip(tokens, times[0], strict=True))))
            series.append(Series(f"{kind}, limit", list(zip(tokens, times[1], strict=True))))
    yield Figure(lines("A step by its tokens", "tokens of a step", "ms a step", series))


def _bar(row: OpRow) -> Bar:
    return Bar(row.label, 1e6 * row.seconds, f"µs, {row.of_limit:.0%} of its limit", strong=row.of_limit >= 0.5)


def _cells(row: OpRow, whole: float) -> tuple[str, ...]:
    milliseconds, share = f"{1e3 * row.seconds:,.3f}", f"{row.seconds / whole:.1%}"
    return row.label, str(row.count), milliseconds, share, row.limit.by, f"{row.of_limit:.0%}"


def products_parts(times: Sequence[ProductTime], compared: str | None) -> Iterator[Part]:
    """Products by themselves. `compared`: whose oneDNN stands beside them; None: there is none."""
    yield Heading("Products by themselves")
    names = list(dict.fromkeys(one.product for one in times))
    series = [
        Series(name, [(float(one.rows), 1e6 * one.seconds) for one in times if one.product == name]) for name in names
    ]
    yield Figure(lines("A product by its rows", "rows", "µs", series))
    rows = [
        (
            one.product,
            f"{one.rows:,}",
            f"{1e6 * one.seconds:,.1f}",
            f"{one.operations / one.seconds / 1e9:,.0f}",
            one.bound_by,
            f"{one.of_limit:.0%}",
            f"{1e6 * one.onednn:,.1f}" if one.onednn else "–",
        )
        for one in times
    ]
    beside = f"oneDNN of {compared} µs" if compared else "oneDNN µs"
    yield PageTable("", ("product", "rows", "µs", "GOP/s", "bound by", "of limit", beside), rows)
