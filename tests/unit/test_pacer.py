"""The pacer: whose word counts, when it decides, what thresholds do, and what is remembered of it."""

from __future__ import annotations

import msgspec
import pytest

from helpers.pacing import EIGHTH, NOON, Machine, Told, make_monitor, make_pacer
from noria.pacer.base import Sizes, StepShape
from noria.pacer.monitor import Census
from noria.pacer.pacer import DECISIONS

BUSY = Census(running=8, waiting=20, context=50.0)


def turns(pacer, count, start=0.0, interval=EIGHTH, census=BUSY):
    return [pacer.turn(census, start + number * interval) for number in range(count)]


def test_until_the_learned_predictor_is_trusted_the_most_is_set():
    learned = Told(Sizes(4, 64), trusted=False)
    pacer = make_pacer(learned=learned)
    assert set(turns(pacer, 20)) == {Sizes(256, 512)}
    assert pacer.stats.predictor == "most"
    assert not pacer.stats.trusted
    assert "not known" in pacer.decisions[-1].reason
    assert not learned.asked


def test_once_it_is_trusted_its_word_counts_and_rules_when_it_no_longer_is():
    learned, rules = Told(Sizes(40, 100)), Told(Sizes(9, 99))
    pacer = make_pacer(learned=learned, rules=rules)
    assert turns(pacer, 60)[-1] == Sizes(40, 100)
    assert (pacer.stats.predictor, pacer.stats.trusted, pacer.stats.model_error) == ("learned", True, 0.05)
    assert not rules.asked
    learned.trusted = False
    assert turns(pacer, 60, 10.0)[-1] == Sizes(9, 99)
    assert (pacer.stats.predictor, pacer.stats.trusted) == ("rules", False)
    learned.trusted = True
    assert turns(pacer, 60, 20.0)[-1] == Sizes(40, 100)


def test_rules_alone():
    pacer = make_pacer(predictor="rules")
    assert turns(pacer, 60)[-1] == Sizes(9, 99)
    assert (pacer.stats.predictor, pacer.stats.model_error) == ("rules", None)


def test_it_decides_at_its_interval():
    rules = Told(Sizes(4, 64))
    pacer = make_pacer(rules=rules, adjustment_interval=0.5)
    turns(pacer, 128, interval=1 / 128)
    assert len(rules.asked) == 2
    assert len(pacer.monitor.history) == 8
    assert not pacer.is_due(0.99)
    assert pacer.is_due(1.0)


def test_after_a_silence_it_decides_at_once_and_only_once():
    rules = Told(Sizes(4, 64))
    pacer = make_pacer(rules=rules)
    turns(pacer, 5)
    assert pacer.is_due(1000.0)
    pacer.turn(BUSY, 1000.0)
    assert len(rules.asked) == 6
    assert not pacer.is_due(1000.1)


def test_steps_are_learned_from():
    learned = Told(Sizes(4, 64))
    pacer = make_pacer(learned=learned)
    pacer.stepped(StepShape(3, 30), 0.25, 1.0)
    assert learned.learned == [(StepShape(3, 30), 0.25)]


def test_predictors_are_asked_with_the_load():
    learned = Told(Sizes(4, 64))
    pacer = make_pacer(learned=learned)
    pacer.arrived(17, 0.0)
    pacer.ended(2, 10)
    pacer.turn(BUSY, 0.1)
    (load,) = learned.asked
    assert (load.running, load.waiting, load.mean_prompt, load.mean_output) == (8, 20, 17.0, 5.0)


@pytest.mark.parametrize("threshold", ["device", "memory"])
def test_beyond_a_threshold_the_batch_does_not_grow(threshold):
    machine = Machine(available=900)
    monitor = make_monitor(machine, least=lambda shape, steps: shape.decode_rows / 100)
    rules = Told(Sizes(10, 64))
    pacer = make_pacer(rules=rules, monitor=monitor)
    now = 0.0

    def go_on(seconds, work):
        nonlocal now
        for _ in range(round(seconds / EIGHTH)):
            now += EIGHTH
            if threshold == "device":
                pacer.stepped(StepShape(work), 0.1, now)  # each takes 10 ms at least
            pacer.turn(BUSY, now)
        return pacer.sizes

    assert go_on(10, work=5) == Sizes(10, 64)
    assert pacer.decisions[-1].reached == ()
    machine.available = 100 if threshold == "memory" else 900
    assert go_on(5, work=12) == Sizes(10, 64)
    rules.sizes = Sizes(100, 400)
    assert go_on(20, work=12) == Sizes(10, 64)
    assert pacer.decisions[-1].reached == (threshold,)
    assert f"{threshold} beyond the threshold" in pacer.decisions[-1].reason
    stats = pacer.stats
    assert (stats.device_reached, stats.memory_reached) == (threshold == "device", threshold == "memory")
    rules.sizes = Sizes(5, 32)  # it may still shrink
    assert go_on(10, work=12) == Sizes(5, 32)
    rules.sizes = Sizes(100, 400)
    machine.available = 900
    assert go_on(20, work=5) == Sizes(100, 400)
    assert (pacer.stats.device_reached, pacer.stats.memory_reached) == (False, False)


def test_a_device_whose_limits_are_not_known_reaches_no_threshold():
    pacer = make_pacer(rules=Told(Sizes(100, 400)), device_threshold=0.01)
    for number in range(60):
        pacer.stepped(StepShape(200), 0.1, number / 10)
        pacer.turn(BUSY, number / 10)
    assert pacer.sizes == Sizes(100, 400)
    assert pacer.stats.device is None


def test_every_decision_is_a_record_that_can_be_sent():
    learned = Told(Sizes(16, 128))
    pacer = make_pacer(learned=learned)
    turns(pacer, 4)
    first, second, *_ = pacer.decisions
    assert (first.number, first.at, first.time, first.predictor) == (1, 0.0, NOON, "learned")
    assert (first.before, first.after) == (Sizes(256, 512), Sizes(256, 512))
    assert "no stray" in first.reason
    assert second.after.batch == round(0.7 * 256 + 0.3 * 16)
    assert "on the way to 16" in second.reason
    assert second.prediction.sizes == Sizes(16, 128)
    plain = msgspec.json.decode(msgspec.json.encode(second))
    assert plain["load"]["waiting"] == 20
    assert plain["prediction"] == {"sizes": {"batch": 16, "budget": 128}, "reason": "as told", "step_seconds": 0.01}
    assert plain["after"] == {"batch": second.after.batch, "budget": second.after.budget}
    assert plain["error"] == 0.05


def test_the_last_decisions_are_kept():
    pacer = make_pacer()
    turns(pacer, DECISIONS + 50)
    assert len(pacer.decisions) == DECISIONS
    assert pacer.decisions[-1].number == pacer.stats.decisions == DECISIONS + 50
