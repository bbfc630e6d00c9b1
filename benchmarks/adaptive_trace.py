"""Makes the trace of `noria bench adaptive`, and shows in virtual time what each fixed batch size reaches on it.

python benchmarks/adaptive_trace.py            # simulate the trace as it is frozen
python benchmarks/adaptive_trace.py --write    # make it anew; earlier figures lose their meaning

The trace was frozen before anything was tuned on it. It was designed with the step times of `noria.bench.simulate` such
that phases favour different sizes:

- calm: few requests; every size does.
- ramp: some long answers run throughout, and ever larger groups of short prompts with middling answers come at once. A
  small batch lets them wait for too long, a large one makes everybody's tokens too slow.
- burst: many long answers at once, and behind them single-token questions. A batch that the long answers fill makes
  the questions wait.
- long prompts: groups of them, with short answers. Whoever runs beside many prompts in the making gets tokens too
  slowly, so a small batch is best.

Phases end with a lull, so that all but hopeless sizes are done with one before the next begins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from noria.bench.adaptive import PACER, Contestant, Turn, calibrate, compete, replay, verdict
from noria.bench.simulate import StepTime, VirtualClock, numbered_requests, simulated_engine, small_machine
from noria.bench.trace import Aims, Load, Row, Trace, TracePhase, aims, load_trace
from noria.bench.workloads import BenchRequest
from noria.cli.bench_batching import batching_options
from noria.config import EngineOptions

FILE = Path(__file__).parent.parent / "src/noria/bench/data/adaptive.json"
SIZES = (8, 16, 32, 64, 128, 256)
LOAD = Load(requests=256, prompt=64, output=32, small=8, large=256)
UNIT = 0.01525  # seconds, of the calibration in virtual time: the times below were chosen with it
GROUPS = ((40, 1.8), (60, 2.0), (82, 2.5), (86, 2.6), (86, 3.2))  # requests, and seconds until the next


def make_trace() -> Trace:
    random = Random(5)
    phases = [
        TracePhase(name="calm", length=_units(4.0), requests=_calm(random)),
        TracePhase(name="ramp", length=_units(12.6), requests=_ramp(random)),
        TracePhase(name="burst", length=_units(9.5), requests=_burst(random)),
        TracePhase(name="long prompts", length=_units(18.0), requests=_long(random)),
        TracePhase(name="calm again", length=_units(4.0), requests=_calm(random)),
    ]
    about = (
        "Frozen on 2026-12-01, before the pacer was tuned on it. Checked in virtual time "
        "(benchmarks/adaptive_trace.py): with the best single size of 8, 16, 32, 64, 128 and 256, 71 % as many "
        "requests meet the objectives as with the best size of each phase; 70 % where all steps take 15 % longer than "
        "they did when it was calibrated."
    )
    return Trace(about=about, calibration=LOAD, ttft_place=0.5, tpot_place=0.62, phases=phases)


def _calm(random: Random) -> list[Row]:
    return _in_order([_row(random.uniform(0, 3.0), random, (32, 64), (24, 40)) for _ in range(20)])


def _ramp(random: Random) -> list[Row]:
    rows = [_row(0.015 * index, random, (12, 20), (500, 500)) for index in range(20)]
    at = 0.5
    for count, gap in GROUPS:
        rows += [_row(at + random.uniform(0, 0.1), random, (12, 20), (48, 54)) for _ in range(count)]
        at += gap
    return _in_order(rows)


def _burst(random: Random) -> list[Row]:
    rows = [_row(0.2 * index / 48, random, (16, 32), (250, 250)) for index in range(46)]
    at = 0.6
    while at < 4.4:
        rows.append(_row(at, random, (8, 16), (1, 1)))
        at += random.expovariate(32.0)
    return _in_order(rows)


def _long(random: Random) -> list[Row]:
    times = [2.2 * group + random.uniform(0, 0.1) for group in range(8) for _ in range(44)]
    return _in_order([_row(at, random, (192, 216), (15, 17)) for at in times])


def _row(at: float, random: Random, prompt: tuple[int, int], output: tuple[int, int]) -> Row:
    return _units(at), random.randint(*prompt), random.randint(*output)


def _units(seconds: float) -> float:
    return round(seconds / UNIT, 2)


def _in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows)


def dump(trace: Trace) -> str:
    """JSON with a line for each phase's requests."""
    head = {
        "about": trace.about,
        "calibration": {name: getattr(trace.calibration, name) for name in LOAD.__struct_fields__},
        "ttft_place": trace.ttft_place,
        "tpot_place": trace.tpot_place,
    }
    lines = [
        f'  {{"name": "{phase.name}", "length": {phase.length}, "requests": {json.dumps(phase.requests)}}}'
        for phase in trace.phases
    ]
    return json.dumps(head, indent=1)[:-2] + ',\n "phases": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def simulate(options: EngineOptions, rows: list[BenchRequest], seconds: StepTime, noise: float) -> Turn:
    """A replay in virtual time."""
    clock = VirtualClock()
    return replay(simulated_engine(options, clock, seconds, noise), rows, clock=clock)


def fixed(size: int) -> EngineOptions:
    return batching_options(size, True, False, (None, None), model={"model": "simulated"})


def paced(goals: Aims) -> EngineOptions:
    slo = 1e3 * goals.ttft, 1e3 * goals.tpot
    return batching_options(max(SIZES), True, True, slo, model={"model": "simulated"})


def compete_in_virtual_time(trace: Trace, names: Sequence[str], speed: float, noise: float) -> list[Contestant]:
    """Fixed sizes and the pacer, by name.

    Args:
        speed: factor of all step times since the calibration. noise: spread of each.
    """
    load = [(0.0, trace.calibration.prompt, trace.calibration.output)] * trace.calibration.requests
    calibration = calibrate(
        "simulated", trace, lambda size: simulate(fixed(size), numbered_requests(load), small_machine, 0.0).records
    )
    goals, unit = aims(trace, calibration), calibration.unit
    print(f"unit {1e3 * unit:.2f} ms, TTFT {1e3 * goals.ttft:,.0f} ms, TPOT {1e3 * goals.tpot:.1f} ms")
    requests = numbered_requests(trace.rows(), unit)
    return compete(
        names,
        1,
        trace,
        unit,
        goals,
        lambda name: simulate(
            paced(goals) if name == PACER else fixed(int(name)),
            requests,
            lambda shape: speed * small_machine(shape),
            noise,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the file anew")
    parser.add_argument("--speed", type=float, default=1.0, help="factor of step times after the calibration")
    parser.add_argument("--noise", type=float, default=0.0, help="spread of each step's time, as a share of it")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--pacer", action="store_true", help="also the pacer")
    args = parser.parse_args()
    if args.write:
        FILE.write_text(dump(make_trace()), encoding="utf-8")
    trace, digest = load_trace(FILE)
    names = [*args.sizes.split(","), *([PACER] if args.pacer else [])]
    found = compete_in_virtual_time(trace, names, args.speed, args.noise)
    print(f"{digest}\n{'size':>6}", *(f"{phase.name:>16}" for phase in trace.phases), f"{'all':>16}")
    for one in found:
        cells = [f"{phase['met']} of {phase['requests']}" for phase in (*one.phases[0], one.whole[0])]
        print(f"{one.name:>6}", *(f"{cell:>16}" for cell in cells))
    print(json.dumps(verdict(found)))


if __name__ == "__main__":
    main()
