"""How a decode step's time grows with batch and context, measured on steps by themselves: table, plots, JSON.

python benchmarks/growth.py --model smollm2 --quantization int8 --output benchmarks/results/growth

Every sequence has its own keys and values. Points whose cache does not fit into memory are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from noria.bench.charts import Series, lines
from noria.bench.report import machine
from noria.bench.steps import Phase, StepBench
from noria.cli.common import engine_options, positive_numbers
from noria.errors import ConfigError, NoriaError
from noria.observe.cgroup import available_memory

BATCHES = "1,2,4,8,16,32,64,100,128,256"
CONTEXTS = "128,256,512,1024,2048,4096,8192"
LINE_CONTEXTS = (128, 1024, 8192)  # over all batches
LINE_BATCHES = (1, 32, 100)  # over all contexts
_ROOM = 0.6  # of the available memory, for the cache


def grid(batches: Sequence[int], contexts: Sequence[int], everything: bool = False) -> Iterator[Phase]:
    """Points by context, then batch: the fill of a cache serves all batches of a context."""
    for context in contexts:
        for batch in batches:
            if everything or context in LINE_CONTEXTS or batch in LINE_BATCHES:
                yield Phase("decode", batch, context)


def measure(
    model: str, quantization: str, phases: Sequence[Phase], seconds: float, threads: int | None = None
) -> dict[str, Any]:
    """Times of a step at every point that fits."""
    options = engine_options(model={"model": model, "quantization": quantization}, device={"threads": threads})
    fitting = _fitting(options, phases)
    if not fitting:
        raise ConfigError("not one of the points fits into memory", "--batches")
    bench = StepBench(options, fitting)
    points = []
    for phase in fitting:
        times = bench.measure(phase, seconds)
        points.append(
            {
                "batch": phase.seqs,
                "context": phase.length,
                "undisturbed_ms": 1e3 * times.whole,
                "median_ms": 1e3 * times.median,
                "steps": times.steps,
            }
        )
        print(f"{phase.title}: {1e3 * times.median:,.2f} ms", file=sys.stderr, flush=True)
    return {
        "model": Path(model).name,
        "quantization": quantization,
        "weights": bench.schemes,
        "cache": bench.cache_layout.dtype,
        "threads": bench.backend.threads,
        "isa": bench.backend.isa,
        "points": points,
    }


def _fitting(options: Any, phases: Sequence[Phase]) -> list[Phase]:
    per_block = StepBench(options, [Phase("decode", 1, 2)]).cache_layout.block_bytes
    size = options.cache.block_size
    room = _ROOM * available_memory()
    return [phase for phase in phases if phase.seqs * -(-phase.length // size) * per_block <= room]


def markdown(found: dict[str, Any]) -> str:
    """Two tables: step time by batch and context, and tokens per second."""
    points = {(point["batch"], point["context"]): point["undisturbed_ms"] for point in found["points"]}
    contexts = sorted({context for _, context in points})
    about = f"{found['model']}, {found['weights']}, {found['cache']} cache, {found['isa']}, {found['threads']} threads."
    parts = [
        about,
        "",
        "Milliseconds of a decode step (a token for each of so many sequences), tokens per second in brackets:",
        "",
    ]
    parts.append("| sequences | " + " | ".join(f"{context:,} tokens" for context in contexts) + " |")
    parts.append("|---" * (len(contexts) + 1) + "|")
    for batch in sorted({batch for batch, _ in points}):
        cells = [_cell(batch, points.get((batch, context))) for context in contexts]
        parts.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


def _cell(batch: int, milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds:,.2f} ({1e3 * batch / milliseconds:,.0f})"


def plots(found: dict[str, Any]) -> dict[str, str]:
    """File names' ends → SVG."""
    points = [(point["batch"], point["context"], point["undisturbed_ms"]) for point in found["points"]]
    by_batch = [
        Series(f"{context:,} tokens", [(b, ms) for b, c, ms in points if c == context]) for context in LINE_CONTEXTS
    ]
    by_context = [
        Series(f"{batch} sequence{'s' if batch > 1 else ''}", [(c, ms) for b, c, ms in points if b == batch])
        for batch in LINE_BATCHES
    ]
    name = f"{found['model']} {found['quantization']}"
    made = {
        "batch": (f"{name}: a decode step by batch", "sequences", by_batch),
        "context": (f"{name}: a decode step by context", "tokens of each sequence", by_context),
    }
    return {
        end: lines(title, across, "ms a step", [one for one in series if one.points])
        for end, (title, across, series) in made.items()
        if any(one.points for one in series)
    }


def write(output: Path, found: dict[str, Any]) -> None:
    """OUTPUT.json, OUTPUT.md, OUTPUT-batch.svg and OUTPUT-context.svg."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    images = plots(found)
    for end, svg in images.items():
        output.with_name(f"{output.name}-{end}.svg").write_text(svg, encoding="utf-8")
    shown = [f"![a decode step by {end}]({output.name}-{end}.svg)" for end in images]
    text = "# How a step grows\n\n" + markdown(found) + "\n" + "\n\n".join(shown) + "\n"
    output.with_suffix(".md").write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="int8", help="auto, none, int8 or int4")
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--contexts", default=CONTEXTS)
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long each point is measured")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=Path("build/bench/growth"), help="files' names, without suffix")
    args = parser.parse_args()
    try:
        phases = list(grid(positive_numbers(args.batches, "--batches"), positive_numbers(args.contexts, "--contexts")))
        found = measure(args.model, args.quantization, phases, args.seconds, args.threads)
        write(args.output, {"machine": machine(), **found})
    except (NoriaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
