"""The load monitor: measured figures, rates after bursts and silences, a bounded history, and trends."""

from __future__ import annotations

import math
import sys
import time
import types

import numpy as np
import pytest

from helpers.pacing import NOON, Machine, make_monitor
from noria.pacer.base import StepShape
from noria.pacer.gauges import Faded, Memory, Processing, Processors, find_nvidia
from noria.pacer.monitor import SAMPLES, Census, History, Mean

IDLE = Census()


# ---------------------------------------------------------------------------------------------------- arrival rate


def test_a_steady_rate_is_found():
    rate = Faded(3.0, 0.0)
    for number in range(400):
        rate.add(1.0, number / 20)
    assert rate.rate(20.0) == pytest.approx(20.0, rel=0.02)


def test_a_rate_is_right_from_the_start():
    """What has been seen for two seconds is not taken for what is seen in a lifetime."""
    rate = Faded(3.0, 100.0)
    for number in range(20):
        rate.add(1.0, 100.0 + number / 10)
    assert rate.rate(102.0) == pytest.approx(10.0, rel=0.05)


def test_one_arrival_at_the_very_start_is_no_flood():
    rate = Faded(3.0, 0.0)
    rate.add(1.0, 0.0)
    assert rate.rate(0.0) < 1.5


def test_a_burst_and_the_silence_after_it():
    rate = Faded(3.0, 0.0)
    rate.add(60.0, 30.0)
    assert rate.rate(30.0) == pytest.approx(20.0, rel=1e-3)  # 60 within some 3 seconds
    assert rate.rate(33.0) == pytest.approx(20.0 / math.e, rel=1e-3)
    assert rate.rate(90.0) == pytest.approx(0.0, abs=1e-6)
    rate.add(6.0, 90.0)
    assert rate.rate(90.0) == pytest.approx(2.0, rel=1e-3)  # nothing is left of what was before


def test_the_rate_follows_a_step_within_its_memory():
    rate = Faded(3.0, 0.0)
    for number in range(100):
        rate.add(1.0, number / 5)
    for number in range(240):
        rate.add(1.0, 20.0 + number / 40)
    assert rate.rate(26.0) > 0.85 * 40


def test_reading_more_often_changes_nothing():
    often, seldom = Faded(3.0, 0.0), Faded(3.0, 0.0)
    for number in range(50):
        often.add(1.0, number / 7)
        seldom.add(1.0, number / 7)
        often.rate(number / 7 + 0.01)
    assert often.rate(9.0) == pytest.approx(seldom.rate(9.0), rel=1e-12)


# ---------------------------------------------------------------------------------------------------- means


def test_mean_lengths_are_those_of_late():
    mean = Mean()
    assert mean.value(7.0) == 7.0
    mean.add(100)
    assert mean.value() == pytest.approx(100)
    for _ in range(200):
        mean.add(10)
    assert mean.value() == pytest.approx(10, rel=0.05)


def test_several_at_once_count_as_several():
    one, many = Mean(), Mean()
    for value in (5, 5, 5, 5):
        one.add(value)
    many.add(20, 4)
    one.add(50)
    many.add(50)
    assert one.value() == pytest.approx(many.value())


# ---------------------------------------------------------------------------------------------------- readings


def test_processor_share_is_of_what_may_be_used():
    used = 10.0
    share = Processors(4.0, lambda: used)
    assert share.share(0.0) == 0.0
    used = 11.0
    assert share.share(1.0) == pytest.approx(0.25)
    used = 11.0
    assert share.share(61.0) == 0.0  # a minute of silence
    used = 99.0
    assert share.share(62.0) == 1.0
    assert share.share(62.0) == 1.0  # no time has passed: as before


def test_processor_time_is_measured():
    share = Processors(1.0)
    began = time.process_time()
    share.share(0.0)
    while time.process_time() < began + 0.02:
        sum(range(1000))
    assert share.share(0.02) >= 0.9


def test_memory_share_is_the_tightest(tmp_path):
    machine = Machine(total=1000, available=600)
    (tmp_path / "mine").mkdir()
    (tmp_path / "self").write_text("0::/mine\n")
    (tmp_path / "mine/memory.max").write_text("400")
    (tmp_path / "mine/memory.current").write_text("350")
    (tmp_path / "mine/memory.stat").write_text("anon 1\ninactive_file 50\n")
    memory = Memory(lambda: machine, tmp_path, tmp_path / "self")
    assert memory.share(0.0) == pytest.approx(1 - 100 / 400)
    machine.available = 100
    assert memory.share(0.5) == pytest.approx(0.75)  # not read again yet
    assert memory.share(1.0) == pytest.approx(0.9)
    (tmp_path / "mine/memory.current").unlink()
    assert memory.share(2.0) == pytest.approx(0.9)


def test_device_share_is_work_over_what_it_could_do():
    device = Processing(None, 0.0)
    device.stepped(StepShape(10), 0.1)
    assert device.share(0.1) is None
    device.know(lambda shape, steps: shape.decode_rows / 1000, 10.0)
    assert device.share(10.0) == 0.0
    for number in range(100):
        device.stepped(StepShape(50), 10.1 + number / 10)  # 50 ms of work each 100 ms
        device.share(10.1 + number / 10)
    assert device.share(20.0) == pytest.approx(0.5, abs=0.03)
    assert device.share(80.0) == pytest.approx(0.0, abs=1e-6)


# ---------------------------------------------------------------------------------------------------- history, trends


def test_an_empty_history_is_no_error():
    monitor = make_monitor()
    load = monitor.load(IDLE, 0.0)
    assert (load.device, load.cpu, load.running, load.waiting, load.arrival_rate) == (None, 0.0, 0, 0, 0.0)
    assert load.memory == pytest.approx(0.1)
    assert (load.device_trend, load.memory_trend, load.waiting_trend, load.arrival_trend) == (0.0, 0.0, 0.0, 0.0)
    assert len(History()) == 0
    assert History().trends(0.1) == (0.0, 0.0, 0.0, 0.0)


