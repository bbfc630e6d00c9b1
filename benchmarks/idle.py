"""What a server costs that nobody asks anything: CPU time and memory of all its processes, after it has been at work.

python benchmarks/idle.py --model smollm2 --quantization int8 --json build/bench/idle.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from serving import free_port, noria_command, running

from noria.bench.report import machine, write_json

SETTLE = 3.0  # seconds after the last answer


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all below it."""
    top = psutil.Process(pid)
    return float(sum(sum(process.cpu_times()[:2]) for process in [top, *top.children(recursive=True)]))


def pss_mb(pid: int) -> float:
    """Proportional set size of a process and all below it."""
    top = psutil.Process(pid)
    return float(sum(process.memory_full_info().pss for process in [top, *top.children(recursive=True)])) / 1e6


def measure(model: str, flags: list[str], seconds: float, log: Path) -> dict[str, Any]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(noria_command(model, port, *flags), url, log) as started:
        body = {"model": model, "prompt": "The water wheel", "max_tokens": 32, "temperature": 0}
        for _ in range(4):
            httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        time.sleep(SETTLE)
        before, began = cpu_seconds(started.pid), time.perf_counter()
        time.sleep(seconds)
        used, wall = cpu_seconds(started.pid) - before, time.perf_counter() - began
        return {"percent_of_a_core": 100 * used / wall, "seconds": wall, "pss_mb": pss_mb(started.pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long it is watched")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    flags = ["--quantization", args.quantization]
    found = measure(args.model, flags, args.seconds, Path("build/bench/idle.log"))
    print(f"{found['percent_of_a_core']:.2f} % of a core over {found['seconds']:.0f} s, {found['pss_mb']:,.0f} MB")
    if args.json:
        write_json(args.json, {"machine": machine(), "model": args.model, "flags": flags, **found})


if __name__ == "__main__":
    main()
