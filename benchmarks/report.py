"""Writes RESULTS.md and its chart from the JSON files that the benchmarks left in a folder. Measures nothing.

python benchmarks/report.py --results benchmarks/results --output benchmarks/RESULTS.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import batching
import growth
import shapes
from demands import Facts, Verdict, verdicts

from noria.bench.charts import Bar, bars
from peers import table

PRESETS = {
    "W1": "200 requests, 100 at a time, 128 tokens in, 128 out, all prompts different",
    "W2": "5 requests, one at a time, 128 in, 128 out",
    "W3": "10 prompts of 1,024 tokens, 1 out, one at a time",
    "W4": "100 requests, 32 at a time, 896 shared tokens and 32 own, 32 out",
    "W5": "200 requests, 64 at a time, 16…512 in, 16…512 out, heavy at the short end",
}
SHORT_CALL = 100.0  # µs
FEW_ROWS = 8  # up to which a product is bound by its weights' bytes
ABOVE = 0.03  # share of a step from which on an op is listed
# Why an op stays below its limit, by the beginning of its label.
WHY = {
    "attention": "exponentials and maxima come on top of the products and bytes that the limit counts",
    "rope, cache": "rotates and quantises every key: work that the limit does not count",
    "convert": "rounds activations to codes, a pass over vectors that products read once",
    "norm": "a short pass over vectors; two passes over each row, sum and scaling",
    "sampling": "compares every logit; the limit counts one read of them",
    "embed": "rows of the table are dequantised one by one",
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What lies in the folder; None for what was not measured. `roofline`: by quantization."""

    peers: dict[str, Any] | None
    perplexity: dict[str, Any] | None
    shapes: dict[str, Any] | None
    growth: dict[str, Any] | None
    idle: dict[str, Any] | None
    plan: dict[str, Any] | None
    roofline: Mapping[str, dict[str, Any]]
    batching: dict[str, Any] | None = None


def load(folder: Path) -> Inputs:
    def one(name: str) -> dict[str, Any] | None:
        path = folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    prefix = "roofline-"
    steps = {path.stem.removeprefix(prefix): one(path.stem) for path in sorted(folder.glob(f"{prefix}*.json"))}
    return Inputs(
        one("peers"),
        one("peers-perplexity"),
        one("shapes"),
        one("growth"),
        one("idle"),
        one("plan"),
        {name: values for name, values in steps.items() if values},
        one("batching"),
    )


