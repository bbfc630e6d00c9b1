"""Shedding by the real scheduler, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from helpers.engine_driver import submit
from helpers.overload import Asked, World, poisson
from noria.config import PacerOptions
from noria.messages import Abort

TTFT = 1.0
SHEDS = PacerOptions(admission="slo", slo_ttft_ms=TTFT * 1e3)
CAPACITY = 12.9  # requests per second that an engine of `World` can answer, of the lengths of `poisson`
SECONDS = 20.0


def good(world: World) -> list[Asked]:
    return [one for one in world.asked if one.taken and one.ttft <= TTFT]


def test_the_capacity_is_as_stated():
    world = World()
    load = poisson(1e6)
    for _ in range(400):
        world.send(next(load))
    while world.core.has_work:
        world.step()
    assert 400 / world.executor.now == pytest.approx(CAPACITY, rel=0.03)


def test_at_twice_the_load_that_can_be_borne_goodput_stays_near_capacity():
    without, shedding = World(), World(options=SHEDS)
    for world in (without, shedding):
        world.run(poisson(2 * CAPACITY), SECONDS)
        assert all(one.end is not None for one in world.asked)
        world.core.check()
    assert all(one.taken for one in without.asked)
    assert len(good(without)) / SECONDS < 0.15 * CAPACITY  # all miss together
    taken = [one for one in shedding.asked if one.taken]
    assert len(good(shedding)) / SECONDS > 0.9 * CAPACITY
    assert len(good(shedding)) > 0.95 * len(taken)
    shed = [one for one in shedding.asked if not one.taken]
    assert sum(one.end.shed == "door" for one in shed) > 0.85 * len(shed)  # most of them at once


def test_what_was_shed_says_why_and_when_to_come_again():
    world = World(options=SHEDS)
    world.run(poisson(3 * CAPACITY), 15.0)
    ends = [one.end for one in world.asked if not one.taken]
    assert {end.shed for end in ends} == {"door", "queue"}
    for end in ends:
        assert end.reason == "error"
        assert "the objective is 1.0 s; try again in" in end.message
        assert 1.0 <= end.retry_after <= 60.0


def test_below_capacity_nothing_is_shed():
    world = World(options=SHEDS)
    world.run(poisson(0.7 * CAPACITY), SECONDS)
    assert len(good(world)) == len(world.asked)


def test_after_an_idle_time_nothing_is_refused():
    world = World(options=SHEDS)
    world.run(poisson(3 * CAPACITY), 10.0)
    assert not all(one.taken for one in world.asked)
    assert not world.core.has_work
    before = len(world.asked)
    world.executor.now += 5.0
    world.send(Asked(world.executor.now, 4000, 20))  # longer than the objective allows, but nobody is in its way
    while world.core.has_work:
        world.step()
    for _ in range(10):
        world.send(Asked(world.executor.now, 100, 20))
    while world.core.has_work:
        world.step()
    assert all(one.taken for one in world.asked[before:])


def test_the_same_requests_are_shed_again():
    ends = []
    for _ in range(2):
        world = World(options=SHEDS)
        world.run(poisson(2 * CAPACITY), 10.0)
        ends.append([(one.end.shed, one.end.message, one.first) for one in world.asked])
    assert ends[0] == ends[1]


def test_what_may_not_be_shed_is_not():
    def load() -> Iterator[Asked]:
        for number, one in enumerate(poisson(3 * CAPACITY)):
            one.sheddable = number % 3 != 0
            yield one

    world = World(options=SHEDS)
    world.run(load(), 10.0)
    assert all(one.taken for one in world.asked if not one.sheddable)
    assert not all(one.taken for one in world.asked)


def test_preempted_requests_are_not_shed():
    world = World(options=SHEDS, num_blocks=400)
    world.run(poisson(2 * CAPACITY), SECONDS)
    assert world.core.stats.preemptions_total > 10
    assert all(one.taken or one.first is None for one in world.asked)
    assert len(good(world)) > 0.9 * sum(one.taken for one in world.asked)


@pytest.mark.parametrize("depth", [1, 2])
def test_sums_come_back_to_nothing(depth):
    """Whatever comes, goes, is aborted, preempted or shed."""
    world = World(options=SHEDS, num_blocks=400, depth=depth)
    world.run(poisson(2 * CAPACITY), 10.0)
    assert world.core._shedding._ahead.all[:2] == (0, 0.0)
    assert world.core._shedding._under_way == 0
    assert world.core.stats.outlook.first_token == 0.0


def test_prompts_that_are_cached_do_not_count():
    """A long prompt that everybody shares: the queue is as short as what remains of each."""

    def load(rate: float) -> Iterator[Asked]:
        for one in poisson(rate, output=10):
            one.prompt = 1500
            yield one

    world = World(options=SHEDS)
    world.same_prompts = True
    world.run(load(20.0), 20.0)
    assert sum(one.taken for one in world.asked) > 0.95 * len(world.asked)


def test_under_priority_only_those_that_come_first_are_ahead():
    def load() -> Iterator[Asked]:
        for number, one in enumerate(poisson(2 * CAPACITY)):
            one.priority = 5 if number % 3 else 0
            yield one

    world = World(options=SHEDS, policy="priority")
    world.run(load(), SECONDS)
    urgent = [one for one in world.asked if one.priority == 0]
    assert sum(one.taken and one.ttft <= TTFT for one in urgent) > 0.95 * len(urgent)
    assert len(good(world)) / SECONDS > 0.85 * CAPACITY


def test_a_quiet_tenant_is_not_shed_beside_a_flood():
    def load() -> Iterator[Asked]:
        for number, one in enumerate(poisson(2 * CAPACITY)):
            one.tenant = "flood" if number % 10 else "quiet"
            yield one

    world = World(options=SHEDS, policy="fair")
    world.run(load(), SECONDS)
    quiet = [one for one in world.asked if one.tenant == "quiet"]
    assert all(one.taken and one.ttft <= TTFT for one in quiet)
    assert len(good(world)) / SECONDS > 0.85 * CAPACITY


def test_an_objective_for_each_token_bounds_the_batch():
    tpot = 0.03  # a full batch takes 40 ms
    objectives = PacerOptions(admission="slo", slo_tpot_ms=tpot * 1e3)
    without, shedding = World(), World(options=objectives)
    shares = []
    for world in (without, shedding):
        world.run(poisson(2 * CAPACITY), SECONDS)
        taken = [one for one in world.asked if one.taken and one.at > 5.0]  # by then it is known how long answers are
        shares.append(sum(one.tpot <= tpot for one in taken) / len(taken))
    assert shares[0] < 0.1
    assert shares[1] > 0.95
    met = [one for one in shedding.asked if one.taken and one.tpot <= tpot]
    assert len(met) / SECONDS > 0.7 * CAPACITY
    assert {one.end.shed for one in shedding.asked} == {None, "door"}


def test_long_steps_in_which_requests_wait_unseen_are_counted():
    """A request that comes as a long step begins is heard of when that ends."""
    world = World(options=SHEDS)
    world.run(poisson(4.0, prompt=2000, output=20), SECONDS)  # steps take 0.1 s, a prompt of mean length 0.8 s
    taken = [one for one in world.asked if one.taken]
    assert len(taken) < 0.8 * len(world.asked)
    assert len(good(world)) > 0.95 * len(taken)


def busy(**how) -> World:
    """A world in which nobody who comes now could be answered in time: all places are taken for long."""
    world = World(options=SHEDS, slots=2, **how)
    for _ in range(4):
        world.send(Asked(0.0, 20, 20))
    while world.core.has_work:  # it is known now how long answers and steps are
        world.step()
    for _ in range(2):
        world.send(Asked(world.executor.now, 20, 1000))
    world.step()
    return world


def test_what_comes_back_from_a_dead_engine_is_not_shed():
    world = busy()
    for _ in range(20):
        world.send(Asked(world.executor.now, 20, 1000))
    assert any(not one.taken for one in world.asked) or world.core._outputs.finished
    world.core.handle(submit(100, [1] * 20, received=[2, 3], max_tokens=8, sheddable=True))
    for _ in range(400):  # longer than the objective
        world.core.step()
    assert world.executor.now > 2 * TTFT
    assert 100 in world.core._scheduler.requests


@pytest.mark.parametrize("prefetch", [True, False])
def test_one_whose_grammar_takes_too_long_is_lost(prefetch):
    world = busy(prefetch=prefetch)
    world.executor.compiling["slow"] = grammar = Future()
    world.core.handle(submit(100, [1] * 20, max_tokens=8, grammar="slow", sheddable=True, arrival=world.executor.now))
    ends, came = [], world.executor.now
    while not ends:
        outputs = world.core.step()
        ends = [end for end in outputs.finished if end.request_id == 100] if outputs else []
        if world.executor.now > came + 2 * TTFT and not grammar.done():
            grammar.set_result("slow")
    assert ends[0].shed == "queue"
    assert ends[0].queued_seconds >= 0.9 * TTFT
    assert 100 not in world.core._compiling
    assert 100 not in world.core._scheduler.requests


def test_one_that_leaves_while_it_waits_is_forgotten():
    world = busy()
    world.core.handle(submit(100, [1] * 20, max_tokens=8, sheddable=True, arrival=world.executor.now))
    assert world.core._shedding._ahead.all.requests == 1
    world.core.handle(Abort((100,)))
    assert world.core._shedding._ahead.all.requests == 0
    for _ in range(400):
        outputs = world.core.step()
        assert not outputs.finished
    assert world.executor.now > 2 * TTFT


def test_what_another_engine_has_made_says_nothing_of_this_ones_speed(monkeypatch):
    world = World(options=SHEDS)
    world.run(poisson(CAPACITY / 2), 5.0)
    gate, seen = world.core._shedding._gate, []
    monkeypatch.setattr(gate, "ended", lambda *end: seen.append(end))
    world.core.handle(submit(9000, [1] * 50, received=[2] * 500, max_tokens=510))
    world.core.handle(submit(9001, [1] * 50, max_tokens=10))
    while world.core.has_work:
        world.core.step()
    told = {tokens: (expected, taken) for tokens, expected, taken in seen}
    assert told[510][0] is None
    expected, taken = told[10]
    assert taken == pytest.approx(expected, rel=0.5)
