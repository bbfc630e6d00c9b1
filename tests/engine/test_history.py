"""What the engine says of a request's time: every cause of waiting, and that nothing is left out or told twice."""

from __future__ import annotations

import random
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import pytest

from helpers.engine_driver import Driver
from noria.engine.account import _MOST_PHASES, _bounded, explain
from noria.engine.history import History, Ring
from noria.messages import Explain, Phase
from noria.pacer.base import Sizes

STEP = 1 / 16  # seconds of a step; sums of such are exact


class World(Driver):
    """An engine whose steps take STEP seconds of a clock that nothing else moves."""

    def __init__(self, **options) -> None:
        self.time = 0.0
        super().__init__(clock=lambda: self.time, **options)
        collect = self.executor.collect

        def slowly():
            self.time += STEP
            return collect()

        self.executor.collect = slowly

    def story(self, request_id):
        """Answers, checked."""
        self.core.handle(Explain(7, request_id))
        (told,) = self.core._outputs.answers
        self.core._outputs.answers.clear()
        assert told.ask == 7
        check(told)
        return told

    def waits(self, request_id) -> list[tuple[str, float]]:
        """Causes of waiting, with steps that it took."""
        story = self.story(request_id)
        return [(one.cause, (one.end - one.start) / STEP) for one in story.phases if one.cause != "running"]


def check(told) -> None:
    """Phases follow each other from the submission to the end, and the steps lie within those that ran."""
    end = told.now if told.ended is None else told.ended
    edges = [(one.start, one.end) for one in told.phases]
    assert all(start < stop for start, stop in edges if start != stop)
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    if end > told.submitted:
        assert (edges[0][0], edges[-1][1]) == (told.submitted, end)
    assert sum(stop - start for start, stop in edges) == end - told.submitted
    numbers, own = np.frombuffer(told.numbers, "<i8"), np.frombuffer(told.own, "<i4")
    running = [one for one in told.phases if one.cause == "running"]
    assert len(numbers) + told.left_out == sum(one.steps for one in running)
    if not told.left_out:
        assert int(own.sum()) == sum(one.tokens for one in running)
    assert (np.diff(numbers) > 0).all()


def prompt(length, first=1):
    return [first + (5 * i) % 40 for i in range(length)]


def test_a_request_alone_runs_from_the_first_moment():
    world = World()
    world.submit(1, prompt(10), max_tokens=4)
    world.run()
    told = world.story(1)
    assert [(one.cause, one.start, one.end) for one in told.phases] == [("running", 0.0, 4 * STEP)]
    assert np.frombuffer(told.own, "<i4").tolist() == [10, 1, 1, 1]
    assert (told.reason, told.ended, told.preemptions, told.ahead) == ("length", 4 * STEP, 0, 0)
    assert told.own_seconds == 4 * STEP  # nobody shared the steps


def test_the_batch_cap():
    world = World(slots=1)
    world.submit(1, prompt(10), max_tokens=5)
    world.submit(2, prompt(10, 2), max_tokens=2)
    world.run()
    assert world.waits(2) == [("cap", 5.0)]
    told = world.story(2)
    assert (told.ahead, told.phases[0].batch, told.phases[0].running, told.phases[0].steps) == (1, 1, 1, 5)


def test_the_cap_that_the_pacer_sets():
    world = World(slots=4)
    world.core._scheduler.bind(Sizes(2, 64))
    for request_id in (1, 2, 3):
        world.submit(request_id, prompt(10, request_id), max_tokens=4)
    world.run()
    assert world.waits(3) == [("cap", 4.0)]
    assert world.story(3).phases[0].batch == 2


def test_the_token_budget():
    world = World(budget=16)
    world.submit(1, prompt(40), max_tokens=2)
    world.submit(2, prompt(10, 2), max_tokens=2)
    world.run()
    # 40 tokens are 16, 16 and 8; the third step has room.
    assert world.waits(2) == [("budget", 2.0)]
    assert world.story(2).phases[0].budget == 16
    assert np.frombuffer(world.story(1).own, "<i4").tolist() == [16, 16, 8, 1]


def test_a_running_request_without_a_row():
    world = World(slots=4, budget=2)
    for request_id in (1, 2, 3):
        world.submit(request_id, [request_id], max_tokens=3)
    world.run()
    # Two tokens a step: the third is admitted when one of the others has ended.
    waits = [world.waits(request_id) for request_id in (1, 2, 3)]
    assert waits[:2] == [[], []]
    assert waits[2] == [("budget", 3.0)]


def test_blocks():
    world = World(num_blocks=8)  # of 8 tokens
    world.submit(1, prompt(50), max_tokens=4)
    world.submit(2, prompt(50, 2), max_tokens=4)
    world.run()
    assert world.waits(2) == [("blocks", 4.0)]


