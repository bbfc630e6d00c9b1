"""Batch size and token budget change while requests run; who runs is not disturbed."""

from __future__ import annotations

from helpers.engine_driver import Driver
from helpers.fake_executor import alone
from noria.pacer.base import Sizes
from noria.params import SamplingParams


def running(driver) -> int:
    return driver.core.stats.running


def sizes_of_plans(driver) -> list[int]:
    return [len(plan.slots) for plan in driver.executor.plans]


def start(driver, count, max_tokens=20, prompt=3) -> None:
    for number in range(1, count + 1):
        driver.submit(number, [number] * prompt, max_tokens=max_tokens)


def expected(number, max_tokens=20, prompt=3):
    return alone([number] * prompt, SamplingParams(max_tokens=max_tokens, seed=0), (), 0, 64)[0]


def test_a_smaller_batch_comes_about_as_requests_end():
    driver = Driver(slots=8, num_blocks=64)
    start(driver, 6, max_tokens=10)
    driver.step()
    assert running(driver) == 6
    driver.core._scheduler.bind(Sizes(2, 64))
    for number in range(11, 14):
        driver.submit(number, [number] * 3, max_tokens=10)
    for _ in range(8):
        driver.step()
        assert running(driver) == 6
    driver.run()
    assert max(sizes_of_plans(driver)[10:]) == 2
    assert driver.core.stats.preemptions_total == 0
    assert all(driver.tokens(number) == expected(number, 10) for number in (1, 2, 3, 4, 5, 6, 11, 12, 13))


def test_a_larger_batch_is_filled_at_the_next_step():
    driver = Driver(slots=8, num_blocks=64)
    driver.core._scheduler.bind(Sizes(1, 64))
    start(driver, 5)
    driver.step()
    assert running(driver) == 1
    driver.core._scheduler.bind(Sizes(4, 64))
    driver.step()
    assert running(driver) == 4
    driver.core._scheduler.bind(Sizes(100, 1000))  # more than there is: all of it
    driver.step()
    assert running(driver) == 5
    assert driver.core._scheduler.sizes == Sizes(8, 64)


def test_a_budget_has_a_token_for_each_that_runs():
    driver = Driver(slots=8, num_blocks=64)
    start(driver, 6)
    driver.step()
    driver.core._scheduler.bind(Sizes(1, 1))
    assert driver.core._scheduler.sizes == Sizes(1, 6)
    driver.step()
    assert driver.executor.plans[-1].counts.tolist() == [1] * 6
    driver.run()
    assert all(driver.tokens(number) == expected(number) for number in range(1, 7))
    assert driver.core._scheduler.sizes == Sizes(1, 1)


def test_a_budget_has_a_token_for_each_of_a_full_batch():
    """Otherwise those who run would use it up, and nobody could join them."""
    driver = Driver(slots=8, num_blocks=64)
    driver.core._scheduler.bind(Sizes(4, 1))
    start(driver, 4)
    for _ in range(12):
        driver.step()
        assert driver.executor.plans[-1].tokens <= 4
    assert running(driver) == 4


def test_a_smaller_budget_cuts_prompts_into_smaller_parts():
    driver = Driver(slots=2, num_blocks=64, budget=64)
    driver.core._scheduler.bind(Sizes(2, 10))
    driver.submit(1, list(range(1, 41)), max_tokens=3)
    for _ in range(2):
        driver.step()
    driver.core._scheduler.bind(Sizes(2, 15))
    driver.run()
    assert [plan.tokens for plan in driver.executor.plans][:4] == [10, 10, 15, 5]


def test_nobody_is_displaced_while_more_run_than_may():
    """The fair policy lets one who has been served far more give up a place; here that would open none."""
    driver = Driver(slots=4, num_blocks=64, budget=8, policy="fair")
    for number in range(1, 5):
        driver.submit(number, [number] * 30, max_tokens=30, tenant="greedy")
    for _ in range(30):
        driver.step()
    assert running(driver) == 4
    driver.core._scheduler.bind(Sizes(2, 8))
    driver.submit(9, [9] * 8, max_tokens=4, tenant="new")
    driver.step()
    assert (running(driver), driver.core.stats.preemptions_total) == (4, 0)
    driver.core._scheduler.bind(Sizes(4, 8))
    driver.step()
    assert (running(driver), driver.core.stats.preemptions_total) == (4, 1)
    driver.run()
    assert driver.tokens(9) == alone([9] * 8, SamplingParams(max_tokens=4, seed=0), (), 0, 64)[0]


def test_steps_that_repeat_go_on_under_other_sizes():
    driver = Driver(slots=8, num_blocks=64)
    start(driver, 3, max_tokens=6)
    for sizes in ((8, 64), (1, 1), (2, 2), (8, 8), (1, 3)):
        driver.core._scheduler.bind(Sizes(*sizes))
        driver.step()
    driver.run()
    assert sum(plan.repeats for plan in driver.executor.plans) >= 3
    assert all(driver.tokens(number) == expected(number, 6) for number in range(1, 4))
