"""What a run amounts to: percentiles, throughput, a table for people and JSON for programs."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import noria
from noria.bench.http import Record
from noria.errors import ConfigError


def summarise(
    records: Sequence[Record], slo_ttft: float | None = None, slo_tpot: float | None = None
) -> dict[str, Any]:
    """Figures of one run. Latencies in milliseconds, throughput per second of wall time.

    Args:
        slo_ttft, slo_tpot: objectives in seconds; goodput counts requests that meet all that are given;
            it is None where none is.
    """
    good = [record for record in records if record.error is None]
    wall = max(record.end for record in records) - min(record.start for record in records) if records else 0.0
    tpots = [record.tpot for record in good]
    gaps = [gap for record in good for gap in np.diff(record.chunks)]
    output = sum(record.output_tokens for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    met = [
        r
        for r in good
        if (slo_ttft is None or r.ttft <= slo_ttft) and (slo_tpot is None or (r.tpot or 0.0) <= slo_tpot)
    ]
    judged = slo_ttft is not None or slo_tpot is not None
    return {
        "requests": len(records),
        "completed": len(good),
        "errors": _errors(records),
        "wall_s": wall,
        "prompt_tokens": prompt,
        "cached_prompt_tokens": sum(record.cached_tokens for record in good),
        "output_tokens": output,
        "requests_per_s": len(good) / wall if wall else 0.0,
        "output_tokens_per_s": output / wall if wall else 0.0,
        "total_tokens_per_s": (output + prompt) / wall if wall else 0.0,
        "goodput_requests_per_s": (len(met) / wall if wall else 0.0) if judged else None,
        "ttft_ms": _percentiles([record.ttft for record in good]),
        "tpot_ms": _percentiles([value for value in tpots if value is not None]),
        "itl_ms": _percentiles(gaps),
        "e2e_ms": _percentiles([record.end - record.start for record in good]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not len(seconds):
        return None
    values = np.asarray(seconds) * 1e3
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {
        "mean": float(values.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(values.max()),
    }


def _errors(records: Sequence[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts


def machine() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    found: dict[str, Any] = {
        "noria": noria.__version__,
        "commit": commit or None,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu_name(),
    }
    try:
        from noria.backends import get_backend

        backend = get_backend("cpu", None)
        found |= {"isa": backend.isa, "threads": backend.threads}
    except ImportError:
        found |= {"isa": None, "threads": None}
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_summary(title: str, summary: dict[str, Any]) -> None:
    """A table of the figures on standard output."""
    console = Console()
    table = Table(title=escape(title), title_justify="left", show_header=True, header_style="bold")
    for column in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for key, label in (
        ("ttft_ms", "TTFT ms"),
        ("tpot_ms", "TPOT ms"),
        ("itl_ms", "ITL ms"),
        ("e2e_ms", "end to end ms"),
    ):
        values = summary[key]
        if values:
            table.add_row(label, *(f"{values[name]:,.1f}" for name in ("mean", "p50", "p90", "p99", "max")))
    if table.row_count:
        console.print(table)
    goodput = summary["goodput_requests_per_s"]
    console.print(
        f"[bold]{summary['output_tokens_per_s']:,.1f}[/] output tok/s · "
        f"{summary['total_tokens_per_s']:,.1f} tok/s in all · {summary['requests_per_s']:,.2f} requests/s · "
        f"{summary['completed']} of {summary['requests']} completed in {summary['wall_s']:,.1f} s"
        + (f" · goodput {goodput:,.2f} requests/s" if goodput is not None else "")
    )
    if sizes := summary.get("sizes"):
        console.print(f"{_range(sizes['batch'])} running at most · {_range(sizes['budget'])} tokens a step at most")
    for message, count in summary["errors"].items():
        console.print(f"[red]{count} × {escape(message)}[/]", highlight=False)


def _range(values: dict[str, float]) -> str:
    if values["least"] == values["most"]:
        return f"{values['most']:,.0f}"
    return f"{values['least']:,.0f} … {values['most']:,.0f} (median {values['median']:,.0f})"


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes a report, `-` meaning standard output."""
    text = json.dumps(report, indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "--json") from error
