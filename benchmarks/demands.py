"""What Noria is asked to show, and whether the measurements show it. Thresholds are data; what is missing says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import shapes

from noria.bench.workloads import presets
from peers import table
from peers.schedule import label
from peers.store import Report, Run

Figures = Mapping[str, Any]
_LATENCIES = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """`met`, `aim_met`: None where it was not measured, or there is no aim."""

    number: str
    demand: str
    measured: str
    met: bool | None
    aim_met: bool | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Noria's variant is to be so many times as good as the best of some others on a preset."""

    number: str
    preset: str
    ours: str
    others: tuple[str, ...]  # beginnings of labels; () stands for every peer
    least: float
    aim: float | None = None


TIMES = (
    Times("1", "W1", "int8", (), 1.6, 2.0),
    Times("1", "W1", "int8", ("vLLM",), 2.2, 2.6),
    Times("1", "W1", "int8", ("llama.cpp",), 3.5, 4.0),
    Times("1", "W1", "bf16", ("vLLM",), 1.4),
    Times("2", "W2", "stored", ("llama.cpp Q4_1",), 1.7),
    Times("2", "W2", "stored", ("llama.cpp Q4_0",), 1.2),
    Times("2", "W2", "int8", ("llama.cpp Q8_0",), 1.3),
    Times("2", "W2", "bf16", ("llama.cpp BF16",), 1.0),
    Times("3", "W3", "int8", (), 1.35, 1.5),
    Times("3", "W4", "int8", (), 2.0),
    Times("3", "W5", "int8", (), 1.6),
)
# Number, what, quantization, phase, tokens of each sequence, sequences, least share.
SHARES = (
    ("5", "W1 decode, int8", "int8", "decode", 100, 0.65),
    ("5", "W3, int8", "int8", "prefill", 1, 0.70),
    ("5", "W2, Q4_1 as stored", "auto", "decode", 1, 0.65),
    ("5", "W2, int8", "int8", "decode", 1, 0.75),
)
SHAPES = (("4", "Q4_0", 1, 1.1), ("4", "Q4_0", 32, 2.0))
MEMORY_MB, IDLE_PERCENT, PLAN_MS = 1000.0, 1.0, 1.0


@dataclass(frozen=True, slots=True)
class Facts:
    """The files' contents; None for what was not measured."""

    peers: Figures | None
    shapes: Figures | None
    roofline: Mapping[str, Figures]
    idle: Figures | None
    plan: Figures | None

    def report(self) -> Report:
        return table.report_from(self.peers) if self.peers else Report()

    def medians(self) -> dict[tuple[str, str, str], Run]:
        """(preset, engine, variant) → the median run, of those that have a good one."""
        return {key: run for key, (run, count) in table.medians(self.report().runs).items() if count}


def verdicts(facts: Facts) -> list[Verdict]:
    """All of them, in order of their numbers."""
    found = [*_times(facts), *_latencies(facts), *_shapes(facts), *_shares(facts), *_memory(facts), *_planning(facts)]
    return sorted(found, key=lambda one: one.number)


def _times(facts: Facts) -> Iterator[Verdict]:
    middle = facts.medians()
    ratios: Sequence[Figures] = facts.peers["ratios"] if facts.peers else ()
    for one in TIMES:
        unit = table.FIGURES[one.preset][1]
        whom = " or ".join(one.others) if one.others else "the best peer"
        aim = f" (aim {one.aim:g} ×)" if one.aim else ""
        demand = f"{one.preset}, {one.ours}: {one.least:g} × {whom} in {unit}{aim}"
        best = _best(middle, one.preset, one.others)
        ratio = next(
            (r for r in ratios if (r["preset"], r["noria"], r["against"]) == (one.preset, one.ours, best)), None
        )
        if ratio is None:
            yield Verdict(one.number, demand, "–", None)
            continue
        measured = f"{ratio['ratio']:.2f} × {best} (of {ratio['turns']} turns)"
        aim_met = None if one.aim is None else ratio["ratio"] >= one.aim
        yield Verdict(one.number, demand, measured, ratio["ratio"] >= one.least, aim_met)


