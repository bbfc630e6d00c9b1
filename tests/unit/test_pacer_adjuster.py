"""Sizes follow predictions smoothly, all the way, within bounds, and not every whim."""

from __future__ import annotations

import random

import pytest

from noria.pacer.adjuster import Adjuster, Figure
from noria.pacer.base import Sizes


def settle(figure, target, most=200):
    """Values on the way, until nothing moves any more."""
    return [figure.move(target) for _ in range(most)]


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.7, 0.99])
@pytest.mark.parametrize(("start", "target"), [(1, 2), (1, 1024), (1024, 1), (40, 41), (41, 40), (100, 93), (7, 7)])
def test_it_always_arrives(factor, start, target):
    values = settle(Figure(factor, start), target, 1500)
    assert values[-1] == target
    towards = [b - a for a, b in zip([start, *values], values, strict=False)]
    assert all(step * (target - start) >= 0 for step in towards), "it went the other way"


def test_it_is_smoothed_as_said():
    figure = Figure(0.7, 100)
    assert [figure.move(200) for _ in range(4)] == [100, 130, 151, 166]


def test_no_smoothing_at_factor_zero():
    figure = Figure(0.0, 100)
    assert [figure.move(200) for _ in range(3)] == [100, 200, 200]


def test_a_late_decision_makes_up_for_those_that_were_missed():
    often, late = Figure(0.7, 1000), Figure(0.7, 1000)
    for figure in (often, late):
        figure.move(10)
    for _ in range(4):
        often.move(10)
    late.move(10, intervals=4.0)
    assert late.value == pytest.approx(often.value, abs=2)
    silent = Figure(0.7, 1000)
    silent.move(10)
    assert silent.move(10, intervals=1e6) > 10  # but an hour of silence is no hour of evidence


@pytest.mark.parametrize("swing", [1, 2, 4, 10])
def test_small_alternating_predictions_do_not_move_it(swing):
    figure = Figure(0.7, 100)
    for number in range(100):
        figure.move(100 + swing if number % 2 else 100 - swing)
    assert figure.value == 100


def test_noise_around_a_size_hardly_moves_it():
    noise, figure = random.Random(1), Figure(0.7, 64)
    values = [figure.move(round(noise.gauss(64, 3))) for _ in range(2000)]
    assert all(abs(value - 64) <= 0.1 * 64 for value in values)


def test_wild_alternating_predictions_do_not_swing_it():
    figure = Figure(0.7, 40)
    assert [figure.move(20 if number % 2 else 60) for number in range(50)] == [40] * 50


def test_one_stray_does_not_move_it():
    figure = Figure(0.7, 40)
    values = [figure.move(target) for target in (40, 40, 500, 40, 40, 1, 40, 40)]
    assert values == [40] * 8


@pytest.mark.parametrize("target", [44, 36])
def test_a_lasting_change_moves_it_however_small(target):
    values = settle(Figure(0.7, 40), target, 20)
    assert values[:2] == [40, 40]
    assert values[-1] == target


@pytest.mark.parametrize(("start", "target"), [(8, 64), (256, 32)])
def test_a_large_change_is_followed_quickly(start, target):
    """Nine tenths of the way within a second of decisions, without going beyond."""
    figure = Figure(0.7, start)
    values = [figure.move(target) for _ in range(10)]
    assert abs(values[-1] - target) <= 0.1 * abs(target - start)
    assert all(min(start, target) <= value <= max(start, target) for value in values)


# ---------------------------------------------------------------------------------------------------- both sizes


def test_sizes_begin_at_the_most():
    assert Adjuster(0.7, 1, Sizes(256, 512)).sizes == Sizes(256, 512)


def test_sizes_stay_within_their_bounds():
    adjuster = Adjuster(0.0, 4, Sizes(64, 512))
    for _ in range(3):
        sizes = adjuster.move(Sizes(0, 0))
    assert sizes == Sizes(4, 4)  # a token for each of a full batch
    for _ in range(3):
        sizes = adjuster.move(Sizes(9999, 99999))
    assert sizes == Sizes(64, 512)


def test_a_budget_that_may_not_be_larger_than_the_batch():
    adjuster = Adjuster(0.7, 1, Sizes(64, 16))
    assert adjuster.sizes == Sizes(64, 16)
    for _ in range(30):
        sizes = adjuster.move(Sizes(2, 16))
    assert sizes == Sizes(2, 16)


def test_a_least_batch_beyond_the_most_is_the_most():
    adjuster = Adjuster(0.0, 100, Sizes(8, 64))
    for _ in range(3):
        sizes = adjuster.move(Sizes(1, 64))
    assert sizes == Sizes(8, 64)