def markdown(inputs: Inputs) -> str:
    facts = Facts(inputs.peers, inputs.shapes, inputs.roofline, inputs.idle, inputs.plan)
    parts = [
        "# Results",
        about(inputs),
        "## What must be shown",
        demanded(verdicts(facts)),
        *speed(inputs),
        *limit(inputs.roofline),
        *others(inputs),
        *quality(inputs.perplexity),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# ------------------------------------------------------------------------------------------------ parts


def about(inputs: Inputs) -> str:
    where = next((one["machine"] for one in (inputs.peers, inputs.shapes, inputs.idle) if one), None)
    if where is None:
        return "Nothing has been measured yet."
    lines = [f"{where['cpu']}, {where['threads']} threads, ISA level {where['isa']}, {where['time']}."]
    if inputs.peers:
        versions = ", ".join(f"{name} {version}" for name, version in inputs.peers["versions"].items())
        commits = {run["commit"] for run in inputs.peers["runs"] if run["engine"] == "Noria" and run["commit"]}
        lines.append(f"Model: {where['model']}. {versions}. Noria at commit {', '.join(sorted(commits)) or 'unknown'}.")
        lines.append(
            "All engines on the same cores, one at work at a time, in turns on the same prompts; each row is its "
            "median run. HTTP engines stream to `noria bench serve` on the same cores; in-process ones have no server, "
            "no text and no streaming to pay for. Greedy, answers of exact length. `benchmarks/results` has every "
            "measurement; "
            "[the guide](../docs/guides/benchmarks.md) says how it was done."
        )
    return "\n".join(lines)


def demanded(found: Sequence[Verdict]) -> str:
    lines = ["| | asked for | measured | |", "|---|---|---|---|"]
    for one in found:
        state = "not measured" if one.met is None else "met" if one.met else "**not met**"
        if one.met and one.aim_met is False:
            state = "met, not the aim"
        lines.append(f"| {one.number} | {one.demand} | {one.measured} | {state} |")
    met = sum(bool(one.met) for one in found)
    lines += ["", f"{met} of {len(found)} met."]
    return "\n".join(lines)


def speed(inputs: Inputs) -> Iterator[str]:
    """The rows of every preset, and ratios."""
    if not inputs.peers:
        return
    yield "## Beside other engines"
    yield "![W1: output tokens per second](results/w1.svg)"
    perplexity = (inputs.perplexity or {}).get("perplexity", inputs.peers["perplexity"])
    report = table.report_from(inputs.peers)
    for preset, text in PRESETS.items():
        if rows := table.preset_table(preset, report, inputs.peers["variants"], perplexity):
            yield f"### {preset}: {text}"
            yield rows
    yield table.ratio_table(inputs.peers["ratios"])
    if report.missing:
        yield "\n".join(["Not measured:", "", *(f"- {name}: {why}" for name, why in report.missing.items())])


def limit(found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    if not found:
        return
    limits = next(iter(found.values()))["limits"]
    yield "## Share of the machine's limit"
    lines = [
        f"Limits of the machine's best level, `{limits['isa']}`, measured by `noria bench roofline`: every share below "
        "is one of these, whatever instruction a kernel uses. int4 counts as int8; int8 with activations of 16 bits "
        "(`int8/a16`) as two int8 products, one per byte.",
        "",
        "| | one thread | all | how |",
        "|---|---|---|---|",
    ]
    for kind, rate in limits["products"].items():
        how = limits["instructions"][kind]
        lines.append(f"| {kind} products | {rate['one'] / 1e9:,.0f} | {rate['all'] / 1e9:,.0f} GOP/s | {how} |")
    for read in limits["reads"]:
        rate, size = read["rate"], f"{read['bytes'] / 2**20:,.0f} MiB" + (" each" if read["level"] == "L2" else "")
        lines.append(
            f"| reads from {read['level']} | {rate['one'] / 1e9:,.0f} | {rate['all'] / 1e9:,.0f} GB/s | {size} |"
        )
    yield "\n".join(lines)
    for name, one in found.items():
        for phase in one["phases"]:
            yield phase_table(name, one["model"], phase)


def phase_table(name: str, model: Mapping[str, Any], phase: Mapping[str, Any]) -> str:
    """Every op above 3 % of a step, what bounds it, and why it is not at its limit."""
    what = f"{phase['phase']} of {phase['seqs']} × {phase['length']:,} tokens"
    lines = [
        f"### {name}, {what}: {phase['of_limit']:.0%} of the limit",
        "",
        f"{model['weights']}, {model['cache']} cache, kernels at `{model['isa']}`: {phase['step_ms']:,.2f} ms a step "
        f"undisturbed ({phase['tokens_per_s']:,.0f} tokens/s), {phase['median_step_ms']:,.2f} ms in the median; "
        f"the limit is {phase['limit_ms']:,.2f} ms. Weights and cache: {phase['working_set_bytes'] / 1e6:,.0f} MB.",
        "",
        "| op | of the step | ms | GOP/s | GB/s | bound by | share of its limit | why not more |",
        "|---|---|---|---|---|---|---|---|",
    ]
    small = 0.0
    for op in phase["ops"]:
        if op["share"] < ABOVE:
            small += op["share"]
            continue
        rate = f"{op['operations_per_s'] / 1e9:,.0f}" if op["operations"] else ""
        lines.append(
            f"| {op['op']} | {op['share']:.1%} | {op['ms']:,.2f} | {rate} | {op['bytes_per_s'] / 1e9:,.1f} | "
            f"{op['bound_by']} | {op['of_limit']:.0%} | {why(op, phase['tokens'])} |"
        )
    lines += [
        "",
        f"All other ops together {small:.1%}, the rest of the step {phase['rest_ms'] / phase['step_ms']:.1%}.",
    ]
    return "\n".join(lines)


def why(op: Mapping[str, Any], tokens: int) -> str:
    """What keeps an op from its limit, as far as its kind and figures tell."""
    if op["of_limit"] >= 0.9:
        return "at the limit"
    for start, text in WHY.items():
        if op["op"].startswith(start):
            return text
    if not op["operations"]:
        return "a pass over vectors, no product"
    call = 1e3 * op["ms"] / op["count"]  # µs
    reasons = [f"calls of {call:,.0f} µs, of which start and end are a part"] if call < SHORT_CALL else []
    if tokens <= FEW_ROWS:
        reasons.append(
            "bound by memory; codes are unpacked between the reads" if "int" in op["op"] else "bound by memory"
        )
    else:
        reasons.append("operands come from the caches, in the limit from registers")
        if tokens % 16:
            reasons.append(f"{tokens} rows do not fill tiles of 16")
        if "int4" in op["op"]:
            reasons.append("codes are unpacked, sums scaled at every group")
    return "; ".join(reasons)


def others(inputs: Inputs) -> Iterator[str]:
    if inputs.shapes:
        yield "## Other shapes, random weights"
        yield (
            "Decode steps by themselves, the median of all; llama.cpp by llama-batched-bench on the same file, the "
            "better of its flash attention on and off."
        )
        yield shapes.markdown(inputs.shapes["cases"])
    if inputs.batching:
        yield batching.markdown(inputs.batching).replace("\n## ", "\n### ").replace("# Kinds", "## Kinds", 1).strip()
    if inputs.growth:
        yield "## How a step grows"
        yield growth.markdown(inputs.growth)
        yield "![a step by batch](results/growth-batch.svg)\n\n![a step by context](results/growth-context.svg)"
    if inputs.plan:
        yield "## Planning"
        lines = ["| case | running | waiting | ms p50 | p99 | largest |", "|---|---|---|---|---|---|"]
        for case in inputs.plan["cases"]:
            cells = [case["case"], f"{case['running']:,}", f"{case['waiting']:,}"]
            cells += [f"{case[key]:.2f}" for key in ("p50_ms", "p99_ms", "max_ms")]
            lines.append("| " + " | ".join(cells) + " |")
        yield "\n".join(lines) + "\n\nCPU time of the engine's thread for planning and taking in results, per step."
    if inputs.idle:
        yield (
            f"An idle server ({' '.join(inputs.idle['flags'])}) took {inputs.idle['percent_of_a_core']:.2f} % of a "
            f"core over {inputs.idle['seconds']:.0f} s, and {inputs.idle['pss_mb']:,.0f} MB."
        )


def quality(found: dict[str, Any] | None) -> Iterator[str]:
    if not found:
        return
    known = found["about"]
    yield "## Quality"
    lines = [
        f"Perplexity on {known['chunks']} chunks of 512 tokens of `{known['text']}` ({known['scored']:,} tokens "
        "scored), each engine with its own weights and cache type (`python -m peers.perplexity`); Noria on more tokens "
        "and on code: [results/perplexity.md](results/perplexity.md).",
        "",
        "| engine and weights | perplexity |",
        "|---|---|",
        *(f"| {name} | {value:.2f} |" for name, value in sorted(found["perplexity"].items(), key=lambda pair: pair[1])),
    ]
    yield "\n".join(lines)


# ------------------------------------------------------------------------------------------------ chart


def chart(peers: dict[str, Any]) -> str:
    """W1: output tokens per second by engine, the fastest first."""
    middle = table.medians(table.report_from(peers).runs)
    how = {engine: variants[0]["over"] for engine, variants in peers["variants"].items() if variants}
    rows = []
    for (preset, engine, variant), (run, count) in middle.items():
        if preset == "W1" and count and run.outcome.figures:
            note = "" if how.get(engine) == "HTTP" else f"({how.get(engine)})"
            name = f"{engine} {variant}".replace("stored", "Q4_1 as stored" if engine == "Noria" else "stored")
            rows.append(Bar(name, run.outcome.figures["output_tokens_per_s"], note, engine == "Noria"))
    rows.sort(key=lambda row: row.value, reverse=True)
    where = peers["machine"]
    unit = f"output tokens per second, {where['model']}, 2 cores: 100 callers at once, 128 tokens in, 128 out"
    return bars("One hundred callers at once", unit.replace("2 cores", f"{where['threads']} cores"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of the JSON files")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/RESULTS.md"))
    args = parser.parse_args()
    inputs = load(args.results)
    if inputs.peers:
        (args.results / "w1.svg").write_text(chart(inputs.peers), encoding="utf-8")
    if inputs.growth:
        growth.write(args.results / "growth", inputs.growth)
    args.output.write_text(markdown(inputs), encoding="utf-8")
    print(f"{args.output} written")


if __name__ == "__main__":
    main()
