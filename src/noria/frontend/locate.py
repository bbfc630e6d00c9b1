"""From what a user called a model to its files, downloading a known one that is not there yet."""

from __future__ import annotations

import sys

from noria.errors import PullError
from noria.files.catalog import KNOWN
from noria.files.resolve import ModelFiles, resolve


def find_model(model: str) -> ModelFiles:
    """The files of a model. A short name that is not on this machine yet is pulled, with a line that says so.

    Raises:
        PullError: it is not here and has no short name, or the download failed.
    """
    try:
        return resolve(model)
    except PullError:
        if model.strip() not in KNOWN:
            raise
    print(f"{model.strip()} is not on this machine yet: downloading it", file=sys.stderr)
    _pull(model.strip())
    return resolve(model)


def _pull(name: str) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from noria.files.pull import pull

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=KNOWN[name].nbytes)
        pull(name, lambda done, total: bar.update(task, completed=done, total=total))
