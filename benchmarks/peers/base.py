"""What the runner knows of an engine: how to get it ready, to start it in a setting, and to put a load on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from noria.bench.workloads import BenchRequest, Lengths, WorkloadSpec
from noria.files.resolve import ModelFiles


class Unavailable(Exception):
    """An engine cannot be had or run here; the message becomes its row of the table."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where things are.

    Attributes:
        root: this run's working folder; environments and converted models stay there for the next run.
        model: what Noria serves, as the user named it. files: the same, resolved.
        threads: compute threads for every engine.
        install_limit: seconds an installation may take.
        llama_bin: a folder with llama.cpp's programs that is taken instead of building them.
    """

    root: Path
    model: str
    files: ModelFiles
    threads: int
    install_limit: float = 3600.0
    llama_bin: Path | None = None

    def folder(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log(self, name: str) -> Path:
        """A new file for what a program says."""
        return self.folder("logs") / f"{time.strftime('%m%d-%H%M%S')}-{name}.log"


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the weights in an engine.

    Attributes:
        name: tells it from the engine's others: Q4_0, bf16.
        scheme: how weights are held and multiplied, for people. cache: type of the KV cache.
        against: Noria's variants that it is compared with.
        most_requests: of a preset, where all of them would take too long.
    """

    name: str
    scheme: str
    cache: str
    against: tuple[str, ...] = ()
    most_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, made of the same prompts for every engine.

    Attributes:
        preset: its name. spec: the preset, possibly with fewer requests.
        seed, text: what the prompts are drawn with and cut from; they differ from turn to turn, so that no engine finds
            a prompt in its prefix cache.
        requests: the same requests, drawn already, for engines without HTTP.
        limit: seconds that the measurement may take.
    """

    preset: str
    spec: WorkloadSpec
    seed: int
    text: Path
    requests: tuple[BenchRequest, ...]
    limit: float

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the workload may have, prompt and output."""
        return self.spec.shared + _most(self.spec.input) + _most(self.spec.output)

    @property
    def callers(self) -> int:
        """Most requests at a time."""
        return min(self.spec.concurrency or self.spec.requests, self.spec.requests)


def _most(lengths: Lengths) -> int:
    return lengths if isinstance(lengths, int) else lengths[1]


@dataclass(slots=True)
class Outcome:
    """Figures of one measurement, as `noria bench serve` reports them, or why there are none."""

    figures: dict[str, Any] | None
    error: str | None = None
    memory_mb: float | None = None  # proportional set size of all the engine's processes, the largest seen

    @property
    def broken(self) -> bool:
        """Whether the engine is dead or may still be busy with what was not waited for."""
        return self.figures is None or not self.figures["completed"]


class Session(Protocol):
    """An engine that is up."""

    seconds: float  # from its start until it was ready
    pid: int

    def measure(self, load: Load, scratch: Path) -> Outcome:
        """Puts a load on it and waits for the end, at most `load.limit` seconds."""
        ...


class Peer(Protocol):
    """An engine.

    Attributes:
        name: as its makers write it.
        how: "HTTP", or "in process": without HTTP, text and streaming, which costs it less than a server pays.
    """

    name: str
    how: str

    @property
    def variants(self) -> tuple[Variant, ...]: ...

    def prepare(self) -> None:
        """Installs it and converts the model, if that is not done yet. Raises Unavailable."""
        ...

    def version(self) -> str: ...

    def settings(self, variant: Variant, load: Load) -> tuple[str, ...]:
        """What it is started with for a load. A session goes on as long as they stay the same."""
        ...

    def start(self, variant: Variant, settings: Sequence[str]) -> AbstractContextManager[Session]:
        """Runs it until the block ends, which stops all its processes. Raises Unavailable."""
        ...
