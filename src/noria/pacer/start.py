"""Makes the pacer of an engine, of its options and of what its worker has found out."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from noria.config import EngineOptions, PacerOptions
from noria.pacer.base import Objectives, Sizes
from noria.pacer.gate import Gate
from noria.pacer.gauges import Device, Processing, find_nvidia
from noria.pacer.learned import LearnedPredictor
from noria.pacer.leisure import Limits, Memory
from noria.pacer.limits import KnownLimits, Measuring, arithmetic, least_seconds, machine_name
from noria.pacer.monitor import Monitor
from noria.pacer.pacer import Pacer
from noria.pacer.rules import RulePredictor
from noria.pacer.steptime import StepTimeModel
from noria.pacer.store import load, make_key
from noria.plan import WorkerInfo


def make_pacer(options: EngineOptions, worker: WorkerInfo, clock: Callable[[], float] = time.monotonic) -> Pacer | None:
    """The pacer of an engine; None if load is not to be measured. A static batch is measured but not paced.

    Args:
        clock: the engine's.
    """
    wanted = options.pacer
    if not wanted.monitoring:
        return None
    if not options.scheduler.continuous:
        wanted = msgspec.structs.replace(wanted, enabled=False)
    most = Sizes(min(options.scheduler.max_num_seqs, worker.num_slots), options.scheduler.max_num_batched_tokens)
    began = clock()
    device, limits = _device(worker, began)
    rules = RulePredictor(wanted.rules, wanted.device_threshold, wanted.memory_threshold)
    learned = memory = None
    if wanted.enabled and wanted.predictor == "learned":
        key = make_key(options.model.model, worker)
        model = StepTimeModel(load(key))
        learned, memory = LearnedPredictor(model, _objectives(wanted)), Memory(model, key)
    monitor = Monitor(wanted.monitoring_interval, device, began)
    return Pacer(wanted, most, monitor, rules, learned, limits=limits, memory=memory)


def make_gate(options: PacerOptions, pacer: Pacer | None, wall: Callable[[], float] = time.time) -> Gate | None:
    """What refuses requests that would miss an objective; None: nothing does. It knows step times by what the pacer
    learns, if it does. `wall`: seconds, `time.time()`."""
    if options.admission != "slo":
        return None
    learned = None if pacer is None else pacer.learned
    return Gate(_objectives(options), learned.model if isinstance(learned, LearnedPredictor) else None, wall)


def _objectives(options: PacerOptions) -> Objectives:
    ttft, tpot = options.slo_ttft_ms, options.slo_tpot_ms
    return Objectives(
        None if ttft is None else ttft / 1e3, None if tpot is None else tpot / 1e3, options.slo_percentile
    )


def _device(worker: WorkerInfo, began: float) -> tuple[Device, Limits | None]:
    """What the worker runs on, and what is to be found out about it."""
    if worker.backend != "cpu" or worker.work is None:
        gpu = None if worker.backend == "reference" else find_nvidia()
        return gpu or Processing(None, began), None
    known, machine = KnownLimits(), machine_name(worker.isa, worker.threads)
    kinds = arithmetic(worker.work)
    found = known.find(machine, kinds)
    device = Processing(None if found is None else least_seconds(worker.work, found), began)
    if found is not None and found.sure(kinds):
        return device, None
    return device, Limits(Measuring(worker.threads, kinds), known, machine, worker.work, device)
