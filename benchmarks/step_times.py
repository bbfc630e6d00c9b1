"""How well the pacer's model predicts what the next step takes: the error over steps that it has not learned from yet.

python benchmarks/step_times.py --model smollm2 --presets W1,W5 --json benchmarks/results/step-times.json

The first steps of each workload teach a new model, nothing is kept from earlier. Each prediction is made before the
step has run. `--save DIR` keeps the steps as they were, to be learned from again: `--replay FILE.npz`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from noria.bench.offline import run_offline
from noria.bench.report import machine, write_json
from noria.bench.workloads import make_requests, presets
from noria.cli.common import engine_options
from noria.config import EngineOptions, PacerOptions
from noria.engine.core import EngineCore
from noria.errors import ConfigError
from noria.executor.local import LocalExecutor
from noria.files.resolve import resolve
from noria.frontend.tokenizer import load_tokenizer
from noria.pacer.base import Load, Prediction, Sizes, StepShape
from noria.pacer.gauges import Processing
from noria.pacer.monitor import Monitor
from noria.pacer.pacer import Pacer
from noria.pacer.steptime import StepTimeModel

Steps = NDArray[np.float64]  # [steps, 6]: columns of a StepShape, seconds
LEARNED, JUDGED = 200, 200  # steps: before errors count, and whose errors count


class Recorder:
    """A predictor that only listens. It is never trusted, so that sizes stay as they are."""

    trusted = False
    error = None

    def __init__(self) -> None:
        self.steps: list[tuple[float, ...]] = []

    def learn(self, shape: StepShape, seconds: float) -> None:
        self.steps.append((*astuple(shape), seconds))

    def predict(self, load: Load, now: Sizes, most: Sizes, least: int) -> Prediction:
        return Prediction(most, "only listens")


def record(options: EngineOptions, name: str, requests: int) -> Steps:
    """The steps of a preset's workload."""
    if name not in presets():
        raise ConfigError(f"must be among {', '.join(presets())}, got {name!r}", "--presets")
    spec = msgspec.structs.replace(presets()[name], requests=requests)
    executor = LocalExecutor(options)
    recorder, wanted = Recorder(), PacerOptions()
    most = Sizes(executor.info.num_slots, options.scheduler.max_num_batched_tokens)
    monitor = Monitor(wanted.monitoring_interval, Processing(None, 0.0), 0.0)
    pacer = Pacer(wanted, most, monitor, recorder, recorder)
    core = EngineCore(executor, options.cache, options.scheduler, pacer=pacer)
    try:
        run_offline(core, make_requests(spec, load_tokenizer(resolve(options.model.model))), spec.concurrency)
    finally:
        executor.close()
    return np.array(recorder.steps)


def errors(steps: Steps) -> NDArray[np.float64]:
    """[steps] relative error of each prediction, made before the step was learned from; the first is infinite."""
    model = StepTimeModel()
    found = []
    for *columns, seconds in steps.tolist():
        shape = StepShape(*map(int, columns))
        predicted = model.seconds(shape)
        found.append(np.inf if predicted is None else predicted / seconds - 1.0)
        model.learn(shape, seconds)
    return np.array(found)


def judge(name: str, steps: Steps) -> dict[str, Any]:
    """The figures. `noise`: median relative difference of successive steps of decoding alone, which differ by one
    position each: no model of their shape can know better."""
    sizes = np.abs(errors(steps))
    judged = sizes[LEARNED : LEARNED + JUDGED]
    alike = (np.diff(steps[:, 0]) == 0) & (steps[1:, 3] == 0) & (steps[:-1, 3] == 0)
    change = np.abs(np.diff(np.log(steps[:, 5])))[alike]
    return {
        "workload": name,
        "steps": len(steps),
        "median_error": float(np.median(judged)) if len(judged) else None,
        "p90_error": float(np.percentile(judged, 90)) if len(judged) else None,
        "median_error_of_all_later": float(np.median(sizes[LEARNED:])) if len(judged) else None,
        "noise": float(np.median(change)) if len(change) else None,
        "step_ms": [round(1e3 * float(value), 2) for value in np.percentile(steps[:, 5], [0, 50, 100])],
    }


def save(path: Path, steps: Steps) -> None:
    """As small as it goes: whole numbers, and seconds to a microsecond."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, shapes=steps[:, :5].astype(np.int32), micros=np.round(1e6 * steps[:, 5]).astype(np.int32))


def read(path: Path) -> Steps:
    """What `save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        return np.column_stack((stored["shapes"].astype(np.float64), stored["micros"] / 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--presets", default="W1,W5")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--save", type=Path, help="keep the steps in this folder")
    parser.add_argument("--replay", type=Path, nargs="+", help="kept steps instead of new ones")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    given = parser.parse_args()
    found = []
    if given.replay:
        found = [judge(path.stem, read(path)) for path in given.replay]
    else:
        options = engine_options(model={"model": given.model, "quantization": given.quantization})
        for name in given.presets.split(","):
            steps = record(options, name, given.requests)
            found.append(judge(name, steps))
            if given.save:
                save(given.save / f"{name.lower()}.npz", steps)
    for row in found:
        print(json.dumps(row))
    if given.json:
        write_json(given.json, {"machine": machine(), "workloads": found})


if __name__ == "__main__":
    main()
