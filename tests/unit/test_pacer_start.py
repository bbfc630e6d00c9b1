"""Which pacer an engine gets, and what it does in idle moments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from noria.config import engine_options
from noria.pacer import leisure, start
from noria.pacer.base import Sizes, StepShape
from noria.pacer.gauges import Processing
from noria.pacer.leisure import Limits, Memory
from noria.pacer.limits import DeviceLimits, KnownLimits, machine_name
from noria.pacer.monitor import Census
from noria.pacer.start import make_pacer
from noria.pacer.steptime import StepTimeModel
from noria.pacer.store import load, make_key
from noria.plan import AttentionWork, StepWork, WorkerInfo

WORK = StepWork({"f32": 1e6}, {}, 1e6, 0.0, (AttentionWork(0, "f32", 10.0, 10.0),))
WORKER = WorkerInfo(
    vocab_size=10,
    max_model_len=64,
    num_blocks=8,
    block_size=16,
    num_slots=32,
    backend="cpu",
    isa="avx2",
    threads=2,
    weights="f32",
    cache_dtype="f32",
    weight_bytes=1,
    cache_bytes=1,
    work=WORK,
)
LIMITS = DeviceLimits({"f32": 1e9}, 1e9)
BUSY = Census(running=4, waiting=4)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("NORIA_HOME", str(tmp_path))
    return tmp_path


class FakeMeasuring:
    """Needs three pieces."""

    def __init__(self, *args):
        self.args, self.done, self.given_up = args, 0, 0

    def piece(self):
        self.done += 1
        return LIMITS if self.done == 3 else None

    def give_up(self):
        self.given_up += 1
        self.done = 0


@pytest.fixture
def measuring(monkeypatch):
    made = []
    monkeypatch.setattr(start, "Measuring", lambda *args: made.append(FakeMeasuring(*args)) or made[-1])
    return made


def pacer_of(worker=WORKER, **settings):
    return make_pacer(engine_options("there-is-no-such-model", **settings), worker, clock=lambda: 0.0)


def test_by_default_there_is_one_that_learns():
    pacer = pacer_of()
    assert pacer.sizes == Sizes(32, 512)
    pacer.turn(BUSY, 0.0)
    assert pacer.stats.predictor == "most"
    pacer.stepped(StepShape(4, 100), 0.01, 0.1)
    assert pacer._learned.model.steps + len(pacer._learned.model._pending) == 1


def test_rules_if_they_are_wanted():
    pacer = pacer_of(batch_size_predictor="rules")
    pacer.turn(BUSY, 0.0)
    assert pacer.stats.predictor == "rules"


@pytest.mark.parametrize("off", [{"adaptive_batch_size": False}, {"static_batching": True}])
def test_switched_off_it_only_measures(off):
    pacer = pacer_of(**off)
    pacer.turn(BUSY, 0.0)
    assert (pacer.stats.predictor, pacer.sizes, len(pacer.monitor.history)) == ("off", Sizes(32, 512), 1)
    assert not pacer.decisions


def test_without_monitoring_there_is_none():
    assert pacer_of(load_monitoring=False) is None


def test_objectives_are_in_milliseconds():
    pacer = pacer_of(slo_ttft_ms=500.0, slo_percentile=95.0)
    objectives = pacer._learned._objectives
    assert (objectives.ttft, objectives.tpot, objectives.percentile) == (0.5, None, 95.0)


# ---------------------------------------------------------------------------------------------------- limits


def test_limits_are_found_in_an_idle_moment_and_known_at_the_next_start(measuring):
    pacer = pacer_of()
    assert pacer.monitor.device.share(0.0) is None
    assert [pacer.rest(1.0) for _ in range(4)] == [True, True, False, False]
    assert measuring[0].args == (2, {"f32"})
    assert pacer.monitor.device.share(1.0) == 0.0
    pacer.stepped(StepShape(50, 1000), 0.1, 1.5)
    assert pacer.monitor.device.share(1.5) > 0.01
    for _ in range(2):  # whoever else was at work may be gone then
        again = pacer_of()
        assert again.monitor.device.share(0.0) == 0.0
        assert [again.rest(1.0) for _ in range(4)] == [True, True, False, False]
    again = pacer_of()
    assert again.monitor.device.share(0.0) == 0.0
    assert not again.rest(0.0)
    assert len(measuring) == 3


def test_work_interrupts_the_measuring(measuring):
    pacer = pacer_of()
    assert pacer.rest(1.0)
    pacer.wake()
    assert measuring[0].given_up == 1
    assert [pacer.rest(2.0) for _ in range(3)] == [True, True, False]


def test_limits_of_another_machine_or_another_kind_say_nothing(measuring):
    KnownLimits().keep(machine_name("avx2", 2), DeviceLimits({"int8": 1e9}, 1e9))
    KnownLimits().keep(machine_name("avx2", 3), LIMITS)
    assert pacer_of().monitor.device.share(0.0) is None


def test_a_backend_without_limits_is_not_measured(measuring):
    for worker in (replace(WORKER, backend="reference"), replace(WORKER, work=None)):
        pacer = pacer_of(worker)
        assert not pacer.rest(0.0)
        assert pacer.monitor.device.share(0.0) is None
    assert not measuring


def test_a_device_with_a_library_is_read_through_it(monkeypatch):
    device = Processing(None, 0.0)
    monkeypatch.setattr(start, "find_nvidia", lambda: device)
    assert pacer_of(replace(WORKER, backend="triton")).monitor.device is device


# ---------------------------------------------------------------------------------------------------- memory


def teach(pacer, steps, start=0.0):
    for number in range(steps):
        rows = 1 + number % 40
        pacer.stepped(StepShape(rows, 50 * rows), 0.005 + 0.001 * rows, start + number)


def test_what_was_learned_is_known_at_the_next_start():
    pacer = pacer_of()
    teach(pacer, 200)
    pacer.close()
    again = pacer_of()
    again.turn(BUSY, 0.0)
    assert again._learned.model.steps == 200
    assert again._learned.model.seconds(StepShape(20, 1000)) == pytest.approx(0.025, rel=0.2)


def test_it_is_kept_when_idle_once_a_minute_and_only_if_there_is_more(monkeypatch):
    kept = []
    monkeypatch.setattr(leisure, "save", lambda key, fit: kept.append(fit.steps))
    model = StepTimeModel()
    memory = Memory(model, make_key("m", WORKER))

    def learn(steps):
        for number in range(steps):
            model.learn(StepShape(1 + number, 10), 0.01)
        model.settle()

    memory.keep(0.0)
    learn(40)
    memory.keep(1.0)
    learn(40)
    memory.keep(30.0)
    assert kept == [40]
    memory.keep(62.0)
    memory.keep(200.0)
    assert kept == [40, 80]
    learn(40)
    memory.close()
    assert kept == [40, 80, 120]


def test_a_busy_engine_keeps_it_too():
    pacer = pacer_of()
    teach(pacer, 100)
    pacer._learned.model.settle()
    pacer.turn(BUSY, 100.0)
    assert load(make_key("there-is-no-such-model", WORKER)) is not None


def test_rest_keeps_it(measuring):
    pacer = pacer_of()
    teach(pacer, 100)
    pacer._learned.model.settle()
    while pacer.rest(500.0):
        pass
    assert load(make_key("there-is-no-such-model", WORKER)) is not None


def test_limits_are_given_to_the_device():
    device = Processing(None, 0.0)
    limits = Limits(FakeMeasuring(), KnownLimits(), "a", WORK, device)
    assert [limits.piece(1.0) for _ in range(3)] == [True, True, False]
    device.stepped(StepShape(50, 1000), 1.5)
    assert device.share(1.5) > 0


def test_what_fails_while_limits_are_measured_costs_only_the_limits(measuring, caplog):
    pacer = pacer_of()
    measuring[0].piece = lambda: [][0]
    assert not pacer.rest(1.0)
    assert not pacer.rest(2.0)
    assert len(caplog.records) == 1
    assert "the machine's limits cannot be measured" in caplog.text
    assert pacer.monitor.device.share(2.0) is None


def test_a_user_without_a_home_has_a_pacer_that_keeps_nothing(measuring, monkeypatch, caplog):
    monkeypatch.delenv("NORIA_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nowhere(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", lambda path: nowhere(path) if path.as_posix().startswith("~") else path)
    pacer = pacer_of()
    teach(pacer, 100)
    while pacer.rest(1.0):
        pass
    pacer.close()
    assert pacer.monitor.device.share(1.0) is not None
    assert "name one with NORIA_HOME" in caplog.text


def test_what_began_anew_is_kept_as_soon_as_it_is_worth_it(measuring):
    pacer = pacer_of()
    teach(pacer, 5000)
    pacer.close()
    again = pacer_of()
    assert again.learned.model.steps == 5000
    again.learned.model._begin()  # as after steps that nothing explains
    teach(again, 100, start=200.0)
    again.close()
    assert load(make_key("there-is-no-such-model", WORKER)).steps == 100
