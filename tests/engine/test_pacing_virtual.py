"""The pacer at work, in virtual time on a made-up machine: objectives, steps of the load, and the best fixed sizes."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.pacing import make_monitor
from helpers.step_times import truth
from helpers.virtual_engine import BUDGET, SLOTS, Run, arrivals, drive
from noria.config import PacerOptions
from noria.pacer.base import Load, Objectives, Prediction, Sizes
from noria.pacer.learned import LearnedPredictor
from noria.pacer.pacer import Pacer
from noria.pacer.rules import RulePredictor
from noria.pacer.steptime import StepTimeModel

MOST = Sizes(SLOTS, BUDGET)


def paced(ttft=None, tpot=None, **options):
    wanted = PacerOptions(**options)

    def make(clock):
        learned = LearnedPredictor(StepTimeModel(), Objectives(ttft, tpot))
        rules = RulePredictor(wanted.rules, wanted.device_threshold, wanted.memory_threshold)
        return Pacer(wanted, MOST, make_monitor(interval=wanted.monitoring_interval), rules, learned)

    return make


class Fixed:
    """Always the same batch."""

    trusted = True

    def __init__(self, batch):
        self.batch = batch

    def predict(self, load: Load, now: Sizes, most: Sizes, least: int) -> Prediction:
        return Prediction(Sizes(self.batch, BUDGET), "fixed")


def fixed(batch):
    options = PacerOptions(predictor="rules", smoothing_factor=0.0)
    return lambda clock: Pacer(options, MOST, make_monitor(interval=0.1), Fixed(batch), None)


def kept(run: Run, start: float, end: float, ttft=99.0, tpot=99.0) -> float:
    """Share of the requests that came then and met both objectives."""
    return float(np.mean([one.ttft <= ttft and one.tpot <= tpot for one in run.between(start, end)]))


@pytest.mark.parametrize(("ttft", "tpot"), [(1.0, 0.02), (0.5, 0.03), (1.0, None), (None, 0.015)])
def test_eight_times_as_many_arrivals(ttft, tpot):
    """The objective is kept again within two seconds, and the batch no longer swings."""
    run = drive(arrivals([(12, 3), (18, 24), (4, 3)], seed=5), paced(ttft, tpot))
    wanted = {"ttft": ttft or 99.0, "tpot": tpot or 99.0}
    assert kept(run, 6, 12, **wanted) >= 0.9
    assert all(kept(run, start, start + 3, **wanted) >= 0.9 for start in range(14, 28))
    assert kept(run, 30, 34, **wanted) >= 0.9
    settled = np.array(run.batches(15, 30))
    assert (np.abs(settled - np.median(settled)) <= 0.1 * np.median(settled)).all()
    assert {one.predictor for one in run.decisions if one.at > 10} == {"learned"}


def test_the_objective_binds_where_there_is_more_to_do_than_can_be_done():
    """Those who run keep it, and it costs no more throughput than it must."""

    def crowd(make):
        run = drive(arrivals([(10, 60)], seed=2), make, concurrency=120)
        in_time = np.mean([one.tpot <= 0.02 for one in run.served[200:]])
        return in_time, sum(one.output for one in run.served) / run.sizes[-1][0]

    (kept_by_it, rate), (_, smaller), (kept_by_larger, _) = map(crowd, (paced(tpot=0.02), fixed(16), fixed(64)))
    assert kept_by_it >= 0.9
    assert rate > 1.02 * smaller
    assert kept_by_larger < 0.1


def test_without_objectives_it_is_as_fast_as_the_best_size():
    def rate(make):
        run = drive(arrivals([(6, 60)], seed=3), make, concurrency=100)
        return sum(one.output for one in run.served) / run.sizes[-1][0]

    best = max(rate(fixed(batch)) for batch in (32, 64, 128, 256))
    assert rate(paced()) >= 0.97 * best


def test_a_lonely_caller_waits_for_nothing():
    def latency(make):
        run = drive(arrivals([(10, 2)], seed=4), make, concurrency=1)
        return float(np.mean([one.last - one.at for one in run.served]))

    assert latency(paced()) <= 1.001 * latency(fixed(1))


def test_it_keeps_up_with_a_machine_that_slows_down():
    """A neighbour takes half of the processors: the batch follows, so that the objective holds."""
    slow_from, steps = 400, 0

    def seconds(shape):
        nonlocal steps
        steps += 1
        return truth(shape, 1.0 if steps < slow_from else 2.0)

    run = drive(arrivals([(17, 60)], seed=2), paced(tpot=0.03), seconds, concurrency=100)
    changed, end = run.sizes[slow_from][0], run.sizes[-1][0]
    assert end > changed + 15
    before, after = run.batches(changed - 3, changed)[-1], run.batches(changed + 5, end)
    assert max(after) < 0.75 * before
    assert kept(run, changed + 5, end - 4, tpot=0.03) >= 0.85
