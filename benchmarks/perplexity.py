"""Perplexity of a model on text files, in any scheme and cache type, against f32 with an f32 cache.

python benchmarks/perplexity.py smollm2 --text english.txt --text code.py \
    --weights f32,bf16,int8,int4,auto --kv-cache f32,bf16,int8 --json build/perplexity.json

`--weights int8/64` sets the grouping of int8 (a number at least as large as a row: one scale per row).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from noria.backends import get_backend
from noria.backends.base import Backend
from noria.bench.perplexity import Evaluator, Regrouped, Score, cut_windows, model_options
from noria.bench.report import machine, write_json
from noria.errors import NoriaError
from noria.files.resolve import ModelFiles, resolve
from noria.frontend.tokenizer import load_tokenizer
from noria.models.loaders import open_checkpoint


@dataclass(slots=True)
class Results:
    """Scores by (text, weights, cache type); the first of a text is what its others are compared with."""

    scores: dict[tuple[str, str, str], Score] = field(default_factory=dict)
    schemes: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        bases: dict[str, Score] = {}
        rows = []
        for (text, weights, cache), score in self.scores.items():
            change, error = score.change(bases.setdefault(text, score))
            rows.append(
                {
                    "text": text,
                    "weights": weights,
                    "held_as": self.schemes[weights],
                    "kv_cache": cache,
                    "tokens": int(score.log_probs.size),
                    "perplexity": round(score.perplexity, 4),
                    "change_percent": round(100 * change, 3),
                    "standard_error_percent": round(100 * error, 3),
                    "seconds": round(score.seconds, 2),
                }
            )
        return rows


def make_evaluator(files: ModelFiles, backend: Backend, weights: str, length: int) -> Evaluator:
    scheme, _, group = weights.partition("/")
    if group:
        backend = Regrouped(backend, int(group))
    return Evaluator(open_checkpoint(files), backend, model_options(files.name, scheme), length)


def evaluate(args: argparse.Namespace) -> Results:
    files = resolve(args.model)
    tokenizer = load_tokenizer(files)
    backend = get_backend(args.backend, args.threads)
    windows = {
        path.name: cut_windows(
            np.array(tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"), add_bos=False), np.int32),
            args.length,
            args.windows,
            tokenizer.bos_id,
        )
        for path in args.text
    }
    results = Results()
    caches = args.kv_cache.split(",")
    settings = args.weights.split(",")
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(settings) * len(caches) * len(windows) * args.windows)
        for weights in settings:
            progress.update(task, description=f"{weights}: loading")
            evaluator = make_evaluator(files, backend, weights, args.length)
            results.schemes[weights] = evaluator.model.schemes
            for cache in caches:
                progress.update(task, description=f"{weights}, {cache} cache")
                for name, cut in windows.items():
                    results.scores[name, weights, cache] = evaluator.score(cut, cache, lambda: progress.advance(task))
    return results


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("text", "weights", "held as", "KV cache", "tokens", "perplexity", "change %", "± %", "s")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="short name, repository id, directory or GGUF file")
    parser.add_argument("--text", type=Path, action="append", required=True, help="a text file; may be repeated")
    parser.add_argument("--weights", default="f32,bf16,int8,int4,auto", help="f32, bf16, int8, int8/GROUP, int4, auto")
    parser.add_argument("--kv-cache", default="f32,bf16,int8")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=16, help="windows of each text")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "reference"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    try:
        rows = evaluate(args).rows()
        print_table(rows)
        if args.json:
            write_json(args.json, {"machine": machine(), "model": args.model, "length": args.length, "results": rows})
    except (NoriaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