def test_the_history_keeps_the_last_samples_in_order():
    history = History()
    for number in range(2 * SAMPLES + 7):
        history.add((float(number), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        if number in (0, 5, SAMPLES - 1, SAMPLES, SAMPLES + 3):
            known = min(number + 1, SAMPLES)
            assert history.rows()[:, 0].tolist() == list(range(number + 1 - known, number + 1))
    assert len(history) == SAMPLES
    assert history.rows(3)[:, 0].tolist() == [2 * SAMPLES + 4, 2 * SAMPLES + 5, 2 * SAMPLES + 6]


def test_trends_are_the_slopes_of_least_squares():
    history, random = History(), np.random.default_rng(0)
    at = np.cumsum(random.uniform(0.05, 0.15, 300))
    values = random.normal(size=(300, 4)) + np.outer(at, [0.1, -0.2, 3.0, 0.0])
    for moment, row in zip(at.tolist(), values.tolist(), strict=True):
        history.add((moment, *row, 0.0, 0.0))
    last = at >= at[-1] - 5.0
    last[:-51] = False  # as many samples as fall into the window at the interval
    right = [np.polyfit(at[last], values[last, column], 1)[0] for column in range(4)]
    np.testing.assert_allclose(history.trends(0.1), right, rtol=1e-9)


def test_what_was_before_a_silence_is_no_trend():
    history = History()
    for number in range(50):
        history.add((number / 10, 0.0, 0.0, float(number), 0.0, 0.0, 0.0))
    assert history.trends(0.1)[2] == pytest.approx(10.0)
    history.add((1000.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert history.trends(0.1)[2] == 0.0


def test_samples_come_at_their_interval_whatever_the_steps():
    monitor = make_monitor(interval=0.1)
    for number in range(1000):
        monitor.sample(IDLE, number * 0.013)
    assert len(monitor.history) == pytest.approx(130, abs=2)
    monitor.sample(IDLE, 100.0)  # after a silence there is one, and not many to catch up
    monitor.sample(IDLE, 100.05)
    assert len(monitor.history) == pytest.approx(131, abs=2)
    assert monitor.history.rows(1)[0, 0] == 100.0


def test_a_load_has_what_was_measured():
    machine = Machine(available=250)
    monitor = make_monitor(machine, processors=4.0, least=lambda shape, steps: 0.05 * steps)
    for number in range(40):
        now = number / 10
        monitor.arrived(30, now)
        machine.used += 0.2
        monitor.stepped(StepShape(1), now)
        monitor.sample(Census(running=3, waiting=number, context=40.0), now)
    monitor.ended(2, 24)
    census = Census(5, 7, 40.0, 11.0, 0.5, 20.0, 0.25)
    load = monitor.load(census, 4.0)
    assert (load.at, load.running, load.waiting, load.running_context) == (4.0, 5, 7, 40.0)
    assert (load.oldest_wait, load.waiting_prompt, load.cache) == (0.5, 20.0, 0.25)
    assert load.mean_prompt == pytest.approx(30)
    assert load.mean_output == pytest.approx(12)
    assert load.arrival_rate == pytest.approx(10, rel=0.05)
    assert load.cpu == pytest.approx(0.5)
    assert load.memory == pytest.approx(0.75)
    assert load.device == pytest.approx(0.5, abs=0.04)
    assert load.waiting_trend == pytest.approx(10.0)
    assert load.memory_trend == pytest.approx(0.0, abs=1e-9)


def test_outputs_are_guessed_from_those_that_run_until_one_has_ended():
    monitor = make_monitor()
    assert monitor.load(Census(running=2, output=8.0), 1.0).mean_output == 16.0
    monitor.ended(1, 5)
    assert monitor.load(Census(running=2, output=8.0), 1.0).mean_output == pytest.approx(5.0)


def test_time_of_day_is_local():
    local = time.localtime(NOON)
    seconds = 3600 * local.tm_hour + 60 * local.tm_min + local.tm_sec
    assert make_monitor().load(IDLE, 0.0).time_of_day == pytest.approx(seconds)


# ---------------------------------------------------------------------------------------------------- GPU


class NVMLError(Exception):
    pass


def library(**more):
    fake = types.ModuleType("fake_nvml")
    fake.NVMLError = NVMLError
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetHandleByIndex = lambda index: f"gpu {index}"
    fake.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=73, memory=20)
    fake.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=80, used=20, free=60)
    for name, value in more.items():
        setattr(fake, name, value)
    return fake


def failing(*args):
    raise NVMLError


def test_a_gpu_is_read_through_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "fake_nvml", library())
    device = find_nvidia("fake_nvml")
    assert device is not None
    device.stepped(StepShape(1), 0.0)
    assert device.share(1.0) == pytest.approx(0.73)
    assert device.memory() == pytest.approx(0.25)


def test_a_gpu_that_cannot_be_read_is_not_known(monkeypatch):
    broken = library(nvmlDeviceGetUtilizationRates=failing, nvmlDeviceGetMemoryInfo=failing)
    monkeypatch.setitem(sys.modules, "fake_nvml", broken)
    device = find_nvidia("fake_nvml")
    assert device is not None
    assert device.share(1.0) is None
    assert device.memory() is None


def test_no_library_no_driver_no_gpu(monkeypatch):
    assert find_nvidia("there_is_no_such_library") is None
    monkeypatch.setitem(sys.modules, "fake_nvml", library(nvmlInit=failing))
    assert find_nvidia("fake_nvml") is None
