"""Tables of `noria bench kernels`: rows of ops or products, columns of row counts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from noria.bench.products import ProductTime
from noria.bench.roofline import OpRow, PhaseReport
from noria.bench.tables import make_table


def print_ops(console: Console, reports: Sequence[PhaseReport]) -> None:
    """Each op of a model's step: time of one call, rate, share of the limit."""
    labels = list(dict.fromkeys(row.label for report in reports for row in report.rows))
    columns = [f"{report.phase.tokens:,} rows" for report in reports]
    table = make_table("In a step of the model: µs of a call · rate · share of the limit", "op", *columns)
    for label in labels:
        table.add_row(label, *(_op_cell(report, label) for report in reports))
    table.add_row(
        "whole step", *(f"{1e3 * one.times.whole:,.2f} ms · {one.of_limit:.0%}" for one in reports), style="bold"
    )
    console.print(table)


def print_products(console: Console, times: Sequence[ProductTime], compared: str | None) -> None:
    """Products by themselves. `compared`: whose oneDNN stands beside them; None: there is none."""
    counts = sorted({one.rows for one in times})
    title = "By themselves, weights in the caches: µs · rate · share of the limit"
    table = make_table(title, "product", *(f"{count:,} rows" for count in counts))
    for name in dict.fromkeys(one.product for one in times):
        own = {one.rows: one for one in times if one.product == name}
        table.add_row(name, *(_product_cell(own[count]) for count in counts))
        if any(one.onednn for one in own.values()):
            table.add_row("  oneDNN", *(_onednn_cell(own[count]) for count in counts), style="dim")
    console.print(table)
    if compared is None:
        console.print("no comparison with oneDNN: PyTorch cannot be imported here, or is built without it")
    else:
        console.print(f"oneDNN of {compared}; its int8 has one scale per output, ours one per group", highlight=False)


def _op_cell(report: PhaseReport, label: str) -> str:
    row = next((row for row in report.rows if row.label == label), None)
    if row is None or not row.seconds:
        return ""
    return f"{1e6 * row.seconds / row.count:,.1f} · {_op_rate(row)} · {row.of_limit:.0%}"


def _op_rate(row: OpRow) -> str:
    return _rate(row.limit.by, row.operations, row.stored + row.passing, row.seconds)


def _product_cell(one: ProductTime) -> str:
    rate = _rate(one.bound_by, one.operations, one.weight_bytes, one.seconds)
    return f"{1e6 * one.seconds:,.1f} · {rate} · {one.of_limit:.0%}"


def _onednn_cell(one: ProductTime) -> str:
    if one.onednn is None:
        return ""
    return f"{1e6 * one.onednn:,.1f} · {one.operations / one.onednn / 1e9:,.0f} GOP/s"


def _rate(bound_by: str, operations: int, moved: int, seconds: float) -> str:
    """In what bounds it: operations or bytes."""
    if bound_by in ("int8", "bf16", "f32"):
        return f"{operations / seconds / 1e9:,.0f} GOP/s"
    return f"{moved / seconds / 1e9:,.1f} GB/s"
