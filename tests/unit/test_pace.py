"""How fast requests end, and what those who must wait are told."""

from __future__ import annotations

import pytest

from noria.frontend.pace import LATEST, SOONEST, Pace


class Clock:
    now = 7.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_known_at_first() -> None:
    assert Pace(Clock()).seconds(1000) == SOONEST


@pytest.mark.parametrize("seconds", [5, 40, 300])
def test_a_steady_rate_is_told_whatever_the_time(seconds: int) -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(seconds * 4):
        clock.now += 0.25
        pace.ended()
    assert pace.rate == pytest.approx(4.0, rel=0.05)
    assert pace.seconds(40) == pytest.approx(10.0, rel=0.05)
    assert (pace.seconds(1), pace.seconds(10_000)) == (SOONEST, LATEST)


def test_what_was_long_ago_counts_little() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(400):
        clock.now += 0.25
        pace.ended()
    before = pace.seconds(20)
    clock.now += 60.0
    assert pace.seconds(20) > 5 * before
    clock.now += 1e6
    assert pace.seconds(20) == LATEST


def test_a_burst_at_the_start_is_not_taken_for_a_rate_without_end() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.ended(50)
    assert pace.rate <= 51.0
