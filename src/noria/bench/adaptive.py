"""One trace against fixed batch sizes and against the pacer: who answers how many requests within their objectives.

A request belongs to the phase in which it arrived. Goodput is the number of requests within both objectives, by the
length of the phase, whenever they were answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noria.bench.http import Record
from noria.bench.offline import Clock, Sample, Sampler, run_offline, sizes
from noria.bench.report import summarise
from noria.bench.trace import Aims, Calibration, Trace, speed
from noria.bench.workloads import BenchRequest
from noria.engine.core import EngineCore

PACER = "pacer"
_EVERY = 0.05  # seconds between two samples of an engine
Run = Callable[[str], "Turn"]


@dataclass(slots=True)
class Turn:
    """One replay. `start`: the time of the trace's beginning on the clock of records and samples."""

    start: float
    records: list[Record]
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class Contestant:
    """A batch size or the pacer, and its replays, each with its figures by phase, and over the whole."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    phases: list[list[dict[str, Any]]] = field(default_factory=list)
    whole: list[dict[str, Any]] = field(default_factory=list)

    def met(self, phase: int) -> float:
        """Requests of a phase within their objectives, median over the replays."""
        return float(np.median([turn[phase]["met"] for turn in self.phases]))

    @property
    def all_met(self) -> float:
        """Of the whole trace, median over the replays."""
        return float(np.median([turn["met"] for turn in self.whole]))

    @property
    def median(self) -> int:
        """Index of the replay that is shown: the median one by what was met."""
        return int(np.argsort([turn["met"] for turn in self.whole], kind="stable")[len(self.whole) // 2])


def replay(
    core: EngineCore,
    requests: Sequence[BenchRequest],
    on_done: Callable[[Record], None] = lambda _: None,
    clock: Clock | None = None,
) -> Turn:
    """Sends every request at its time, on an engine that is used for nothing else."""
    sampler = Sampler(_EVERY)
    records = run_offline(core, requests, None, on_done, sampler, clock)
    return Turn(records[0].start - requests[0].at, records, sampler.samples)


def calibrate(setup: str, trace: Trace, run: Callable[[int], list[Record]]) -> Calibration:
    """Runs the calibration's load with both of its batch sizes."""
    small, large = trace.calibration.small, trace.calibration.large
    return Calibration(setup=setup, small=speed(small, run(small)), large=speed(large, run(large)))


def compete(names: Sequence[str], repeat: int, trace: Trace, unit: float, goals: Aims, run: Run) -> list[Contestant]:
    """Replays the trace with everybody, `repeat` times in turns, so that a change of the machine meets all alike."""
    found = [Contestant(name) for name in names]
    for _ in range(repeat):
        for one in found:
            turn = run(one.name)
            one.turns.append(turn)
            one.phases.append(by_phase(trace, unit, turn.records, goals))
            one.whole.append(_figures(turn.records, goals, trace.spans(unit)[-1].end))
            if turn.samples:
                one.whole[-1]["sizes"] = sizes(turn.samples)
    return found


def by_phase(trace: Trace, unit: float, records: Sequence[Record], goals: Aims) -> list[dict[str, Any]]:
    """Figures of each phase. `records`: in the order of the trace's requests."""
    owners = trace.owners()
    return [
        {"phase": span.name}
        | _figures([one for one, owner in zip(records, owners, strict=True) if owner == index], goals, span.length)
        for index, span in enumerate(trace.spans(unit))
    ]


def _figures(records: Sequence[Record], goals: Aims, seconds: float) -> dict[str, Any]:
    met = sum(goals.met(record) for record in records)
    summary = summarise(records, goals.ttft, goals.tpot)
    return {**summary, "met": met, "seconds": seconds, "goodput_requests_per_s": met / seconds}


def verdict(found: Sequence[Contestant]) -> dict[str, Any]:
    """What the fixed sizes reach, and the pacer beside them. Shares are of requests met, medians over the replays.

    `best_of_phases`: the sum over phases of what the best size of each meets, chosen afterwards. Ratios of the pacer
    are also given replay by replay, against the sizes of the same turn.
    """
    fixed = [one for one in found if one.name != PACER]
    pacer = next((one for one in found if one.name == PACER), None)
    result: dict[str, Any] = {}
    if fixed:
        phases = range(len(fixed[0].phases[0]))
        best = [_best(fixed, phase) for phase in phases]
        top = max(fixed, key=lambda one: one.all_met)
        ideal = sum(one.met(phase) for phase, one in enumerate(best))
        result = {
            "best_of_phases": {"met": ideal, "sizes": [one.name for one in best]},
            "best_single": {"met": top.all_met, "size": top.name, "of_best_of_phases": _ratio(top.all_met, ideal)},
        }
    if fixed and pacer is not None:
        turns = range(len(pacer.whole))
        result["pacer"] = {
            "met": pacer.all_met,
            "of_best_of_phases": _ratio(pacer.all_met, ideal),
            "over_best_single": _ratio(pacer.all_met, top.all_met),
            "of_best_by_phase": [_ratio(pacer.met(phase), best[phase].met(phase)) for phase in phases],
            "turns": [_turn_ratios(pacer, fixed, turn) for turn in turns],
        }
    return result


def _best(fixed: Sequence[Contestant], phase: int) -> Contestant:
    return max(fixed, key=lambda one: one.met(phase))


def _turn_ratios(pacer: Contestant, fixed: Sequence[Contestant], turn: int) -> dict[str, float | None]:
    own = pacer.whole[turn]["met"]
    best = [max(one.phases[turn][phase]["met"] for one in fixed) for phase in range(len(pacer.phases[turn]))]
    return {
        "of_best_of_phases": _ratio(own, sum(best)),
        "over_best_single": _ratio(own, max(one.whole[turn]["met"] for one in fixed)),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def as_json(found: Sequence[Contestant]) -> list[dict[str, Any]]:
    """All figures of everybody, and the state over time of the replay that is shown."""
    return [
        {
            "name": one.name,
            "met": one.all_met,
            "turns": [{"whole": whole, "phases": phases} for whole, phases in zip(one.whole, one.phases, strict=True)],
            "samples": _columns(one.turns[one.median]),
        }
        for one in found
    ]


_MOST_SAMPLES = 400  # of a replay that are stored
_SAMPLED = ("running", "waiting", "batch", "budget", "arrival_rate")


def _columns(turn: Turn) -> dict[str, list[float]]:
    kept = turn.samples[:: len(turn.samples) // _MOST_SAMPLES + 1]
    columns: dict[str, list[float]] = {"at": [round(sample.at - turn.start, 3) for sample in kept]}
    return columns | {name: [round(getattr(one, name), 3) for one in kept] for name in _SAMPLED}
