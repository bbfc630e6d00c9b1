"""What a step costs the scheduler: planning and taking in results, with many running and waiting requests.

The model takes no time here, so all that is measured is Noria's own Python, in CPU time of the thread, so that a busy
machine does not blur it. Run: `python benchmarks/plan_cost.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from noria.bench.report import machine, write_json
from noria.config import CacheOptions, SchedulerOptions, engine_options
from noria.engine.core import EngineCore
from noria.messages import Submit, Vocabulary
from noria.pacer.start import make_pacer
from noria.params import SamplingParams
from noria.plan import StepPlan, StepResult, WorkerInfo


class Instant:
    """An executor that answers every step at once with token 1."""

    def __init__(self, slots: int, num_blocks: int) -> None:
        self.info = WorkerInfo(
            vocab_size=50_000,
            max_model_len=4096,
            num_blocks=num_blocks,
            block_size=16,
            num_slots=slots,
            backend="instant",
            isa="",
            threads=1,
            weights="",
            cache_dtype="f32",
            weight_bytes=0,
            cache_bytes=0,
        )
        self._results: deque[StepResult] = deque()
        self.rows = 0

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        pass

    def compile_grammar(self, grammar: str) -> Future[str]:
        raise AssertionError("no request here has a grammar")

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        sampled = plan.slots[plan.sample]
        self.rows = len(plan.slots)
        self._results.append(StepResult(plan.step, sampled, np.ones(len(sampled), np.int32)))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        pass


def fill(core: EngineCore, count: int, prompt_length: int, output: int, first_id: int, tenants: int = 1) -> float:
    """Submits `count` requests, of each tenant in turn; returns seconds per submission."""
    random = np.random.default_rng(first_id)
    params = SamplingParams(max_tokens=output, seed=0)
    messages = [
        Submit(
            request_id=first_id + number,
            prompt_ids=random.integers(2, 50_000, prompt_length).astype("<i4").tobytes(),
            params=params,
            arrival=float(number),
            tenant=str(number % tenants),
        )
        for number in range(count)
    ]
    began = time.perf_counter()
    for message in messages:
        core.handle(message)
    return (time.perf_counter() - began) / count


def measure(
    running: int,
    waiting: int,
    steps: int,
    depth: int,
    blocks: int | None,
    output: int,
    tenants: int = 0,
    paced: bool = False,
) -> dict[str, float]:
    """Milliseconds of planning and updating per step, over `steps` steps with `running` rows. `tenants`: of the fair
    policy; 0: first come, first served. `paced`: with a pacer, which may set more than `running` at no time."""
    blocks = blocks or running * 32
    executor = Instant(running, blocks)
    # The default budget of tokens.
    scheduler = SchedulerOptions(max_num_seqs=running, in_flight_depth=depth, policy="fair" if tenants else "fcfs")
    pacer = make_pacer(replace(engine_options("made up"), scheduler=scheduler), executor.info, time.thread_time)
    core = EngineCore(executor, CacheOptions(), scheduler, time.thread_time, pacer if paced else None)
    submit_seconds = fill(core, running + waiting, 128, output, 1, max(1, tenants))
    while core.stats.running < running and core.stats.waiting and core.stats.steps_total < 1000:
        core.step()
    gc.collect()
    gc.freeze()  # as the engine process does
    costs = []
    for _ in range(steps):
        before = core.stats.plan_seconds_total
        core.step()
        costs.append((core.stats.plan_seconds_total - before) * 1e3)
    stats = core.stats
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "depth": depth,
        "p50_ms": round(float(np.median(costs)), 3),
        "p99_ms": round(float(np.percentile(costs, 99)), 3),
        "max_ms": round(max(costs), 3),
        "mean_ms": round(float(np.mean(costs)), 3),
        "preemptions": stats.preemptions_total,
        "submit_us": round(submit_seconds * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    given = parser.parse_args()
    cases: dict[str, dict[str, Any]] = {
        "decode": {"depth": 1, "blocks": None, "output": 2000},
        "decode, paced": {"depth": 1, "blocks": None, "output": 2000, "paced": True},
        "decode, depth 2": {"depth": 2, "blocks": None, "output": 2000},
        "churn (64 tokens out)": {"depth": 1, "blocks": None, "output": 64},
        "short of blocks": {"depth": 1, "blocks": given.running * 10, "output": 200},
        "churn, fair among 2": {"depth": 1, "blocks": None, "output": 64, "tenants": 2},
        "churn, fair among 1000": {"depth": 1, "blocks": None, "output": 64, "tenants": 1000},
        "short of blocks, fair among 10": {"depth": 1, "blocks": given.running * 10, "output": 200, "tenants": 10},
    }
    rows = []
    for name, case in cases.items():
        rows.append({"case": name} | measure(given.running, given.waiting, given.steps, **case))
        print(json.dumps(rows[-1]))
    if given.json:
        write_json(given.json, {"machine": machine(), "cases": rows})


if __name__ == "__main__":
    main()