def test_priority():
    world = World(slots=1, policy="priority")
    world.submit(1, prompt(10), max_tokens=2)
    world.step()
    world.submit(2, prompt(10, 2), max_tokens=2, priority=5)
    world.submit(3, prompt(10, 3), max_tokens=3)
    world.run()
    # One step for its place, then another that came later takes it, and then for that one's place.
    assert world.waits(2) == [("cap", 1.0), ("policy", 1.0), ("cap", 2.0)]


def test_fair_turns():
    world = World(slots=4, policy="fair", budget=8, max_model_len=512, num_blocks=64)
    world.submit(1, prompt(200), max_tokens=8, tenant="a")
    for _ in range(6):
        world.step()
    world.submit(2, prompt(8, 2), max_tokens=2, tenant="b")
    world.submit(3, prompt(8, 3), max_tokens=2, tenant="a")
    world.run()
    assert "policy" in [cause for cause, _ in world.waits(1)]  # the steps are the other's
    assert "policy" in [cause for cause, _ in world.waits(3)]


def test_a_prefix_that_another_one_computes():
    world = World(num_blocks=64)
    world.submit(1, prompt(40), max_tokens=4)
    world.submit(2, [*prompt(40)[:32], 60, 61], max_tokens=4)
    world.run()
    assert world.waits(2) == [("prefix", 1.0)]
    assert world.story(2).cached_tokens == 32


def test_one_that_waited_for_a_prefix_was_not_overtaken():
    world = World(slots=2, num_blocks=64)
    world.submit(1, prompt(40), max_tokens=6)
    world.submit(2, prompt(40), max_tokens=2)  # while it waits for the first one's blocks,
    world.submit(3, prompt(10, 3), max_tokens=6)  # this one takes the place
    while world.core.has_work:
        world.step()
        world.time += STEP / 4
    assert world.waits(2) == [("prefix", 1.0), ("step", 0.25), ("cap", 6.25)]


def test_a_grammar_that_is_compiled():
    world = World()
    world.executor.compiling["slow"] = future = Future()
    world.submit(1, prompt(10), max_tokens=2, grammar="slow")
    world.submit(2, prompt(10, 2), max_tokens=2)
    world.step()
    world.step()
    future.set_result("slow")
    world.run()
    assert world.waits(1) == [("grammar", 2.0)]


def test_a_grammar_that_cannot_be_compiled():
    world = World()
    world.submit(1, prompt(10), grammar="bad one")
    world.run()
    told = world.story(1)
    assert (told.reason, told.phases) == ("error", ())


def test_a_static_batch():
    world = World(slots=2, continuous=False, static_timeout=2.0)
    world.submit(1, prompt(10), max_tokens=4)
    world.time += 1.0
    world.submit(2, prompt(10, 2), max_tokens=2)
    world.submit(3, prompt(10, 3), max_tokens=2)
    world.step()
    while world.core.has_work:
        world.time += world.core.idle_seconds
        world.step()
    assert world.waits(1) == [("static", 16.0)]  # until the batch was full
    assert world.waits(2) == []
    assert world.waits(3) == [("static", 4 + 28.0)]  # the batch before, and then alone until its time was up


def test_an_engine_at_rest():
    world = World()
    world.submit(1, prompt(10), max_tokens=1)
    world.time += 0.25
    world.run()
    assert world.waits(1) == [("gathering", 4.0)]


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption(depth):
    world = World(num_blocks=6, depth=depth, cache={"prefix_caching": False})
    world.submit(1, prompt(15), max_tokens=20)
    world.submit(2, prompt(15, 2), max_tokens=20)
    world.run()
    told = world.story(2)
    waits = world.waits(2)
    assert told.preemptions == 1
    assert [cause for cause, _ in waits] == ["preempted", "blocks"]
    assert sum(one.cause == "running" for one in told.phases) == 2
    assert world.waits(1) == []


def test_it_came_in_the_middle_of_a_step():
    world = World(depth=2)
    world.submit(1, prompt(10), max_tokens=8)
    world.step()  # planned, and its successor with the next call
    world.time += STEP / 2
    world.submit(2, prompt(10, 2), max_tokens=2)
    world.run()
    assert world.waits(2) == [("step", 1.0)]


def test_one_that_waits_or_runs_is_told_of_up_to_now():
    world = World(slots=1)
    world.submit(1, prompt(10), max_tokens=5)
    world.submit(2, prompt(10, 2), max_tokens=5)
    assert world.story(1).phases == ()
    world.step()
    world.step()
    assert world.waits(2) == [("cap", 2.0)]
    assert world.story(2).ended is None
    assert [one.cause for one in world.story(1).phases] == ["running"]
    world.abort(2)
    assert world.story(2).reason == "abort"


def test_one_that_nobody_knows():
    world = World()
    world.core.handle(Explain(3, 99))
    outputs = world.step()
    assert [(one.ask, one.known) for one in outputs.answers] == [(3, False)]


