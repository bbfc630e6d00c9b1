"""Serves a model and runs the preset workloads against it over HTTP: one table in Markdown, all figures in JSON.

python benchmarks/run_presets.py --model smollm2 --quantization auto,int8 --static
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving import noria_server

from noria.bench.report import machine

PRESETS = ("W1", "W2", "W3", "W4", "W5")


def measure(url: str, preset: str, model: str, repeat: int, scratch: Path) -> dict[str, Any]:
    """One preset against a running server: the median run of `repeat`."""
    path = scratch / f"{preset}.json"
    command = [sys.executable, "-m", "noria.cli.main", "bench", "serve", "--url", url, "--preset", preset]
    subprocess.run([*command, "--tokenizer", model, "--repeat", str(repeat), "--json", str(path)], check=False)
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def row(name: str, preset: str, figures: dict[str, Any]) -> str:
    def pair(key: str) -> str:
        values = figures[key]
        return f"{values['p50']:,.1f} / {values['p99']:,.1f}" if values else "–"

    prompt_rate = figures["prompt_tokens"] / figures["wall_s"]
    return (
        f"| {preset} | {name} | {figures['completed']}/{figures['requests']} | {figures['wall_s']:,.1f} | "
        f"{figures['output_tokens_per_s']:,.1f} | {prompt_rate:,.0f} | {pair('ttft_ms')} | {pair('tpot_ms')} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="auto,int8,none", help="comma-separated schemes to serve in")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--static", action="store_true", help="also static batching, on W1")
    parser.add_argument("--output", type=Path, default=Path("build/bench/presets"))
    args = parser.parse_args()

    runs = [(scheme, ["--quantization", scheme], args.presets.split(",")) for scheme in args.quantization.split(",")]
    if args.static:
        runs += [(f"{args.quantization.split(',')[0]}, static", ["--static-batching"], ["W1"])]
    lines = [
        "| preset | scheme | completed | wall s | out tok/s | prompt tok/s | TTFT ms p50 / p99 | TPOT ms p50 / p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reports = []
    for name, flags, presets in runs:
        with noria_server(args.model, *flags) as url:
            for preset in presets:
                report = measure(url, preset, args.model, args.repeat, args.output.parent)
                reports.append({"scheme": name, "preset": preset, **report})
                lines.append(row(name, preset, report["median"]))
    where = machine()
    about = f"{args.model}, commit {where['commit']}, {where['cpu']}, {where['isa']}, "
    about += f"{where['threads']} threads, {where['time']}"
    table = f"{about}\n\n" + "\n".join(lines) + "\n"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".md").write_text(table, encoding="utf-8")
    args.output.with_suffix(".json").write_text(
        json.dumps({"machine": where, "runs": reports}, indent=1), encoding="utf-8"
    )
    print(table)


if __name__ == "__main__":
    main()
