"""Tables for people of what the bench finds out about the machine."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from noria.bench.limits import ARITHMETICS, MachineLimits
from noria.bench.roofline import OpRow, PhaseReport

_WIDTH = 150  # where the output is no terminal
_NOTABLE = 0.03  # share of a step from which on an op is worth a look


def make_console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def make_table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are text."""
    table = Table(title=escape(title) or None, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if index < left else "right", no_wrap=True)
    return table


def print_limits(console: Console, limits: MachineLimits) -> None:
    """Products, reads, and the pool."""
    how = "each thread held to a processor" if limits.pinned else "threads where the system puts them"
    table = make_table(f"Limits at {limits.isa}, {how}", "", "one thread", f"all {limits.threads}", "unit", "how")
    for kind in ARITHMETICS:
        rate = limits.products[kind]
        table.add_row(f"{kind} products", *_numbers(rate.one, rate.all), "GOP/s", limits.instructions[kind])
    for read in limits.reads:
        size = f"{read.bytes / 2**20:,.0f} MiB" + (" each" if read.level == "L2" else "")
        table.add_row(f"reads from {read.level}", *_numbers(read.rate.one, read.rate.all), "GB/s", size)
    console.print(table)
    console.print(
        f"threads are there {1e6 * limits.wake_asleep:,.1f} µs after a run begins if they slept, "
        f"{1e6 * limits.wake_awake:,.1f} µs if they waited awake; an empty run takes {1e6 * limits.run:,.2f} µs"
    )


def print_phase(console: Console, found: PhaseReport) -> None:
    """Every op of a phase, those over 3 % of the step in bold."""
    whole = found.times.whole
    title = (
        f"{found.phase.title}: {1e3 * whole:,.2f} ms a step, {found.phase.tokens / whole:,.0f} tokens/s, "
        f"{found.of_limit:.0%} of the limit ({1e3 * found.limit:,.2f} ms)"
    )
    columns = ("op", "×", "ms", "of step", "GOP/s", "GB/s", "bound by", "of limit")
    table = make_table(title, *columns)
    for row in found.rows:
        style = "bold" if row.seconds >= _NOTABLE * whole else None
        table.add_row(row.label, str(row.count), *_op_cells(row, whole), style=style)
    table.add_row("the rest", "", f"{1e3 * found.times.rest:,.3f}", f"{found.times.rest / whole:.1%}", "", "", "", "")
    console.print(table)
    held, rate = found.working_set / 1e6, found.stored_rate / 1e9
    console.print(
        f"weights and cache: {held:,.1f} MB a step, read at {rate:,.1f} GB/s at best; "
        f"{found.times.steps} steps, with neighbours {1e3 * found.times.median:,.2f} ms in the median"
    )


def _op_cells(row: OpRow, whole: float) -> tuple[str, ...]:
    rate = row.operations / row.seconds / 1e9 if row.seconds else 0.0
    moved = (row.stored + row.passing) / row.seconds / 1e9 if row.seconds else 0.0
    return (
        f"{1e3 * row.seconds:,.3f}",
        f"{row.seconds / whole:.1%}",
        f"{rate:,.0f}" if row.operations else "",
        f"{moved:,.1f}",
        row.limit.by,
        f"{row.of_limit:.0%}",
    )


def _numbers(one: float, every: float) -> tuple[str, str]:
    return f"{one / 1e9:,.0f}", f"{every / 1e9:,.0f}"
