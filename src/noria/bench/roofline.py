"""How near a step comes to what the machine can do: each op's time beside the least that its work could take.

An op's limit is the longest of three bounds: its operations at the rate of their arithmetic, its stored bytes
(weights, cache) at the rate at which a working set as large as the step's is read, and the bytes of its activations at
the rate of the nearest cache that holds them. A step's limit is the sum of its ops' limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from noria.backends.counts import Key, Work
from noria.bench.limits import MachineLimits
from noria.bench.steps import Phase, StepTimes


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds that some work takes, and what sets them: int8, bf16, f32, stored (bytes), or a cache level."""

    seconds: float
    by: str


@dataclass(frozen=True, slots=True)
class OpRow:
    """The same op of all layers together. Times in seconds per step, bytes and operations per step."""

    label: str
    count: int
    seconds: float
    limit: Bound
    operations: int
    stored: int
    passing: int

    @property
    def of_limit(self) -> float:
        return self.limit.seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """A measured phase. `rows`: the longest first. `stored_rate`: bytes per second of the step's working set."""

    phase: Phase
    times: StepTimes
    rows: tuple[OpRow, ...]
    working_set: int
    stored_rate: float

    @property
    def limit(self) -> float:
        return sum(row.limit.seconds for row in self.rows)

    @property
    def of_limit(self) -> float:
        return self.limit / self.times.whole

    def as_json(self) -> dict[str, Any]:
        """Plain data: times in milliseconds, rates per second."""
        whole = self.times.whole
        return {
            "phase": self.phase.kind,
            "seqs": self.phase.seqs,
            "length": self.phase.length,
            "tokens": self.phase.tokens,
            "steps": self.times.steps,
            "step_ms": 1e3 * whole,
            "median_step_ms": 1e3 * self.times.median,
            "limit_ms": 1e3 * self.limit,
            "of_limit": self.of_limit,
            "tokens_per_s": self.phase.tokens / whole,
            "working_set_bytes": self.working_set,
            "stored_bytes_per_s": self.stored_rate,
            "rest_ms": 1e3 * self.times.rest,
            "ops": [_row_json(row, whole) for row in self.rows],
        }


def _row_json(row: OpRow, whole: float) -> dict[str, Any]:
    return {
        "op": row.label,
        "count": row.count,
        "ms": 1e3 * row.seconds,
        "share": row.seconds / whole,
        "operations": row.operations,
        "stored_bytes": row.stored,
        "passing_bytes": row.passing,
        "operations_per_s": row.operations / row.seconds if row.seconds else 0.0,
        "bytes_per_s": (row.stored + row.passing) / row.seconds if row.seconds else 0.0,
        "limit_ms": 1e3 * row.limit.seconds,
        "bound_by": row.limit.by,
        "of_limit": row.of_limit,
    }


def working_set(works: Iterable[Work]) -> int:
    """Bytes that a step reads of what lies in memory between steps."""
    return sum(work.stored for work in works)


def bound(work: Work, limits: MachineLimits, stored_rate: float) -> Bound:
    """The least time that some work takes.

    Args:
        stored_rate: bytes per second of weights and cache.
    """
    near = limits.read(work.passing)
    bounds = [
        Bound(sum(count / limits.products[kind].all for kind, count in work.operations.items()), _main(work)),
        Bound(work.stored / stored_rate, "stored"),
        Bound(work.passing / near.rate.all, near.level),
    ]
    return max(bounds, key=lambda one: one.seconds)


def report(
    phase: Phase, works: dict[Key, Work], times: StepTimes, limits: MachineLimits, stored_rate: float
) -> PhaseReport:
    """Puts times and work together, the same op of all layers in one row."""
    measured = times.ops
    groups: dict[str, list[Key]] = {}
    for key in measured:
        groups.setdefault(works[key].label, []).append(key)
    rows = [_row(label, keys, works, measured, limits, stored_rate) for label, keys in groups.items()]
    rows.sort(key=lambda row: row.seconds, reverse=True)
    return PhaseReport(phase, times, tuple(rows), working_set(works.values()), stored_rate)


def _row(
    label: str,
    keys: list[Key],
    works: dict[Key, Work],
    measured: dict[Key, float],
    limits: MachineLimits,
    stored_rate: float,
) -> OpRow:
    own = [works[key] for key in keys]
    bounds = [bound(work, limits, stored_rate) for work in own]
    longest = max(bounds, key=lambda one: one.seconds)
    return OpRow(
        label=label,
        count=len(keys),
        seconds=sum(measured[key] for key in keys),
        limit=Bound(sum(one.seconds for one in bounds), longest.by),
        operations=sum(work.all_operations for work in own),
        stored=sum(work.stored for work in own),
        passing=sum(work.passing for work in own),
    )


def _main(work: Work) -> str:
    return max(work.operations, key=lambda kind: work.operations[kind], default="f32")
