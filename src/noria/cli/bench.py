"""`noria bench`: measures a server at a URL, the engine in this process, or the machine."""

from __future__ import annotations

import typer

from noria.cli.bench_adaptive import adaptive
from noria.cli.bench_batching import continuous_batching
from noria.cli.bench_load import offline, serve
from noria.cli.bench_machine import kernels, roofline

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure a server at a URL, or the engine in this process."
)
app.command()(serve)
app.command()(offline)
app.command("continuous-batching")(continuous_batching)
app.command()(adaptive)
app.command()(roofline)
app.command()(kernels)
