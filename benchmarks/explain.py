"""Whether what a server explains is the whole truth: the phases of random requests beside the latency that their client
measured.

    python benchmarks/explain.py --model smollm2 --preset W5 --json build/bench/explain.json

The client's latency is from the moment at which it sends the request until the end of the answer has come (that from
before it connects is told beside it); the server's begins when the head of the request has come, and ends when the last
byte has been handed to the connection.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from serving import noria_server

from noria.bench.http import Record, Target, ask
from noria.bench.load import run_load, run_loop
from noria.bench.report import machine, summarise, write_json
from noria.bench.workloads import make_requests, presets
from noria.files.resolve import resolve
from noria.frontend.tokenizer import load_tokenizer

CLOSE = 0.01  # of the latency


def compare(record: Record, told: dict[str, Any]) -> dict[str, Any]:
    """One request: what was measured, what is explained, and the share that one lacks of the other."""
    (choice,) = told["choices"]
    sums, measured = choice["sums"], 1e3 * (record.end - record.sent)
    explained = sum(phase["ms"] for phase in choice["phases"])
    return {
        "id": record.id,
        "measured_ms": measured,
        "explained_ms": explained,
        "missing": (measured - explained) / measured,
        "connecting_ms": 1e3 * (record.sent - record.start),
        "gap_ms": _gap(choice["phases"]),
        "known": choice["known"],
        **{name: sums[name] for name in ("before_ms", "waiting_ms", "ran_ms", "own_ms", "delivery_ms", "lost_ms")},
        "waited": sums["waited"],
    }


def _gap(phases: list[dict[str, Any]]) -> float:
    """The largest gap or overlap between two phases, milliseconds."""
    at, worst = 0.0, 0.0
    for phase in phases:
        worst = max(worst, abs(phase["at_ms"] - at))
        at = phase["at_ms"] + phase["ms"]
    return worst


def measure(
    model: str, preset: str, count: int, seed: int, flags: list[str]
) -> tuple[list[Record], list[dict[str, Any]]]:
    """Runs a workload against a server of its own, and has some of its requests explained."""
    spec = presets()[preset]
    items = make_requests(spec, load_tokenizer(resolve(model)), seed)
    with noria_server(model, *flags, log=Path("build/bench/explain.log")) as url:
        target = Target(url, model)
        records = run_loop(run_load(lambda item: ask(target, item), items, spec.concurrency))
        good = [record for record in records if record.error is None]
        if not good:
            sys.exit(f"no request was answered: {records[0].error}")
        chosen = random.Random(seed).sample(good, min(count, len(good)))
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            accounts = [client.get(f"/debug/requests/{record.id}").raise_for_status().json() for record in chosen]
    return records, [compare(*pair) for pair in zip(chosen, accounts, strict=True)]


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far explained and measured times are apart."""
    missing = np.array([row["missing"] for row in rows])
    milliseconds = np.array([row["measured_ms"] - row["explained_ms"] for row in rows])
    shares = {name: float(np.mean([row[name] / row["explained_ms"] for row in rows])) for name in _PARTS}
    causes = sorted({cause for row in rows for cause in row["waited"]})
    return {
        "requests": len(rows),
        "within": int((np.abs(missing) <= CLOSE).sum()),
        "within_connecting": sum(
            abs(row["measured_ms"] + row["connecting_ms"] - row["explained_ms"]) <= CLOSE * row["measured_ms"]
            for row in rows
        ),
        "known": sum(row["known"] for row in rows),
        "missing_percent": {f"p{p}": float(np.percentile(100 * missing, p)) for p in (0, 50, 90, 99, 100)},
        "missing_ms": {f"p{p}": float(np.percentile(milliseconds, p)) for p in (0, 50, 90, 99, 100)},
        "largest_gap_ms": max(row["gap_ms"] for row in rows),
        "shares": shares,
        "waited_ms": {cause: float(np.mean([row["waited"].get(cause, 0.0) for row in rows])) for cause in causes},
    }


_PARTS = ("before_ms", "waiting_ms", "ran_ms", "own_ms", "delivery_ms", "lost_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--preset", default="W5", choices=sorted(presets()))
    parser.add_argument("--requests", type=int, default=100, help="how many are explained")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args, flags = parser.parse_known_args()  # the others are the server's
    records, rows = measure(args.model, args.preset, args.requests, args.seed, flags)
    found = report(rows)
    print(f"{found['within']} of {found['requests']} are within {CLOSE:.0%}; the engine knew {found['known']}")
    print(f"counted from before they connect: {found['within_connecting']}")
    for name, unit in (("missing_percent", "%"), ("missing_ms", "ms")):
        told = ", ".join(f"{key} {value:.3f}" for key, value in found[name].items())
        print(f"measured but not explained, {unit}: {told}")
    print(f"largest gap or overlap between phases: {found['largest_gap_ms']:.4f} ms")
    print("shares: " + ", ".join(f"{name.removesuffix('_ms')} {value:.1%}" for name, value in found["shares"].items()))
    print("waited on average, ms: " + ", ".join(f"{cause} {value:.1f}" for cause, value in found["waited_ms"].items()))
    if args.json:
        body = {"machine": machine(), "model": args.model, "preset": args.preset, "flags": flags}
        write_json(args.json, body | found | {"run": summarise(records), "rows": rows})


if __name__ == "__main__":
    main()
