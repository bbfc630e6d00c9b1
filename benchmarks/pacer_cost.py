"""What the pacer costs: samples, decisions and what it is told of each step, as shares of one processor.

In processor time of the thread, so that a busy machine does not blur it; intervals are the defaults. The model of step
times learns from made-up steps. Run: `python benchmarks/pacer_cost.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from noria.bench.report import machine, write_json
from noria.config import engine_options
from noria.pacer.base import StepShape
from noria.pacer.limits import DeviceLimits, KnownLimits, machine_name
from noria.pacer.monitor import Census
from noria.pacer.pacer import Pacer
from noria.pacer.start import make_pacer
from noria.plan import AttentionWork, StepWork, WorkerInfo

_WORKER = WorkerInfo(
    vocab_size=49152,
    max_model_len=8192,
    num_blocks=4096,
    block_size=16,
    num_slots=256,
    backend="cpu",
    isa="made up",
    threads=2,
    weights="int4/32 + int8/64",
    cache_dtype="int8",
    weight_bytes=1,
    cache_bytes=1,
    work=StepWork({"int8": 2e8}, {"int8": 6e7}, 1e8, 1e4, (AttentionWork(0, "int8", 7e4, 1.2e4),)),
)
_CENSUS = Census(running=64, waiting=100, context=300.0, output=40.0, oldest_wait=1.0, waiting_prompt=200.0, cache=0.4)


def micro(work: Callable[[int], object], count: int) -> float:
    """Microseconds of processor time that `work(number)` takes, in the mean."""
    began = time.thread_time()
    for number in range(count):
        work(number)
    return 1e6 * (time.thread_time() - began) / count


def teach(pacer: Pacer, steps: int) -> None:
    """Steps of many shapes, so that the model is trusted."""
    for number in range(steps):
        rows = 1 + number // 8 * 3 % 128
        prompts = number % 9 == 0
        shape = StepShape(rows, 300 * rows, *((1, 128, 8256) if prompts else ()))
        pacer.stepped(shape, 0.004 + 2e-4 * shape.tokens, number * 0.02)


def measure(step_seconds: float) -> dict[str, float]:
    """Microseconds of each part, and the share of a processor of all, with steps of so many seconds."""
    options = engine_options("made up")
    KnownLimits().keep(machine_name(_WORKER.isa, _WORKER.threads), DeviceLimits({"int8": 1e12}, 1e10))
    pacer = make_pacer(options, _WORKER, clock=lambda: 0.0)
    assert pacer is not None
    teach(pacer, 2000)
    monitor, interval = pacer.monitor, options.pacer.monitoring_interval
    sample = micro(lambda number: monitor.sample(_CENSUS, 100.0 + number * interval), 2000)
    load = micro(lambda number: monitor.load(_CENSUS, 400.0), 2000)
    turn = micro(lambda number: pacer.turn(_CENSUS, 1000.0 + number * interval), 2000)
    shape = StepShape(64, 19200)
    step = micro(lambda number: pacer.stepped(shape, 0.016, 2000.0), 10_000)
    monitored = micro(lambda number: monitor.stepped(shape, 2000.0), 10_000)
    arrival = micro(lambda number: pacer.arrived(100, 3000.0), 2000)
    per_second = turn / interval + (step + 0.2) / step_seconds
    return {
        "sample_us": round(sample, 2),
        "load_us": round(load, 2),
        "turn_us": round(turn, 2),
        "step_us": round(step, 2),
        "step_of_monitor_us": round(monitored, 2),
        "arrival_us": round(arrival, 2),
        "monitor_percent": round(1e-4 * ((sample + load) / interval + monitored / step_seconds), 4),
        "pacer_percent": round(1e-4 * per_second, 4),
        "decisions": pacer.stats.decisions,
        "trusted": pacer.stats.trusted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=10.0, help="how long steps take")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NORIA_HOME"] = folder
        found = measure(given.step_ms / 1e3)
    print(json.dumps(found))
    if given.json:
        write_json(given.json, {"machine": machine(), "cost": found})


if __name__ == "__main__":
    main()
