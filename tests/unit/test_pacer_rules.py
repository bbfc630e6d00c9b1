"""The predictor by rules: which way the batch goes."""

from __future__ import annotations

from typing import Any

import pytest

from noria.config import RuleOptions
from noria.pacer.base import Load, Sizes
from noria.pacer.rules import RulePredictor

MOST = Sizes(256, 512)


def batch(load: Load, now: int = 64, least: int = 1, most: Sizes = MOST, **options: Any) -> int:
    rules = RulePredictor(RuleOptions(**options), 0.8, 0.8)
    return rules.predict(load, Sizes(now, 512), most, least).sizes.batch


def test_grows_while_requests_wait_and_the_device_has_room() -> None:
    assert batch(Load(running=64, waiting=10, device=0.3)) == 80
    assert batch(Load(running=64, waiting=10, device=None)) == 80
    assert batch(Load(running=64, waiting=10, device=0.3), growth=2.0) == 128


def test_grows_faster_while_the_queue_is_long() -> None:
    assert batch(Load(running=64, waiting=64, device=0.3)) == 100
    assert batch(Load(running=64, waiting=64, device=0.3), long_queue=2.0) == 80


def test_stays_while_nobody_waits_or_the_device_is_busy() -> None:
    assert batch(Load(running=64, device=0.1)) == 64
    assert batch(Load(running=64, waiting=10, device=0.6)) == 64
    assert batch(Load(running=64, waiting=10, device=0.6), low_utilization=0.7) == 80


@pytest.mark.parametrize("load", [Load(waiting=99, device=0.9), Load(waiting=99, memory=0.9)])
def test_shrinks_beyond_a_threshold(load: Load) -> None:
    assert batch(load) == 51
    assert batch(load, shrink=0.5) == 32


def test_is_smaller_for_long_requests() -> None:
    waiting = {"running": 256, "waiting": 400, "device": 0.3}
    assert batch(Load(mean_prompt=500, mean_output=200, **waiting), 256) == 256
    assert batch(Load(mean_prompt=1024, mean_output=256, **waiting), 256) == 204
    assert batch(Load(mean_prompt=8000, mean_output=500, **waiting), 256) == 128
    assert batch(Load(mean_prompt=500, mean_output=200, **waiting), 256, long_request=600) == 219


def test_small_batches_grow_and_shrink_too() -> None:
    assert batch(Load(running=1, waiting=1, device=0.1), 1) == 2
    assert batch(Load(running=3, waiting=1, device=0.1), 3) == 4
    assert batch(Load(device=0.9), 2) == 1


def test_keeps_within_what_may_be_set() -> None:
    assert batch(Load(waiting=500, device=0.1), 250) == 256
    assert batch(Load(device=0.9), 10, least=9) == 9
    assert batch(Load(device=0.9), 10, least=300) == 256
    rules = RulePredictor(RuleOptions(), 0.8, 0.8)
    assert rules.predict(Load(), Sizes(64, 32), Sizes(64, 32), 1).sizes == Sizes(64, 64)
    assert rules.trusted


def test_says_why() -> None:
    rules = RulePredictor(RuleOptions(), 0.8, 0.8)
    load = Load(running=64, waiting=10, device=0.6, mean_prompt=2000, mean_output=48)
    assert rules.predict(load, Sizes(64, 512), MOST, 1).reason == (
        "10 wait for 64, but the device is at 60%, at most 128 as requests are long (2048 tokens)"
    )
