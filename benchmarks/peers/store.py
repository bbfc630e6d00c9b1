"""Measurements on disk: a file each, written as soon as it is done, so that a run can be taken up where it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers.base import Outcome
from peers.schedule import Job


@dataclass(slots=True)
class Run:
    """One measurement.

    Attributes:
        start_s: from the engine's start until it was ready. settings: what it ran with.
        commit: Noria's. began: the time of day, as machine() writes it.
        requests: how many, where the preset was shortened for this variant.
    """

    preset: str
    turn: int
    engine: str
    variant: str
    outcome: Outcome
    start_s: float | None = None
    settings: tuple[str, ...] = ()
    commit: str | None = None
    began: str | None = None
    requests: int | None = None


@dataclass(slots=True)
class Report:
    """All measurements, and engines (or variants) that could not be had, with the reason."""

    runs: list[Run] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Store:
    """A folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, job: Job) -> Run | None:
        """What was measured; None if nothing was."""
        path = self._path(job)
        return _read(path) if path.exists() else None

    def put(self, job: Job, run: Run) -> None:
        path = self._path(job)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)

    def __iter__(self) -> Iterator[Run]:
        return (_read(path) for path in sorted(self.folder.glob("W*.json")))

    def _path(self, job: Job) -> Path:
        return self.folder / f"{job.name}.json"


def _read(path: Path) -> Run:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return run_from(values)


def run_from(values: dict[str, Any]) -> Run:
    """Of its plain data."""
    outcome, settings = Outcome(**values["outcome"]), tuple(values["settings"])
    return Run(**{**values, "outcome": outcome, "settings": settings})
