"""The pacer in the engine: what it is told, that its word is followed, and that it changes no answer."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from helpers.engine_driver import Driver
from helpers.fake_executor import alone
from helpers.pacing import Clock, Told, make_monitor, make_pacer
from noria.engine.pacing import shape_of
from noria.pacer.base import Sizes, StepShape
from noria.params import SamplingParams
from noria.plan import StepPlan


def paced(learned=None, clock=None, slots=8, budget=64, depth=1, **more):
    clock = clock or Clock()
    learned = learned or Told(Sizes(2, 16))
    pacer = make_pacer(Sizes(slots, budget), learned, monitor=make_monitor(began=clock.now))
    driver = Driver(slots=slots, budget=budget, depth=depth, clock=clock, pacer=pacer, **more)
    driver.clock, driver.pacer, driver.learned = clock, pacer, learned
    return driver


def column(values):
    return np.array(values, np.int32)


def test_the_shape_of_a_step():
    plan = StepPlan(1, column([3, 1, 2, 0]), column([9, 0, 4, 30]), column([1, 5, 3, 1]))
    contexts = [9 + 1, sum(range(1, 6)), 5 + 6 + 7, 30 + 1]
    assert shape_of(plan) == StepShape(2, contexts[0] + contexts[3], 2, 8, contexts[1] + contexts[2])
    decode = StepPlan(1, column([0, 1]), column([4, 7]), column([1, 1]))
    assert shape_of(decode) == StepShape(2, 5 + 8)
    long = StepPlan(1, column([0]), column([2_000_000]), column([65_536]))  # beyond int32
    assert shape_of(long).prefill_context == 65_536 * 2_000_000 + 65_536 * 65_537 // 2


@pytest.mark.parametrize("depth", [1, 2])
def test_it_is_told_of_every_step_as_it_was(depth):
    """Steps that repeat are counted on from the one before; the sums must come out as if counted anew."""
    random = Random(depth)
    driver = paced(depth=depth, slots=6, num_blocks=60)
    for number in range(1, 25):
        driver.submit(number, [number] * random.randint(1, 20), max_tokens=random.randint(1, 30))
        for _ in range(random.randint(0, 4)):
            driver.clock.now += 0.01
            driver.step()
    driver.run()
    plans = driver.executor.plans
    assert sum(plan.repeats for plan in plans) > 5
    assert [shape for shape, _ in driver.learned.learned] == [shape_of(plan) for plan in plans]


class Taking:
    """A clock that an executor moves on: each step takes as long as it is told, planning takes a millisecond."""

    def __init__(self, driver_clock, seconds):
        self.clock, self.seconds = driver_clock, seconds

    def wrap(self, executor):
        collect, submit = executor.collect, executor.submit

        def later():
            self.clock.now += self.seconds
            return collect()

        def planned(plan, alone=False):
            self.clock.now += 0.001
            submit(plan, alone)

        executor.collect, executor.submit = later, planned


def test_a_step_lasts_from_its_turns_beginning_and_waiting_is_no_part_of_it():
    driver = paced()
    Taking(driver.clock, 0.02).wrap(driver.executor)
    for pause in (0.0, 5.0, 100.0):
        driver.clock.now += pause
        driver.submit(int(pause) + 1, [1, 2, 3], max_tokens=4)
        driver.run()
    seconds = [seconds for _, seconds in driver.learned.learned]
    assert len(seconds) == 12
    assert seconds == pytest.approx([0.021] * 12)


def test_its_word_is_followed_between_steps():
    driver = paced(Told(Sizes(2, 16)), slots=8, num_blocks=64)
    for number in range(1, 40):
        driver.submit(number, [number] * 3, max_tokens=12)
    most = 0
    while driver.core.has_work:
        driver.clock.now += 0.05
        driver.step()
        if driver.clock.now > 5.0:
            most = max(most, len(driver.executor.plans[-1].slots))
    assert most == 2
    stats = driver.core.stats
    assert (stats.pacer.batch, stats.pacer.budget, stats.pacer.predictor) == (2, 16, "learned")
    assert stats.preemptions_total == 0
    for number in range(1, 40):
        assert driver.tokens(number) == alone([number] * 3, SamplingParams(max_tokens=12, seed=0), (), 0, 64)[0]


def test_it_is_told_of_the_requests():
    driver = paced(slots=4, num_blocks=64)
    for number in range(1, 11):
        driver.submit(number, [number] * 5, max_tokens=3)
    driver.submit(11, [1] * 5, received=[2, 3], max_tokens=9)  # came back from a dead engine: no new load
    driver.step()
    driver.clock.now = 0.5
    driver.step()
    load = driver.learned.asked[-1]
    assert (load.running, load.waiting) == (4, 7)
    assert load.mean_prompt == pytest.approx(5.0)
    assert load.running_context == pytest.approx(5.0)
    assert load.waiting_prompt == pytest.approx((6 * 5 + 7) / 7)
    assert load.oldest_wait == pytest.approx(0.5)
    assert load.arrival_rate > 0
    assert 0 < load.cache < 1
    driver.run()
    driver.clock.now = 1.5
    driver.submit(12, [1], max_tokens=2)
    driver.step()
    assert driver.learned.asked[-1].mean_output == pytest.approx(4, abs=2)


def test_a_pacer_that_is_switched_off_measures_and_sets_nothing():
    """As with static batching, which is the baseline."""
    clock, learned = Clock(), Told(Sizes(2, 16))
    pacer = make_pacer(Sizes(8, 64), learned, monitor=make_monitor(), enabled=False)
    driver = Driver(slots=8, clock=clock, pacer=pacer, continuous=False, static_timeout=0.0)
    for number in range(1, 9):
        driver.submit(number, [number], max_tokens=9)
    for _ in range(8):
        clock.now += 0.125
        driver.step()
        assert len(driver.executor.plans[-1].slots) == 8
    assert not learned.asked
    assert not pacer.decisions
    stats = driver.core.stats.pacer
    assert (stats.predictor, stats.batch, stats.budget, stats.decisions) == ("off", 8, 64, 0)
    assert stats.arrival_rate > 1
    assert len(pacer.monitor.history) == 8


def test_without_a_pacer_the_sizes_are_those_of_the_options():
    driver = Driver(slots=8, budget=64)
    stats = driver.core.stats.pacer
    assert (stats.predictor, stats.batch, stats.budget) == ("off", 8, 64)
    assert not driver.core.rest()


def test_an_idle_engine_asks_for_nothing():
    driver = paced()
    assert not driver.core.has_work
    driver.submit(1, [1], max_tokens=2)
    driver.run()
    driver.clock.now += 1000.0
    assert not driver.core.has_work


@pytest.mark.parametrize("where", ["learn", "predict"])
def test_an_engine_goes_on_without_a_pacer_that_fails(where, caplog):
    learned = Told(Sizes(2, 16))
    driver = paced(learned, slots=8, num_blocks=64)
    for number in range(1, 13):
        driver.submit(number, [number] * 3, max_tokens=12)

    def go_on(steps):
        for _ in range(steps):
            driver.clock.now += 0.125
            driver.step()

    go_on(10)
    assert driver.core.stats.pacer.batch < 8

    def fail(*args):
        raise ZeroDivisionError("of all things")

    setattr(learned, where, fail)
    go_on(4)
    assert (driver.core.stats.pacer.predictor, driver.core.stats.pacer.batch) == ("off", 8)
    assert driver.core._scheduler.sizes.batch == 8
    driver.run()
    for number in range(1, 13):
        assert driver.tokens(number) == alone([number] * 3, SamplingParams(max_tokens=12, seed=0), (), 0, 64)[0]
    assert sum("of all things" in record.message for record in caplog.records) == 1
    assert not driver.core.rest()
    driver.core.close()
