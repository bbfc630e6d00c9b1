"""Sharing and giving way: prefixes, choices of a group, and preemption."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.engine_driver import Driver
from helpers.fake_executor import VOCAB, alone
from noria.messages import Control
from noria.params import SamplingParams

PROMPT = [(5 * position + 1) % VOCAB for position in range(29)]


def answer(prompt=PROMPT, *, stop_ids=(), choice=0, most=64, received=(), **params):
    return alone(prompt, SamplingParams(**{"max_tokens": 4, "seed": 0} | params), stop_ids, choice, most, received)


def other(number, length=20):
    return [(number * 13 + 7 * position + 2) % VOCAB for position in range(length)]


# ---------------------------------------------------------------------------------------------------- sharing


def test_a_cached_prefix_is_not_computed_again():
    driver = Driver()
    driver.submit(1, PROMPT)
    driver.run()
    before = driver.executor.computed_tokens
    driver.submit(2, PROMPT, max_tokens=1)
    driver.run()
    assert driver.executor.computed_tokens - before == 29 - 24
    assert driver.finish(2).cached_tokens == 24
    assert driver.core.stats.prefix_queries_total == 58
    assert driver.core.stats.prefix_hits_total == 24


def test_the_last_prompt_token_is_always_computed():
    driver = Driver()
    for request_id in (1, 2):
        driver.submit(request_id, PROMPT[:24], max_tokens=3)
        driver.run()
    assert driver.finish(2).cached_tokens == 16
    assert driver.tokens(1) == driver.tokens(2)


def test_other_salts_share_nothing():
    driver = Driver()
    for request_id, salt in ((1, "a"), (2, "b"), (3, "a")):
        driver.submit(request_id, PROMPT, salt=salt)
        driver.run()
    assert [driver.finish(number).cached_tokens for number in (1, 2, 3)] == [0, 0, 24]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cold_prefix_is_computed_once(depth):
    driver = Driver(slots=32, num_blocks=256, budget=16, depth=depth)
    shared = other(9, 40)
    for number in range(32):
        driver.submit(number, [*shared, number, number, number], max_tokens=2)
    driver.run()
    assert driver.executor.computed_tokens == 40 + 32 * 3 + 32
    for number in range(32):
        assert driver.tokens(number) == answer([*shared, number, number, number], max_tokens=2)[0]


def test_who_waits_for_a_prefix_does_not_hold_up_the_others():
    driver = Driver()
    for request_id, prompt in ((1, PROMPT), (2, PROMPT), (3, other(3))):
        driver.submit(request_id, prompt, arrival=float(request_id))
    driver.step()
    assert sorted(driver.seen) == [1, 3]
    driver.run()
    assert driver.tokens(2) == driver.tokens(1)
    assert driver.finish(2).cached_tokens == 24


def test_if_the_owner_of_a_prefix_is_aborted_another_takes_over():
    driver = Driver(depth=2, slots=6)
    for request_id in (1, 2, 3):
        driver.submit(request_id, PROMPT)
    for request_id in (11, 12):
        driver.submit(request_id, other(1), group=7)
    driver.step()  # planned, but nothing has come back
    assert driver.core.stats.running == 2
    driver.abort(1, 11)
    driver.run()
    assert driver.tokens(2) == driver.tokens(3) == answer()[0]
    assert driver.tokens(12) == answer(other(1))[0]


def test_prompt_logprobs_compute_the_prompt_anew_and_once():
    driver = Driver()
    driver.submit(1, PROMPT)
    driver.run()
    driver.submit(2, PROMPT, prompt_logprobs=1)
    driver.run()
    assert driver.finish(2).cached_tokens == 0
    (values,) = driver.seen[2].prompt_logprobs
    assert np.frombuffer(values.tokens, "<i4").tolist() == PROMPT[1:]


@pytest.mark.parametrize("caching", [True, False])
def test_choices_of_a_group_copy_the_partial_block(caching):
    driver = Driver(slots=4, cache={"prefix_caching": caching}, num_blocks=32)
    for choice in range(4):
        driver.submit(choice, PROMPT, choice=choice, group=7, max_tokens=6)
    driver.step()
    assert driver.core.stats.running == 1
    driver.step()
    plan = driver.executor.plans[-1]
    assert len(plan.copies) == 3
    assert len(set(plan.copies[:, 0].tolist())) == 1
    assert driver.core.stats.held_blocks == 3 + 4
    assert [int(plan.counts[list(plan.slots).index(one.slot)]) for one in plan.admitted] == [1, 1, 1]
    driver.run()
    for choice in range(4):
        assert driver.tokens(choice) == answer(choice=choice, max_tokens=6)[0]


def test_a_group_of_other_prompts_or_salts_is_no_group():
    driver = Driver()
    driver.submit(1, PROMPT, group=7)
    driver.submit(2, other(1), group=7)
    driver.submit(3, PROMPT, group=7, salt="x")
    driver.step()
    assert driver.core.stats.running == 3
    driver.run()
    assert driver.tokens(2) == answer(other(1))[0]
    assert not any(len(plan.copies) for plan in driver.executor.plans)


def test_resetting_the_prefix_cache_forgets_it():
    driver = Driver()
    driver.submit(1, PROMPT)
    driver.run()
    driver.core.handle(Control("reset_prefix_cache"))
    assert driver.step().stats.cached_blocks == 0
    driver.submit(2, PROMPT)
    driver.run()
    assert driver.finish(2).cached_tokens == 0


# ---------------------------------------------------------------------------------------------------- preemption


def crowded(**more):
    driver = Driver(num_blocks=8, slots=4, cache={"prefix_caching": False}, max_model_len=64, **more)
    for number in range(4):
        driver.submit(number, other(number, 9), max_tokens=40, arrival=float(number))
    return driver


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_preempted_requests_resume_exactly_and_not_too_often(depth, bound):
    driver = crowded(depth=depth, max_preemptions=bound)
    driver.run()
    for number in range(4):
        assert driver.tokens(number) == answer(other(number, 9), max_tokens=40)[0]
        assert driver.finish(number).preemptions <= bound
    assert (driver.core.stats.preemptions_total > 0) == (bound > 0)
    assert driver.finish(0).preemptions == 0


def test_the_least_important_is_preempted_first():
    driver = Driver(num_blocks=6, slots=2, policy="priority", cache={"prefix_caching": False})
    driver.submit(1, other(1, 15), max_tokens=20, priority=9)
    driver.step()
    driver.submit(2, other(2, 15), max_tokens=20, priority=1)
    driver.run()
    assert driver.finish(1).preemptions > 0
    assert driver.finish(2).preemptions == 0


def test_a_preempted_request_finds_its_own_blocks_again():
    driver = Driver(num_blocks=9, slots=2)
    driver.submit(1, other(1, 30), max_tokens=30, arrival=1.0)
    driver.submit(2, other(2, 24), max_tokens=10, arrival=2.0)
    driver.run()
    assert driver.finish(2).preemptions == 1
    assert driver.tokens(2) == answer(other(2, 24), max_tokens=10)[0]
    assert driver.executor.computed_tokens < (30 + 30) + 2 * (24 + 10)


def test_scores_of_a_preempted_prompt_are_reported_once():
    driver = Driver(num_blocks=7, slots=2, budget=3, cache={"prefix_caching": False})
    driver.submit(1, other(1, 3), max_tokens=20, arrival=1.0)
    driver.step()
    driver.submit(2, other(2, 38), max_tokens=2, prompt_logprobs=0, arrival=2.0)
    driver.run()
    assert driver.finish(2).preemptions == 1
    (values,) = driver.seen[2].prompt_logprobs
    assert np.frombuffer(values.tokens, "<i4").tolist() == other(2, 38)[1:]
