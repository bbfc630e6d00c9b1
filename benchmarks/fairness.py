"""How long one key waits for its first token while another floods the server: alone, under fcfs and under fair.

The quiet key asks now and then, one request at a time; the flood is so many callers of another key, each of whom asks
again when it has its answer. The server's own settings are the default ones but for the policy.

python benchmarks/fairness.py --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from serving import noria_server

from noria.bench.http import Record, Target, ask
from noria.bench.load import run_loop
from noria.bench.report import machine, write_json
from noria.bench.workloads import BenchRequest

KEYS = "- {name: quiet, key: quiet-key}\n- {name: flood, key: flood-key}\n"
SETTLE = 8.0  # seconds of flood before the quiet key asks


class Prompts:
    """Prompts of words drawn at random, so that no two share a prefix; about a token a word."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = [
            "the",
            "of",
            "and",
            "to",
            "in",
            "is",
            "was",
            "for",
            "on",
            "that",
            "by",
            "with",
            "as",
            "at",
            "from",
            "are",
        ]

    def make(self, tokens: int, output: int) -> BenchRequest:
        return BenchRequest(" ".join(self._random.choices(self._words, k=tokens)), (), output)


async def quiet(target: Target, prompts: Prompts, given: argparse.Namespace, where: str) -> list[Record]:
    """One request after the other, with a pause between them. Tells of each as it ends, on standard error."""
    records = []
    for _ in range(given.requests):
        await asyncio.sleep(given.pause * (0.5 + random.random()))
        records.append(record := await ask(target, prompts.make(given.quiet_prompt, given.quiet_output)))
        told = record.error or f"{1e3 * record.ttft:.0f} ms"
        print(f"{where} {len(records)} of {given.requests}: {told}", file=sys.stderr, flush=True)
    return records


async def flooded(
    target: Target, flood: Target, prompts: Prompts, given: argparse.Namespace
) -> tuple[list[Record], list[Record], float]:
    """The same beside a flood. Returns the quiet key's records, the flood's, and seconds of flood."""
    done: list[Record] = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    stopped = False

    async def caller() -> None:
        while not stopped:  # a cancellation can be lost where an answer ends at the same moment
            output = random.randint(given.flood_output // 2, given.flood_output)
            done.append(await ask(flood, prompts.make(given.flood_prompt, output)))

    tasks = [asyncio.create_task(caller()) for _ in range(given.flood)]
    await asyncio.sleep(SETTLE)
    records = await quiet(target, prompts, given, "beside the flood")
    seconds = loop.time() - began
    stopped = True
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return records, done, seconds


def summary(records: list[Record]) -> dict[str, Any]:
    """Milliseconds to the first token."""
    errors = [record.error for record in records if record.error]
    assert not errors, errors[:3]
    first = [record.ttft * 1e3 for record in records]
    found: dict[str, Any] = {
        "requests": len(first),
        "prompt_tokens": round(median(record.prompt_tokens for record in records)),
        "ttft_p50_ms": round(median(first), 1),
        "ttft_p90_ms": round(float(np.percentile(first, 90)), 1),
        "ttft_p99_ms": round(float(np.percentile(first, 99)), 1),
    }
    gaps = [record.tpot * 1e3 for record in records if record.tpot is not None]
    return found | ({"tpot_p50_ms": round(median(gaps), 1)} if gaps else {})


def measure(policy: str, keys: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The quiet key alone and beside the flood, with one server."""
    flags = ["--scheduling-policy", policy, "--api-key-file", str(keys), *given.flag]
    with noria_server(given.model, *flags, log=Path(f"build/bench/fairness-{policy}.log")) as url:
        target, flood = Target(url, given.model, "quiet-key"), Target(url, given.model, "flood-key")
        prompts = Prompts(given.seed)
        alone = summary(run_loop(quiet(target, prompts, given, f"{policy}, alone")))
        records, done, seconds = run_loop(flooded(target, flood, prompts, given))
    beside = summary(records)
    ratios = {name: round(beside[name] / alone[name], 2) for name in ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")}
    errors = sum(record.error is not None for record in done)
    return {
        "policy": policy,
        "alone": alone,
        "beside_flood": beside,
        "ratios": ratios,
        "flood": {
            "requests": len(done),
            "errors": errors,
            "output_tokens_per_second": round(sum(record.output_tokens for record in done) / seconds, 1),
            "ttft_p50_ms": round(median(record.ttft * 1e3 for record in done if record.chunks), 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policies", nargs="+", default=["fcfs", "fair"])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between an answer and the next request")
    parser.add_argument("--quiet-prompt", type=int, default=500)
    parser.add_argument("--quiet-output", type=int, default=16)
    parser.add_argument("--flood", type=int, default=100, help="callers")
    parser.add_argument("--flood-prompt", type=int, default=400)
    parser.add_argument("--flood-output", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flag", action="append", default=[], help="for the server, e.g. --flag=--threads=2")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        for policy in given.policies:
            rows.append(measure(policy, keys, given))
            print(json.dumps(rows[-1], indent=1))
    if given.json:
        write_json(given.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
