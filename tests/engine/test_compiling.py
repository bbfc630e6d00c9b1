"""Requests that wait for their grammars: they keep their place, can be aborted, and fail alone."""

from __future__ import annotations

import weakref
from concurrent.futures import Future

import numpy as np
import pytest

from helpers.engine_driver import Driver
from helpers.fake_executor import VOCAB, alone
from helpers.tiny_vocabulary import vocabulary
from noria.errors import GrammarError
from noria.messages import Control
from noria.params import SamplingParams

PROMPT = list(range(20))


def held(driver: Driver, *grammars: str) -> list[Future[str]]:
    """Grammars that are compiled when the test says so."""
    futures = [Future() for _ in grammars]
    driver.executor.compiling.update(zip(grammars, futures, strict=True))
    return futures


def other(number: int) -> list[int]:
    return np.random.default_rng(number).integers(0, VOCAB, 20).tolist()


def test_the_vocabulary_is_handed_on():
    driver = Driver()
    driver.core.handle(vocabulary())
    assert driver.executor.vocabularies == [vocabulary()]
    assert not driver.core.has_work


def test_a_grammar_that_is_ready_costs_no_turn():
    driver = Driver()
    driver.submit(1, PROMPT, grammar="good")
    assert driver.core.idle_seconds == 0
    driver.step()
    assert len(driver.tokens(1)) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_for_a_grammar_holds_up_nobody_and_keeps_its_place(depth):
    driver = Driver(slots=1, depth=depth)
    (late,) = held(driver, "late")
    driver.submit(1, other(1), arrival=1.0, max_tokens=3)
    driver.step()
    driver.submit(2, other(2), arrival=2.0, grammar="late")
    driver.submit(3, other(3), arrival=3.0)
    driver.submit(4, other(4), arrival=4.0)
    assert driver.core.stats.waiting == 3
    while 3 not in driver.seen:
        driver.step()
    assert driver.finish(1).reason == "length"
    late.set_result("late")
    driver.run()
    assert list(driver.seen) == [1, 3, 2, 4]
    assert driver.tokens(2) == alone(other(2), SamplingParams(max_tokens=4, seed=0, grammar="late"), (), 0, 64)[0]


def test_with_nothing_else_to_do_it_looks_for_the_grammar_now_and_then():
    driver = Driver()
    (late,) = held(driver, "late")
    driver.submit(1, PROMPT, grammar="late")
    assert driver.core.has_work
    assert 0 < driver.core.idle_seconds < 0.1
    assert driver.step() is None
    late.set_result("late")
    assert driver.core.idle_seconds == 0
    driver.run()
    assert driver.finish(1).reason == "length"


@pytest.mark.parametrize("error", [GrammarError("the grammar cannot be used: it is bad"), ValueError("it is bad")])
def test_a_grammar_that_fails_ends_its_request_alone(error):
    driver = Driver()
    (late,) = held(driver, "late")
    driver.submit(1, other(1), grammar="late")
    driver.submit(2, other(2), grammar="bad at once")
    driver.submit(3, other(3), grammar="good")
    driver.step()
    late.set_exception(error)
    driver.run()
    for request_id in (1, 2):
        end = driver.finish(request_id)
        assert end.reason == "error"
        assert "grammar" in end.message
        assert "it is bad" in end.message
        assert driver.tokens(request_id) == []
    assert driver.tokens(3) == alone(other(3), SamplingParams(max_tokens=4, seed=0), (), 0, 64)[0]


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
def test_aborted_while_it_compiles(failing, prefetch):
    driver = Driver(prefetch=prefetch)
    (late,) = held(driver, "late")
    driver.submit(1, PROMPT, grammar="late")
    driver.step()
    driver.abort(1)
    if failing:
        late.set_exception(GrammarError("no"))
    else:
        late.set_result("late")
    driver.run()
    assert driver.seen == {}
    assert driver.core.stats.waiting == 0
    assert not driver.core.has_work


