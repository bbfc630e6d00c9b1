"""Kinds of batching beside each other, in one process: continuous against static on W5, fixed batch sizes as in the
recipe, and the pacer without objectives on W1 and W2. Table, JSON.

python benchmarks/batching.py --model smollm2 --quantization int8 --output benchmarks/results/batching

All variants of a part run in turns on the same prompts; ratios are taken turn by turn. Medians over turns are shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from noria.bench.report import machine, summarise
from noria.bench.workloads import WorkloadSpec, presets
from noria.cli.bench_batching import batching_options
from noria.cli.bench_common import run_in_process
from noria.config import EngineOptions
from noria.errors import NoriaError

STATIC_SIZES = (16, 32, 64)
SWEEP = (32, 64, 128, 256, 512, 1024)
FIXED = (32, 64, 128, 256)
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """How requests are batched. `size`: fixed, or the most that the pacer may set."""

    kind: str  # continuous, static, paced
    size: int

    @property
    def name(self) -> str:
        return self.kind if self.kind == "paced" else f"{self.kind} {self.size}"

    def options(self, model: dict[str, Any], threads: int | None) -> EngineOptions:
        return batching_options(self.size, self.kind != "static", self.kind == "paced", (None, None), model, threads)


@dataclass(frozen=True, slots=True)
class Ratio:
    """`figure` of one variant by that of another: names of variants, and the key of a summary (and of a percentile)."""

    of: str
    by: str
    figure: tuple[str, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured together."""

    title: str
    spec: WorkloadSpec
    variants: tuple[Variant, ...]
    ratios: tuple[Ratio, ...]


_RATE, _END, _GAP = ("output_tokens_per_s",), ("e2e_ms", "p50"), ("tpot_ms", "p50")


def parts(names: Sequence[str], requests: int | None) -> dict[str, Part]:
    """Those asked for. `requests`: instead of each workload's own number."""
    known, found = presets(), {}
    recipe = WorkloadSpec(requests=500, concurrency=100, input=128, output=128)
    for name in names:
        if name == "static":
            found[name] = _static(_shorter(known["W5"], requests))
        elif name == "sweep":
            found[name] = _sweep(_shorter(recipe, requests))
        elif name in ("W1", "W2"):
            found[name] = _paced(name, _shorter(known[name], requests))
        else:
            raise SystemExit(f"there is no part {name!r}; there are static, sweep, W1, W2")
    return found


def _shorter(spec: WorkloadSpec, requests: int | None) -> WorkloadSpec:
    return msgspec.structs.replace(spec, requests=min(spec.requests, requests)) if requests else spec


def _static(spec: WorkloadSpec) -> Part:
    variants = tuple(Variant(kind, size) for size in STATIC_SIZES for kind in ("static", "continuous"))
    ratios = tuple(
        Ratio(f"continuous {size}", f"static {size}", figure, label)
        for size in STATIC_SIZES
        for figure, label in ((_RATE, "output tok/s"), (_END, "median latency"))
    )
    return Part("W5: continuous and static batching", spec, variants, ratios)


def _sweep(spec: WorkloadSpec) -> Part:
    """The recipe's sizes, and the recipe with the pacer. All are compared with the largest size."""
    variants = (*(Variant("continuous", size) for size in SWEEP), Variant("paced", 256))
    base = f"continuous {SWEEP[-1]}"
    ratios = tuple(
        Ratio(one.name, base, figure, label)
        for one in variants
        if one.name != base
        for figure, label in ((_RATE, "output tok/s"), (_END, "median latency"))
    )
    return Part(f"{spec.requests} requests, 100 at a time, 128 in, 128 out: fixed sizes", spec, variants, ratios)


def _paced(name: str, spec: WorkloadSpec) -> Part:
    """Without objectives the pacer shall lose nothing: throughput of many callers, latency of one."""
    sizes, figure, label = (FIXED, _RATE, "output tok/s") if name == "W1" else ((1,), _GAP, "median TPOT")
    variants = (*(Variant("continuous", size) for size in sizes), Variant("paced", 256))
    ratios = tuple(Ratio("paced", one.name, figure, label) for one in variants[:-1])
    return Part(f"{name}: the pacer without objectives", spec, variants, ratios)