@pytest.mark.parametrize("seed", range(25))
def test_phases_tile_whatever_happens(seed):
    rng = random.Random(seed)
    world = World(
        slots=rng.randint(1, 5),
        budget=rng.choice([4, 9, 64]),
        num_blocks=rng.choice([8, 14, 40]),
        depth=rng.choice([1, 2]),
        policy=rng.choice(["fcfs", "priority", "fair"]),
        max_preemptions=rng.randint(0, 4),
    )
    alive, told = set(), {}
    for request_id in range(1, 25):
        length = rng.randint(1, 30)
        shared = prompt(length) if rng.random() < 0.5 else prompt(length, request_id)
        world.submit(
            request_id,
            shared,
            max_tokens=rng.randint(1, 20),
            arrival=world.time,
            priority=rng.randint(0, 3),
            tenant=rng.choice("ab"),
        )
        alive.add(request_id)
        world.time += rng.choice([0.0, 0.0, STEP / 4])
        for _ in range(rng.randint(0, 4)):
            world.step()
            if rng.random() < 0.05:
                world.abort(rng.choice(sorted(alive)))
            told[rng.choice(sorted(alive))] = None
            world.story(rng.choice(sorted(alive)))
    world.run()
    assert world.core._history.unfinished == 0
    for request_id in alive:
        story = world.story(request_id)
        assert story.ended is not None
        if story.reason in ("length", "stop"):
            computed = sum(one.tokens for one in story.phases)
            wanted = story.prompt_tokens + len(world.tokens(request_id)) - 1 - story.cached_tokens
            assert computed >= wanted
            if not story.preemptions:
                assert computed == wanted


def test_what_is_forgotten_is_said_to_be(monkeypatch):
    monkeypatch.setattr("noria.engine.core.History", lambda *given: History(*given, ring=Ring(8, 4), kept=2))
    world = World(slots=1)
    world.submit(1, prompt(10), max_tokens=12)
    world.submit(2, prompt(10, 2), max_tokens=12)
    world.submit(3, prompt(10, 3), max_tokens=1)
    world.run()
    assert world.core._history.life(1) is None  # only two that have ended are kept
    assert world.waits(2) == [("forgotten", 12.0)]
    assert [(one.cause, one.steps) for one in world.story(2).phases][1:] == [("running", 5), ("running", 7)]
    assert world.waits(3)[0] == ("forgotten", 17.0)


def test_many_phases_are_put_together():
    phases = [Phase(float(i), float(i + 1), "cap" if i % 2 else "policy", 1) for i in range(3 * _MOST_PHASES)]
    bounded = _bounded(phases)
    assert len(bounded) == _MOST_PHASES
    assert all(before.end == after.start for before, after in pairwise(bounded))
    assert (bounded[0].start, bounded[-1].end) == (0.0, float(len(phases)))
    assert sum(one.steps for one in bounded) == len(phases)


def test_the_ring_gives_the_latest_rows_in_order():
    world = World(slots=1)
    history = world.core._history
    assert len(history.ring.rows(0.0)) == 0
    assert explain(history, 1, 1).known is False
    history.ring = ring = Ring(8, 8)
    for request_id in range(1, 12):
        world.submit(request_id, [request_id], max_tokens=2)
        world.run()
        rows = ring.rows(0.0)
        assert rows["step"].tolist() == list(range(max(1, 2 * request_id - 7), 2 * request_id + 1))
        assert len(ring.rows(world.time - STEP)) == min(4, 2 * request_id)


def test_arrivals_that_are_gathered():
    world = World(build_interval=0.5)
    world.submit(1, prompt(10), max_tokens=2)
    world.time += 0.25
    world.submit(2, prompt(10, 2), max_tokens=2)
    while world.core.has_work:
        world.time += world.core.idle_seconds
        world.step()
    assert world.waits(1) == [("gathering", 8.0)]
    assert world.waits(2) == [("gathering", 4.0)]


def test_steps_of_one_kind():
    world = World(fusion=False)
    world.submit(1, prompt(10), max_tokens=6)
    world.step()
    world.step()
    world.submit(2, prompt(10, 2), max_tokens=2)
    world.run()
    assert [cause for cause, _ in world.waits(1)] == ["kind"]  # while the other one's prompt is computed


def test_a_grammar_that_is_compiled_when_it_is_needed():
    world = World(prefetch=False)
    world.executor.compiling["slow"] = future = Future()
    world.submit(1, prompt(10), max_tokens=2, grammar="slow")
    world.submit(2, prompt(10, 2), max_tokens=2)
    world.step()
    world.step()
    future.set_result("slow")
    world.run()
    assert world.waits(1) == [("grammar", 2.0)]


@pytest.mark.parametrize("prefetch", [True, False])
def test_who_waits_for_a_grammar_counts_once_as_ahead(prefetch):
    world = World(prefetch=prefetch)
    world.executor.compiling["slow"] = Future()
    world.submit(1, prompt(10), grammar="slow")
    world.submit(2, prompt(10, 2), grammar="slow")
    world.step()
    world.submit(3, prompt(10, 3))
    assert world.story(3).ahead == 2
