"""The least that a step will take: never more than what like steps have taken."""

from __future__ import annotations

import numpy as np
import pytest

from noria.engine.forecast import Forecast
from noria.plan import StepPlan


def step(*counts: int) -> StepPlan:
    return StepPlan(1, np.arange(len(counts), dtype=np.int32), counts=np.array(counts, np.int32))


def test_it_says_nothing_before_it_has_seen_enough():
    forecast = Forecast()
    for _ in range(3):
        forecast.learn(step(1, 1), 0.01)
        assert forecast.seconds(step(1, 1)) == 0
    forecast.learn(step(1, 1), 0.01)
    assert forecast.seconds(step(1, 1)) == pytest.approx(0.007)
    assert forecast.seconds(step(1, 30)) == 0  # another kind of step


def test_a_step_that_was_held_up_does_not_count():
    forecast = Forecast()
    for seconds in (5.0, 0.02, 0.01, 9.0):
        forecast.learn(step(1, 30), seconds)
    assert forecast.seconds(step(1, 30)) == pytest.approx(0.007)


def test_larger_steps_count_as_equal_and_smaller_ones_by_their_share():
    forecast = Forecast()
    for _ in range(4):
        forecast.learn(step(*[1] * 20), 0.02)
    assert forecast.seconds(step(*[1] * 80)) == pytest.approx(0.014)
    assert forecast.seconds(step(*[1] * 5)) == pytest.approx(0.0035)
