"""One table from all measurements: Markdown for people, JSON with everything for programs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.base import Peer
from peers.schedule import label
from peers.store import Report, Run, run_from

# The figure by which engines are compared on a preset: name, unit, whether more is better.
FIGURES: dict[str, tuple[str, str, bool]] = {
    "W1": ("output_tokens_per_s", "output tok/s", True),
    "W2": ("decode_tokens_per_s", "decode tok/s", True),
    "W3": ("prompt_tokens_per_s", "prompt tok/s", True),
    "W4": ("wall_s", "wall s", False),
    "W5": ("output_tokens_per_s", "output tok/s", True),
}
COLUMNS = (
    "engine",
    "weights",
    "cache",
    "perplexity",
    "over",
    "runs",
    "output tok/s",
    "prompt tok/s",
    "wall s",
    "TTFT ms p50 / p99",
    "TPOT ms p50 / p99",
    "memory MB",
    "start s",
)
NONE = "–"


def figure(run: Run) -> float | None:
    """What a run is judged by; None for one that failed."""
    figures = run.outcome.figures
    if figures is None or run.outcome.error is not None:
        return None
    key = FIGURES[run.preset][0]
    if key == "prompt_tokens_per_s":
        return prompt_rate(figures)
    if key == "decode_tokens_per_s":
        return 1e3 / figures["tpot_ms"]["p50"]
    return float(figures[key])


def prompt_rate(figures: dict[str, Any]) -> float:
    """Prompt tokens per second of wall time."""
    return float(figures["prompt_tokens"] / figures["wall_s"])


def medians(runs: Iterable[Run]) -> dict[tuple[str, str, str], tuple[Run, int]]:
    """(preset, engine, variant) → the run in the middle by its figure (the lower one of two), and of how many."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.preset, run.engine, run.variant), []).append(run)
    found = {}
    for key, group in groups.items():
        good = sorted((run for run in group if figure(run) is not None), key=lambda run: figure(run) or 0.0)
        found[key] = (good[(len(good) - 1) // 2], len(good)) if good else (group[0], 0)
    return found


def ratios(runs: Sequence[Run], against: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Noria against each engine, turn by turn: how many times as good. The median over turns, least and most.

    A ratio above 1 means that Noria is ahead, whichever way the figure counts.

    Args:
        against: "ENGINE VARIANT" → the variants of Noria that it is compared with.
    """
    ours = {(run.preset, run.turn, run.variant): figure(run) for run in runs if run.engine == "Noria"}
    found: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        name = label(run.engine, run.variant)
        theirs = figure(run)
        for variant in against.get(name, ()):
            own = ours.get((run.preset, run.turn, variant))
            if own and theirs:
                times = own / theirs if FIGURES[run.preset][2] else theirs / own
                found.setdefault((run.preset, variant, name), []).append(times)
    return [
        {
            "preset": preset,
            "noria": variant,
            "against": name,
            "figure": FIGURES[preset][1],
            "ratio": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "turns": len(values),
        }
        for (preset, variant, name), values in sorted(found.items())
    ]


def comparisons(engines: Sequence[Peer]) -> dict[str, tuple[str, ...]]:
    """What `ratios` takes as `against`."""
    return {label(engine.name, variant.name): variant.against for engine in engines for variant in engine.variants}


Variants = Mapping[str, Sequence[Mapping[str, Any]]]  # engine → of each variant what the JSON file says


def markdown(report: Report, engines: Sequence[Peer], where: dict[str, Any], perplexity: dict[str, float]) -> str:
    """The table. `perplexity`: by "ENGINE VARIANT"; what is not in it is left open."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        f"{where['model']}, commit {where['commit']}, {where['cpu']}, {where['isa']}, {where['threads']} threads, "
        f"{where['time']}. {versions}.",
        "Median runs. HTTP engines stream to `noria bench serve` on the same cores; in-process ones have no server, no "
        "text and no streaming to pay for. Answers are greedy and of exact length.",
    ]
    if where.get("requests"):
        parts.append(f"**Shortened: at most {where['requests']} requests a preset.**")
    for preset in sorted({run.preset for run in report.runs}):
        parts.append(f"### {preset}\n\n" + preset_table(preset, report, plain(engines), perplexity))
    parts.append(ratio_table(ratios(report.runs, comparisons(engines))))
    if report.missing:
        parts.append("\n".join(["Not measured:", "", *(f"- {name}: {why}" for name, why in report.missing.items())]))
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(engines: Sequence[Peer]) -> Variants:
    """What is known of the variants, as plain data."""
    return {engine.name: [asdict(variant) | {"over": engine.how} for variant in engine.variants] for engine in engines}


def preset_table(preset: str, report: Report, variants: Variants, perplexity: Mapping[str, float]) -> str:
    """A row for each variant that was measured, its median run; nothing where none was."""
    middle = medians(run for run in report.runs if run.preset == preset)
    if not middle:
        return ""
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for engine, known in variants.items():
        for variant in known:
            if (preset, engine, variant["name"]) in middle:
                run, count = middle[preset, engine, variant["name"]]
                value = perplexity.get(label(engine, variant["name"]))
                about = [
                    engine,
                    variant["scheme"],
                    variant["cache"],
                    f"{value:.2f}" if value else NONE,
                    variant["over"],
                ]
                lines.append(_line([*about, *_cells(run, count)]))
    return "\n".join(lines)


def report_from(values: Mapping[str, Any]) -> Report:
    """Of what `write` left in its JSON file."""
    return Report([run_from(run) for run in values["runs"]], values["missing"], values["versions"])


def _cells(run: Run, count: int) -> list[str]:
    figures = run.outcome.figures
    if figures is None or not count:
        return ["0", run.outcome.error or "failed", *[NONE] * 6]
    memory, start = run.outcome.memory_mb, run.start_s
    return [
        str(count) if run.requests is None else f"{count} ({run.requests} requests)",
        f"{figures['output_tokens_per_s']:,.1f}",
        f"{prompt_rate(figures):,.0f}",
        f"{figures['wall_s']:,.1f}",
        _pair(figures["ttft_ms"]),
        _pair(figures["tpot_ms"]),
        NONE if memory is None else f"{memory:,.0f}",
        NONE if start is None else f"{start:,.1f}",
    ]


def _pair(values: dict[str, float] | None) -> str:
    return f"{values['p50']:,.0f} / {values['p99']:,.0f}" if values else NONE


def ratio_table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    lines = ["### Noria against each, turn by turn", "", _line(["preset", "Noria", "against", "by", "times", "turns"])]
    lines.append(_line(["---"] * 6))
    for row in rows:
        times = f"{row['ratio']:.2f} ({row['least']:.2f}…{row['most']:.2f})"
        lines.append(_line([row["preset"], row["noria"], row["against"], row["figure"], times, str(row["turns"])]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def write(
    path: Path, report: Report, engines: Sequence[Peer], where: dict[str, Any], perplexity: dict[str, float]
) -> str:
    """Writes PATH.md and PATH.json; returns the Markdown."""
    text = markdown(report, engines, where, perplexity)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    values = {
        "machine": where,
        "versions": report.versions,
        "variants": plain(engines),
        "perplexity": perplexity,
        "ratios": ratios(report.runs, comparisons(engines)),
        "missing": report.missing,
        "runs": [asdict(run) for run in report.runs],
    }
    path.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return text
