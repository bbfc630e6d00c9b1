"""Decoding at other shapes, with random weights, beside llama.cpp on the very same files.

python benchmarks/shapes.py --llama-bin build/peers/llama.cpp/build/bin

Noria's steps are measured by themselves, sampling included (`noria.bench.steps`), llama.cpp's by its own
llama-batched-bench, without sampling; both with sequences of the same length.
Files are made once (`random_model`). Each shape is kept as soon as it is measured; the same command again takes up what
is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from growth import measure
from random_model import SHAPES, write_model

from noria.bench.report import machine
from noria.bench.steps import Phase
from noria.errors import NoriaError

PROMPT, TOKENS = 128, 16  # of llama-batched-bench: a sequence is 136 tokens long in the mean
CONTEXT = PROMPT + TOKENS // 2
COMPARED = (1, 32)  # sequences


@dataclass(frozen=True, slots=True)
class Case:
    """A shape in a form. `quantization`: what Noria is told; `auto` keeps the file's own bits."""

    shape: str
    stored: str
    quantization: str
    points: tuple[tuple[int, int], ...]  # (sequences, tokens of each) beside those compared

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.stored}-{self.quantization}"


_LONG = ((1, 1024), (32, 1024), (1, 8192), (8, 8192))
CASES = (
    Case("qwen2.5-1.5b", "Q4_0", "auto", ((8, CONTEXT), (100, CONTEXT), (256, CONTEXT), *_LONG)),
    Case("qwen2.5-1.5b", "Q8_0", "int8", ((100, CONTEXT), (256, CONTEXT), *_LONG)),
    Case("qwen2.5-0.5b", "BF16", "none", ((100, CONTEXT), (256, CONTEXT), *_LONG)),
)


def run_case(case: Case, models: Path, llama_bin: Path | None, seconds: float, threads: int) -> dict[str, Any]:
    """Both engines' figures. Without `llama_bin` llama.cpp's are left out."""
    path = models / f"{case.shape}-{case.stored}.gguf"
    if not path.exists():
        print(f"{path}: writing", file=sys.stderr, flush=True)
        write_model(SHAPES[case.shape], case.stored, path)
    points = sorted({*((batch, CONTEXT) for batch in COMPARED), *case.points}, key=lambda point: point[::-1])
    ours = measure(str(path), case.quantization, [Phase("decode", *point) for point in points], seconds, threads)
    theirs = batched_bench(llama_bin, path, threads) if llama_bin else []
    return {"case": asdict(case), "bytes": path.stat().st_size, "noria": ours, "llama.cpp": theirs}


def batched_bench(folder: Path, model: Path, threads: int) -> list[dict[str, Any]]:
    """[{batch, tokens_per_s}] of decoding, with and without its flash attention, whichever is faster."""
    best: dict[int, dict[str, Any]] = {}
    for flash in ("off", "on"):
        command = [str(folder / "llama-batched-bench"), "-m", str(model), "-c", str(max(COMPARED) * (PROMPT + TOKENS))]
        command += ["-npp", str(PROMPT), "-ntg", str(TOKENS), "-npl", ",".join(map(str, COMPARED))]
        # The prompt is computed once and copied: decoding takes the same time, and the copies save minutes.
        command += ["-pps", "-t", str(threads), "-tb", str(threads), "-fa", flash, "--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        for batch, rate in parse(done.stdout):
            if batch not in best or rate > best[batch]["tokens_per_s"]:
                best[batch] = {"batch": batch, "tokens_per_s": rate, "flash_attention": flash}
    return [best[batch] for batch in sorted(best)]


def parse(output: str) -> list[tuple[int, float]]:
    """(sequences, decoded tokens per second) of llama-batched-bench's lines of JSON."""
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            values = json.loads(line)
            found.append((int(values["pl"]), float(values["speed_tg"])))
    return found


def ratios(found: dict[str, Any]) -> dict[int, float]:
    """Sequences → how many times as many tokens per second as llama.cpp. From medians: disturbed alike."""
    theirs = {entry["batch"]: entry["tokens_per_s"] for entry in found["llama.cpp"]}
    ours = {
        point["batch"]: 1e3 * point["batch"] / point["median_ms"]
        for point in found["noria"]["points"]
        if point["context"] == CONTEXT
    }
    return {batch: ours[batch] / theirs[batch] for batch in sorted(theirs) if batch in ours}


def markdown(cases: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| shape | file | Noria's weights | cache | sequences × tokens | ms a step | tok/s | llama.cpp tok/s | times |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in cases:
        case, noria = found["case"], found["noria"]
        theirs = {entry["batch"]: entry["tokens_per_s"] for entry in found["llama.cpp"]}
        times = ratios(found)
        for point in noria["points"]:
            batch, compared = point["batch"], point["context"] == CONTEXT and point["batch"] in times
            cells = [case["shape"], case["stored"], noria["weights"], noria["cache"], f"{batch} × {point['context']:,}"]
            cells += [f"{point['median_ms']:,.1f}", f"{1e3 * batch / point['median_ms']:,.1f}"]
            cells += [f"{theirs[batch]:,.1f}", f"{times[batch]:.2f}"] if compared else ["", ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build/models"), help="folder for the files: 3.5 GB")
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-batched-bench")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long each point is measured")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=Path("build/bench/shapes.json"))
    args = parser.parse_args()
    where = machine()
    threads = args.threads or where["threads"]
    known: dict[str, Any] = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    commit = where["commit"]
    cases = {entry["name"]: entry for entry in known.get("cases", []) if entry["commit"] == commit}
    for case in CASES:
        if case.name in args.cases.split(",") and case.name not in cases:
            try:
                found = run_case(case, args.models, args.llama_bin, args.seconds, threads)
            except (NoriaError, OSError, subprocess.SubprocessError) as error:
                print(f"{case.name}: {error}", file=sys.stderr, flush=True)
                continue
            cases[case.name] = {"name": case.name, "commit": commit, **found}
            args.output.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": where, "cases": list(cases.values())}, indent=1)
            args.output.write_text(text + "\n", encoding="utf-8")
    print(markdown(list(cases.values())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
