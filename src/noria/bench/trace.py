"""A trace: requests whose rate of arrival and lengths change from phase to phase. Frozen data, in units of the machine.

Times are multiples of a unit, which a calibration measures: the seconds that one request of its load takes at the large
batch. So the trace asks as much of a slow machine as of a quick one. The objectives lie between what the small and the
large batch give under that load.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from noria.bench.charts import Span
from noria.bench.http import Record
from noria.errors import ConfigError

Row = tuple[float, int, int]  # units after the start of its phase, prompt tokens, output tokens
Batch = Annotated[int, Meta(ge=1, le=1024)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Place = Annotated[float, Meta(ge=0, le=1)]
_FILE = "data/adaptive.json"


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the calibration runs: all requests at once, with each of two batch sizes."""

    requests: Annotated[int, Meta(ge=1, le=100_000)]
    prompt: Tokens
    output: Tokens
    small: Batch
    large: Batch


class TracePhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the trace: its length in units, and its requests in the order of arrival."""

    name: str
    length: Annotated[float, Meta(le=1e6)]
    requests: list[tuple[float, Tokens, Tokens]]


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See above.

    Attributes:
        about: what it is for, and how it was checked.
        ttft_place, tpot_place: where the objectives lie between the small batch (0) and the large one (1), on a
            logarithmic scale.
    """

    about: str
    calibration: Load
    ttft_place: Place
    tpot_place: Place
    phases: list[TracePhase]

    def rows(self) -> list[Row]:
        """All requests, with the time since the start of the trace."""
        starts = [span.start for span in self.spans()]
        return [
            (start + at, prompt, output)
            for start, phase in zip(starts, self.phases, strict=True)
            for at, prompt, output in phase.requests
        ]

    def owners(self) -> list[int]:
        """Of each request, in the order of `rows`, the index of the phase in which it arrives."""
        return [index for index, phase in enumerate(self.phases) for _ in phase.requests]

    def spans(self, unit: float = 1.0) -> list[Span]:
        """When the phases are. `unit`: seconds."""
        ends = np.cumsum([0.0, *(phase.length for phase in self.phases)]) * unit
        return [
            Span(phase.name, float(start), float(end))
            for phase, (start, end) in zip(self.phases, pairwise(ends), strict=True)
        ]


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one batch size gave under the calibration's load. Seconds, medians over the requests."""

    batch: Batch
    request: Annotated[float, Meta(gt=0, le=1e6)]  # wall time by the number of requests
    ttft: Seconds
    tpot: Seconds


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What this machine can do in this hour. `setup`: with which model, and how it is run."""

    setup: str
    small: Speed
    large: Speed

    @property
    def unit(self) -> float:
        """Seconds that a time of 1 stands for."""
        return self.large.request


class Aims(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives in seconds."""

    ttft: float
    tpot: float

    def met(self, record: Record) -> bool:
        """Whether a request was answered within both. One with a single token has no TPOT to miss."""
        return record.error is None and record.ttft <= self.ttft and (record.tpot or 0.0) <= self.tpot


def read_trace(text: bytes, name: str = "the trace") -> Trace:
    """Raises ConfigError: it is not a trace, or its requests are not in order and within their phases."""
    try:
        trace = msgspec.json.decode(text, type=Trace)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} cannot be used: {error}", "--trace") from None
    for phase in trace.phases:
        times = [at for at, _, _ in phase.requests]
        if not times or times != sorted(times) or times[0] < 0 or times[-1] >= phase.length:
            raise ConfigError(f"{name}: the requests of phase {phase.name!r} are not in order within it", "--trace")
    if not trace.phases:
        raise ConfigError(f"{name} has no phases", "--trace")
    return trace


def load_trace(path: Path | None = None) -> tuple[Trace, str]:
    """The trace of a file, or the one that comes with Noria, and a digest of it."""
    try:
        text = path.read_bytes() if path else resources.files("noria.bench").joinpath(_FILE).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", "--trace") from None
    trace = read_trace(text, str(path) if path else "the trace")
    return trace, hashlib.sha256(text).hexdigest()


def aims(trace: Trace, found: Calibration, ttft_ms: float | None = None, tpot_ms: float | None = None) -> Aims:
    """Objectives: those given, else between what the two batch sizes gave."""
    small, large = found.small, found.large
    return Aims(
        ttft=ttft_ms / 1e3 if ttft_ms is not None else _between(small.ttft, large.ttft, trace.ttft_place),
        tpot=tpot_ms / 1e3 if tpot_ms is not None else _between(small.tpot, large.tpot, trace.tpot_place),
    )


def _between(first: float, last: float, place: float) -> float:
    return float(first ** (1 - place) * last**place)


def speed(batch: int, records: list[Record]) -> Speed:
    """Raises ConfigError: a request of the calibration failed."""
    failed = next((record.error for record in records if record.error is not None), None)
    if failed is not None:
        raise ConfigError(f"the calibration failed: {failed}")
    wall = max(record.end for record in records) - min(record.start for record in records)
    return Speed(
        batch=batch,
        request=wall / len(records),
        ttft=float(np.median([record.ttft for record in records])),
        tpot=float(np.median([record.tpot or 0.0 for record in records])),
    )


def read_calibration(path: Path, setup: str) -> Calibration:
    """Of a report of `noria bench adaptive`. Raises ConfigError, also where it was another setup."""
    try:
        report: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        found = msgspec.convert(report["calibration"], Calibration)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", "--calibration") from None
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no calibration of this kind ({error})", "--calibration") from None
    if found.setup != setup:
        raise ConfigError(f"{path} was calibrated with {found.setup}; this is {setup}", "--calibration")
    return found