@pytest.mark.parametrize("depth", [1, 2])
def test_compiled_at_admission_it_holds_up_nobody_and_keeps_its_place(depth):
    driver = Driver(slots=1, depth=depth, prefetch=False)
    (late,) = held(driver, "late")
    driver.submit(1, other(1), arrival=1.0, max_tokens=3)
    driver.step()
    driver.submit(2, other(2), arrival=2.0, grammar="late")
    driver.submit(3, other(3), arrival=3.0)
    driver.submit(4, other(4), arrival=4.0)
    assert driver.core.stats.waiting == 3
    assert not driver.core._compiling
    while 3 not in driver.seen:
        driver.step()
    assert len(driver.core._compiling) == 1
    late.set_result("late")
    driver.run()
    assert list(driver.seen) == [1, 3, 2, 4]
    assert driver.tokens(2) == alone(other(2), SamplingParams(max_tokens=4, seed=0, grammar="late"), (), 0, 64)[0]


def test_compiled_at_admission_with_nothing_else_to_do():
    driver = Driver(prefetch=False)
    (late,) = held(driver, "late")
    driver.submit(1, PROMPT, grammar="late")
    driver.submit(2, PROMPT, grammar="bad at once")
    assert driver.step() is None
    outputs = driver.step()
    assert [end.request_id for end in outputs.finished] == [2]
    assert 0 < driver.core.idle_seconds < 0.1  # looks now and then, and costs nothing in between
    assert driver.core.stats.waiting == 1
    late.set_result("late")
    assert driver.core.idle_seconds == 0
    driver.run()
    assert driver.finish(1).reason == "length"
    assert "it is bad" in driver.finish(2).message


def test_a_second_submission_under_one_id_is_ignored():
    driver = Driver()
    (late,) = held(driver, "late")
    driver.submit(1, other(1), grammar="late")
    driver.submit(1, other(2))
    late.set_result("late")
    driver.run()
    assert driver.tokens(1) == alone(other(1), SamplingParams(max_tokens=4, seed=0), (), 0, 64)[0]


def test_what_is_asked_meanwhile_is_answered():
    driver = Driver()
    held(driver, "late")
    driver.submit(1, PROMPT, grammar="late")
    driver.core.handle(Control("stats"))
    outputs = driver.step()
    assert outputs is not None
    assert outputs.stats.waiting == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dead_end_ends_its_request_alone(depth):
    driver = Driver(depth=depth)
    driver.executor.dead_ends["narrow"] = 2
    driver.submit(1, other(1), max_tokens=9, grammar="narrow")
    driver.submit(2, other(2), max_tokens=9)
    driver.run()
    end = driver.finish(1)
    assert (end.reason, end.message) == ("error", "the grammar is at a dead end")
    assert driver.tokens(1) == alone(other(1), SamplingParams(max_tokens=2, seed=0), (), 0, 64)[0]
    assert driver.tokens(2) == alone(other(2), SamplingParams(max_tokens=9, seed=0), (), 0, 64)[0]
    assert driver.core.stats.generation_tokens_total == 11


def test_a_grammar_is_held_until_the_worker_has_had_the_request_that_was_aborted_meanwhile():
    class Compiled:
        pass

    driver = Driver(budget=5, depth=2)
    driver.submit(1, PROMPT[:17], max_tokens=1)
    driver.run()
    driver.submit(2, PROMPT[:16], received=[1, 2, 3, 4, 5, 6, 7], max_tokens=20)
    request = driver.core._scheduler.requests[2]
    request.grammar = Compiled()
    grammar = weakref.ref(request.grammar)
    del request
    driver.step()  # begins behind its prompt, and has neither a full block nor a token to come
    driver.abort(2)
    assert grammar() is not None
    driver.submit(3, [1], max_tokens=1)
    driver.run()
    assert grammar() is None