def measure(part: Part, turns: int, run: Callable[[Variant, WorkloadSpec, int], Figures]) -> Figures:
    """Everybody once, then everybody again: a change of the machine meets all alike."""
    runs: dict[str, list[Figures]] = {variant.name: [] for variant in part.variants}
    for turn in range(turns):
        for variant in part.variants:
            runs[variant.name].append(run(variant, part.spec, turn))
    return {
        "title": part.title,
        "workload": msgspec.to_builtins(part.spec),
        "runs": runs,
        "ratios": [_ratio(ratio, runs) for ratio in part.ratios],
    }


def _ratio(ratio: Ratio, runs: dict[str, list[Figures]]) -> Figures:
    pairs = zip(runs[ratio.of], runs[ratio.by], strict=True)
    values = [_pick(ours, ratio.figure) / _pick(theirs, ratio.figure) for ours, theirs in pairs]
    found = {"ratio": float(np.median(values)), "least": min(values), "most": max(values)}
    return {"of": ratio.of, "by": ratio.by, "figure": ratio.label, **found}


def _pick(figures: Figures, keys: tuple[str, ...]) -> float:
    value: Any = figures
    for key in keys:
        value = value[key]
    return float(value)


def _median(runs: list[Figures], *keys: str) -> str:
    """Over the turns; requests of a single token have no TPOT."""
    if any(one[keys[0]] is None for one in runs):
        return "–"
    return f"{np.median([_pick(one, keys) for one in runs]):,.1f}"


def markdown(found: Figures) -> str:
    """A table of figures and a table of ratios for each part."""
    where, about = found["machine"], found["model"]
    lines = [
        "# Kinds of batching",
        "",
        f"{about['model']} {about['quantization']}, commit {where['commit']}, {where['cpu']}, {where['isa']}, "
        f"{where['threads']} threads, {where['time']}. In process, medians of {found['turns']} turns.",
    ]
    for part in found["parts"].values():
        lines += ["", f"## {part['title']}", "", *_figures(part["runs"]), "", *_ratios(part["ratios"])]
    return "\n".join(lines) + "\n"


def _figures(runs: dict[str, list[Figures]]) -> list[str]:
    names = ("out tok/s", "TTFT ms p50", "TTFT ms p99", "TPOT ms p50", "end to end ms p50", "end to end ms p99")
    lines = [f"| batching | {' | '.join(names)} | running |", "|---" * (len(names) + 2) + "|"]
    columns = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("e2e_ms", "p50"), ("e2e_ms", "p99"))
    for name, own in runs.items():
        cells = [_median(own, "output_tokens_per_s"), *(_median(own, *column) for column in columns)]
        running = max(one["running_most"] for one in own)
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {running:,} |")
    return lines


def _ratios(ratios: list[Figures]) -> list[str]:
    lines = ["| | by | figure | ratio | least … most |", "|---|---|---|---|---|"]
    for one in ratios:
        span = f"{one['least']:.2f} … {one['most']:.2f}"
        lines.append(f"| {one['of']} | {one['by']} | {one['figure']} | {one['ratio']:.2f} | {span} |")
    return lines


def write(output: Path, found: Figures) -> str:
    """OUTPUT.json and OUTPUT.md; returns the latter's text."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = markdown(found)
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="int8", help="auto, none, int8 or int4")
    parser.add_argument("--parts", default="static,sweep,W1,W2")
    parser.add_argument("--repeat", type=int, default=3, help="turns")
    parser.add_argument("--requests", type=int, help="at most so many of each workload: a quick look, no result")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench/batching"), help="files' names, without suffix"
    )
    args = parser.parse_args()
    model = {"model": args.model, "quantization": args.quantization}

    def run(variant: Variant, spec: WorkloadSpec, turn: int) -> Figures:
        done = run_in_process(variant.options(model, args.threads), spec, "text", turn, variant.name)
        figures = summarise(done.records)
        if figures["completed"] < figures["requests"]:
            raise SystemExit(f"{variant.name}: {figures['errors']}")
        return {**figures, "running_most": max((sample.running for sample in done.samples), default=0)}

    try:
        wanted = parts(args.parts.split(","), args.requests)
        found = {name: measure(part, args.repeat, run) for name, part in wanted.items()}
    except NoriaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    about = {"model": Path(args.model).name, "quantization": args.quantization}
    print(write(args.output, {"machine": machine(), "model": about, "turns": args.repeat, "parts": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