def _best(middle: Mapping[tuple[str, str, str], Run], preset: str, others: tuple[str, ...]) -> str | None:
    """The best of the others by its median run."""
    more = table.FIGURES[preset][2]
    rated = {
        label(engine, variant): table.figure(run)
        for (where, engine, variant), run in middle.items()
        if where == preset and engine != "Noria" and (not others or label(engine, variant).startswith(others))
    }
    known = {name: value for name, value in rated.items() if value is not None}
    return (max if more else min)(known, key=lambda name: known[name], default=None)


def _latencies(facts: Facts) -> Iterator[Verdict]:
    middle = facts.medians()
    for number, preset in (("1", "W1"), ("3", "W5")):
        demand = f"{preset}, int8: TTFT and TPOT, p50 and p99, better than every peer's under this load"
        ours = middle.get((preset, "Noria", "int8"))
        peers = [
            run
            for (where, engine, _), run in middle.items()
            if where == preset and engine != "Noria" and _has_all_callers(run)
        ]
        if ours is None or not peers:
            yield Verdict(number, demand, "–", None)
            continue
        cells, met = [], True
        for key, part in _LATENCIES:
            own = _latency(ours, key, part)
            least = min((_latency(run, key, part), label(run.engine, run.variant)) for run in peers)
            met = met and own < least[0]
            name = f"{key[:4].upper()} {part}"
            cells.append(f"{name} {own:,.0f} ms against {least[0]:,.0f} ({least[1]})")
        yield Verdict(number, demand, "; ".join(cells), met)


def _has_all_callers(run: Run) -> bool:
    """Whether as many asked at once as the preset says: who serves fewer makes nobody wait for the others."""
    return run.requests is None or run.requests >= (presets()[run.preset].concurrency or 1)


def _latency(run: Run, key: str, part: str) -> float:
    values = run.outcome.figures[key] if run.outcome.figures else None
    return float(values[part]) if values else float("inf")


def _shapes(facts: Facts) -> Iterator[Verdict]:
    cases = {case["case"]["stored"]: case for case in facts.shapes["cases"]} if facts.shapes else {}
    for number, stored, batch, least in SHAPES:
        demand = f"1.5B shape, {stored}: {least:g} × llama.cpp at batch {batch}"
        ratio = shapes.ratios(cases[stored]).get(batch) if stored in cases else None
        yield Verdict(
            number, demand, "–" if ratio is None else f"{ratio:.2f} ×", None if ratio is None else ratio >= least
        )


def _shares(facts: Facts) -> Iterator[Verdict]:
    for number, what, quantization, kind, seqs, least in SHARES:
        demand = f"{what}: {least:.0%} of the machine's limit"
        phases = facts.roofline.get(quantization, {}).get("phases", ())
        share = next((p["of_limit"] for p in phases if p["phase"] == kind and p["seqs"] == seqs), None)
        yield Verdict(
            number, demand, "–" if share is None else f"{share:.0%}", None if share is None else share >= least
        )


def _memory(facts: Facts) -> Iterator[Verdict]:
    demand = "W1: peak memory of all processes under 1 GB"
    runs = {key[2]: run.outcome.memory_mb for key, run in facts.medians().items() if key[:2] == ("W1", "Noria")}
    known = {name: value for name, value in runs.items() if value is not None}
    measured = ", ".join(f"{name} {value:,.0f} MB" for name, value in sorted(known.items())) or "–"
    yield Verdict("6", demand, measured, max(known.values()) < MEMORY_MB if known else None)
    idle = facts.idle["percent_of_a_core"] if facts.idle else None
    measured = "–" if idle is None else f"{idle:.2f} %"
    yield Verdict("6", "idle server under 1 % of a core", measured, None if idle is None else idle < IDLE_PERCENT)


def _planning(facts: Facts) -> Iterator[Verdict]:
    demand = "planning a step with 256 running and 10,000 waiting: under 1 ms"
    case = next((case for case in facts.plan["cases"] if case["case"] == "decode"), None) if facts.plan else None
    if case is None:
        yield Verdict("7", demand, "–", None)
        return
    measured = f"{case['p50_ms']:.2f} ms in the median, {case['p99_ms']:.2f} ms at p99"
    yield Verdict("7", demand, measured, case["p99_ms"] < PLAN_MS)
