"""The engine's behaviour, step by step, over an executor that holds plans to the contract."""

from __future__ import annotations

import time

import numpy as np
import pytest

from helpers.engine_driver import Driver, ids
from helpers.fake_executor import VOCAB, alone
from noria.config import CacheOptions, SchedulerOptions
from noria.engine.core import EngineCore
from noria.errors import EngineError
from noria.messages import Control, Submit, build_id
from noria.params import SamplingParams

PROMPT = [(5 * position + 1) % VOCAB for position in range(29)]


def answer(prompt=PROMPT, *, stop_ids=(), choice=0, most=64, received=(), **params):
    return alone(prompt, SamplingParams(**{"max_tokens": 4, "seed": 0} | params), stop_ids, choice, most, received)


def other(number, length=20):
    return [(number * 13 + 7 * position + 2) % VOCAB for position in range(length)]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


# ---------------------------------------------------------------------------------------------------- ends


def test_the_first_token_comes_with_the_step_that_computes_the_prompt():
    driver = Driver()
    driver.submit(1, PROMPT)
    outputs = driver.step()
    assert driver.tokens(1) == answer()[0][:1]
    assert [started.request_id for started in outputs.started] == [1]
    driver.run()
    assert driver.tokens(1) == answer()[0]
    assert driver.finish(1).reason == "length"
    assert driver.steps == 4


def test_a_stop_id_ends_and_is_the_last_token():
    output, _ = answer(max_tokens=10)
    stop = output[3]
    driver = Driver()
    driver.submit(1, PROMPT, max_tokens=10, stop_ids=[stop])
    driver.run()
    assert driver.tokens(1) == output[: output.index(stop) + 1]
    assert (driver.finish(1).reason, driver.finish(1).stop_id) == ("stop", stop)


def test_stop_ids_do_not_count_before_min_tokens():
    everything = list(range(VOCAB // 2))
    driver = Driver()
    driver.submit(1, PROMPT, max_tokens=12, min_tokens=6, stop_ids=everything)
    driver.run()
    assert len(driver.tokens(1)) > 6
    assert driver.tokens(1) == answer(max_tokens=12, min_tokens=6, stop_ids=everything)[0]


def test_the_context_ends_what_max_tokens_does_not():
    driver = Driver(max_model_len=32)
    driver.submit(1, PROMPT, max_tokens=None)
    driver.submit(2, PROMPT, max_tokens=100)
    driver.run()
    for request_id in (1, 2):
        assert len(driver.tokens(request_id)) == 3
        assert driver.finish(request_id).reason == "length"


def test_a_small_cache_shortens_the_context():
    driver = Driver(num_blocks=4, max_model_len=64)
    assert driver.core.info.max_model_len == 32
    driver.submit(1, PROMPT, max_tokens=100)
    driver.run()
    assert len(driver.tokens(1)) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1] * 64, "no room"), ([VOCAB], "vocabulary"), ([-1], "vocabulary")],
)
def test_what_can_never_run_is_refused_at_the_door(prompt, message):
    driver = Driver()
    driver.submit(1, prompt)
    assert driver.core.has_work
    driver.step()
    assert driver.finish(1).reason == "error"
    assert message in driver.finish(1).message
    assert not driver.core.has_work
    assert not driver.executor.plans


def test_a_bias_outside_the_vocabulary_is_refused_and_a_stop_id_is_dropped():
    driver = Driver()
    driver.submit(1, PROMPT, logit_bias={VOCAB: 1.0})
    driver.submit(2, PROMPT, stop_ids=[VOCAB, -1])
    driver.run()
    assert "logit_bias" in driver.finish(1).message
    assert driver.executor.plans[0].admitted[0].stop_ids == ()


def test_scoring_a_prompt_ends_without_a_token():
    driver = Driver(budget=10)
    driver.submit(1, PROMPT, max_tokens=0, prompt_logprobs=2)
    driver.submit(2, [5], max_tokens=0, prompt_logprobs=0)
    driver.run()
    assert driver.finish(1).reason == driver.finish(2).reason == "length"
    assert driver.tokens(1) == []
    assert not any(plan.sample.any() for plan in driver.executor.plans)
    (values,) = driver.seen[1].prompt_logprobs
    assert np.frombuffer(values.tokens, "<i4").tolist() == PROMPT[1:]
    assert np.frombuffer(values.top_ids, "<i4").reshape(-1, 2).tolist() == [[0, 1]] * 28
    (nothing,) = driver.seen[2].prompt_logprobs
    assert nothing.tokens == b""


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_prompt_logprobs_come_with_a_first_token_that_was_under_way_at_the_preemption(wanted):
    driver = Driver(num_blocks=7, depth=2)
    for request_id in (1, 2):  # both will need a block more, and there is one
        driver.submit(request_id, other(request_id, 16), max_tokens=12, arrival=float(request_id))
    driver.submit(3, PROMPT[:9], max_tokens=wanted, prompt_logprobs=0, arrival=3.0)
    while 3 not in driver.seen or not (driver.seen[3].tokens or driver.seen[3].finished):
        driver.step()
    assert driver.core.stats.preemptions_total == 1
    (values,) = driver.seen[3].prompt_logprobs
    assert np.frombuffer(values.tokens, "<i4").tolist() == PROMPT[1:9]
    driver.run()
    assert len(driver.tokens(3)) == wanted
    assert len(driver.seen[3].prompt_logprobs) == 1


def test_logprobs_are_reported_for_those_who_asked():
    driver = Driver()
    driver.submit(1, PROMPT, logprobs=2)
    driver.submit(2, PROMPT)
    driver.run()
    np.testing.assert_allclose(driver.seen[1].logprobs, [-token / 10 for token in driver.tokens(1)], rtol=1e-6)
    assert driver.seen[2].logprobs == []


# ---------------------------------------------------------------------------------------------------- batching


def test_a_long_prompt_is_cut_to_the_budget_and_delays_no_decode():
    driver = Driver(budget=8)
    driver.submit(1, [1, 2, 3], max_tokens=12)
    driver.step()
    driver.submit(2, PROMPT)
    counts = []
    for _ in range(5):
        driver.step()
        plan = driver.executor.plans[-1]
        counts.append(dict(zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)))
    assert counts == [{0: 1, 1: 7}] * 4 + [{0: 1, 1: 1}]
    assert len(driver.tokens(1)) == 6
    assert driver.tokens(2) == answer()[0][:1]


def test_requests_join_and_leave_at_every_step():
    driver = Driver(slots=2)
    driver.submit(1, other(1), max_tokens=2)
    driver.submit(2, other(2), max_tokens=5)
    driver.submit(3, other(3), max_tokens=2)
    driver.step()
    assert (driver.core.stats.running, driver.core.stats.waiting) == (2, 1)
    driver.step()
    assert driver.finish(1)
    driver.step()
    assert len(driver.tokens(3)) == 1
    assert len(driver.tokens(2)) == 3


def test_priority_decides_who_is_admitted():
    driver = Driver(slots=1, policy="priority")
    for request_id, importance in ((1, 5), (2, 0), (3, 2)):
        driver.submit(request_id, other(request_id), max_tokens=1, priority=importance)
    ends = [end.request_id for _ in range(3) for end in driver.step().finished]
    assert ends == [2, 3, 1]


def test_the_first_in_line_is_not_overtaken_for_lack_of_blocks():
    driver = Driver(num_blocks=8, slots=4)
    driver.submit(1, other(1, 40), max_tokens=6, arrival=1.0)
    driver.submit(2, other(2, 40), max_tokens=2, arrival=2.0)
    driver.submit(3, [1], max_tokens=1, arrival=3.0)
    for _ in range(6):
        driver.step()
        assert sorted(driver.seen) == [1]
    driver.run()
    assert {driver.finish(number).reason for number in (1, 2, 3)} == {"length"}


def test_a_static_batch_waits_for_its_timeout_and_runs_to_its_end():
    clock = Clock()
    driver = Driver(slots=3, continuous=False, static_timeout=2.0, clock=clock)
    driver.submit(1, other(1), max_tokens=1)
    driver.submit(2, other(2), max_tokens=4)
    assert driver.step() is None
    assert driver.core.has_work
    assert driver.core.idle_seconds == 2.0
    clock.now += 2.0
    assert driver.core.idle_seconds == 0.0
    driver.step()
    assert driver.finish(1)
    driver.submit(3, other(3), max_tokens=1)
    for _ in range(3):
        assert driver.core.stats.waiting == 1
        driver.step()
    assert driver.finish(2)
    clock.now += 2.0
    driver.run()
    assert driver.finish(3).reason == "length"


def test_a_full_static_batch_does_not_wait():
    driver = Driver(slots=2, continuous=False, static_timeout=3600.0)
    for number in (1, 2, 3):
        driver.submit(number, other(number), max_tokens=2)
    driver.step()
    assert driver.core.stats.running == 2
    driver.step()
    assert driver.finish(1)
    assert driver.core.idle_seconds > 1000


def test_requests_that_wait_cost_a_step_nothing():
    def milliseconds(waiting):
        driver = Driver(slots=16, num_blocks=128, clock=time.thread_time)
        for number in range(16 + waiting):
            driver.submit(number, other(number, 8), max_tokens=50)
        costs = []
        for _ in range(40):
            before = driver.core.stats.plan_seconds_total
            driver.core.step()
            costs.append(driver.core.stats.plan_seconds_total - before)
        assert driver.core.stats.waiting == waiting
        return 1e3 * float(np.median(costs))

    assert milliseconds(3000) < 3 * milliseconds(10)


@pytest.mark.parametrize("depth", [1, 2])
def test_only_a_step_of_another_thread_is_launched_ahead(depth):
    driver = Driver(depth=depth)
    driver.submit(1, PROMPT, max_tokens=1)
    driver.run()
    assert not driver.core.may_launch
    driver.submit(2, PROMPT)
    assert driver.core.may_launch == (depth > 1)
    driver.core.launch()
    assert len(driver.executor.results) == depth - 1
    assert not driver.core.may_launch
    driver.run()
    assert driver.tokens(2) == answer()[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_which_nothing_changes_are_marked_as_repeats(depth):
    driver = Driver(depth=depth)
    driver.submit(1, PROMPT, max_tokens=14)
    driver.step()
    driver.submit(2, PROMPT[:5], max_tokens=4)
    driver.run()
    # 29 tokens, then 5 more: only within blocks of 8, and not where one comes or goes.
    alone = [int(plan.starts[0]) for plan in driver.executor.plans if plan.repeats and len(plan.slots) == 1]
    assert alone
    assert all(start % 8 not in (0, 7) for start in alone)
    assert driver.tokens(1) == answer(max_tokens=14)[0]
    assert driver.tokens(2) == answer(PROMPT[:5])[0]


def test_depth_2_plans_ahead_and_drops_what_a_stop_made_needless():
    output, _ = answer(max_tokens=10)
    driver = Driver(depth=2)
    driver.submit(1, PROMPT, max_tokens=10, stop_ids=[output[2]])
    assert driver.step() is not None
    assert driver.executor.results
    driver.run()
    assert driver.tokens(1) == output[: output.index(output[2]) + 1]
    assert len(driver.executor.plans) == len(driver.tokens(1)) + 1
    known_end = Driver(depth=2)
    known_end.submit(1, PROMPT, max_tokens=3)
    known_end.run()
    assert len(known_end.executor.plans) == 3


# ---------------------------------------------------------------------------------------------------- life and death


def test_a_resumed_request_goes_on_where_it_was():
    output, reason = answer(max_tokens=9, min_tokens=3)
    driver = Driver()
    driver.submit(1, PROMPT, received=output[:5], max_tokens=9, min_tokens=3, prompt_logprobs=1)
    driver.run()
    assert driver.tokens(1) == output[5:]
    assert driver.finish(1).reason == reason
    assert not driver.seen[1].prompt_logprobs
    admission = driver.executor.plans[0].admitted[0]
    assert admission.token_ids.tolist() == PROMPT + output[:5]
    assert admission.prompt_length == len(PROMPT)


def test_a_request_that_was_at_its_end_ends_at_once():
    output, _ = answer()
    driver = Driver()
    driver.submit(1, PROMPT, received=output)
    driver.submit(2, PROMPT, received=output[:2], stop_ids=[output[1]])
    driver.step()
    assert driver.finish(1).reason == "length"
    assert (driver.finish(2).reason, driver.finish(2).stop_id) == ("stop", output[1])
    assert not driver.executor.plans


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_leaves_nothing_behind(depth):
    driver = Driver(depth=depth, cache={"prefix_caching": False})
    for number in (1, 2, 3, 4, 5):
        driver.submit(number, other(number), max_tokens=20)
    for _ in range(3):
        driver.step()
    driver.abort(1, 2, 3, 5, 77)
    outputs = driver.step()
    assert outputs.stats.waiting == 0
    assert driver.core.stats.held_blocks == 3
    seen = len(driver.tokens(1))
    driver.run()
    assert driver.core.stats.held_blocks == 0
    assert len(driver.tokens(1)) == seen
    assert driver.finish(4).reason == "length"
    assert not any(driver.seen[number].finished for number in (1, 2, 3))
    assert 5 not in driver.seen


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_within_a_prompt_frees_its_blocks_within_two_steps(depth):
    driver = Driver(depth=depth, budget=8, cache={"prefix_caching": False})
    driver.submit(1, [number % 7 for number in range(60)], max_tokens=5)
    driver.submit(2, PROMPT, max_tokens=30)
    driver.step()
    assert not driver.core.has_work or driver.core.stats.held_blocks >= 8
    driver.abort(1)
    driver.step()
    driver.step()
    assert driver.core.stats.held_blocks <= len(PROMPT) // 8 + 2
    driver.run()
    assert driver.core.stats.held_blocks == 0
    assert 1 not in driver.seen or not driver.tokens(1)
    assert driver.finish(2).reason == "length"


def test_an_abort_alone_is_answered_with_statistics():
    driver = Driver()
    driver.submit(1, PROMPT, max_tokens=20)
    driver.step()
    driver.abort(1)
    assert driver.core.has_work
    assert driver.step().stats.running == 0
    assert not driver.core.has_work


def test_an_abort_takes_back_a_refusal_that_was_not_told_yet():
    driver = Driver()
    driver.submit(1, [])
    driver.abort(1)
    driver.step()
    assert 1 not in driver.seen


def test_statistics_are_given_when_asked_for():
    driver = Driver()
    driver.core.handle(Control("stats"))
    outputs = driver.step()
    assert outputs.request_ids == b""
    assert outputs.stats.total_blocks == 32
    driver.submit(1, PROMPT)
    driver.run()
    stats = driver.core.stats
    assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.steps_total) == (29, 4, 4)


def test_a_second_submission_under_one_id_is_ignored():
    driver = Driver()
    driver.submit(1, PROMPT)
    driver.submit(1, other(3))
    driver.run()
    assert driver.tokens(1) == answer()[0]


def test_a_failed_step_surfaces():
    driver = Driver()
    driver.executor.fail_at = 2
    driver.submit(1, PROMPT)
    driver.step()
    with pytest.raises(EngineError, match=r"step 2 failed: the device caught fire"):
        driver.step()


def test_times_are_since_the_arrival_at_the_engine():
    clock = Clock()
    driver = Driver(clock=clock, slots=1)
    driver.submit(1, PROMPT, max_tokens=1)
    driver.submit(2, other(2), max_tokens=1)
    driver.step()
    clock.now += 3.0
    driver.step()
    assert driver.finish(1).queued_seconds == 0.0
    assert driver.finish(2).queued_seconds == 3.0


def test_the_engine_introduces_itself():
    info = Driver(slots=4, budget=64, num_blocks=16).core.info
    assert info.build_id == build_id()
    assert (info.num_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens) == (16, 8, 4, 64)


def test_blocks_of_another_size_than_the_workers_are_refused():
    executor = Driver().executor
    with pytest.raises(EngineError, match="16"):
        EngineCore(executor, CacheOptions(block_size=16), SchedulerOptions())


def test_columns_are_read_as_little_endian():
    driver = Driver()
    message = Submit(request_id=2**40, prompt_ids=ids(PROMPT), params=SamplingParams(max_tokens=1, seed=0))
    driver.core.handle(message)
    outputs = driver.step()
    assert outputs.request_ids == (2**40).to_bytes(8, "little")
    assert outputs.tokens == answer()[0][0].to_bytes(4, "little")


def test_steps_of_many_rows_are_planned_ahead_and_small_ones_are_not():
    driver, depths = Driver(slots=20, depth=None, num_blocks=200), []
    collect = driver.executor.collect

    def watched():
        depths.append((len(driver.executor.results), len(driver.executor.results[0].slots)))
        return collect()

    driver.executor.collect = watched
    asked = {number: (other(number, 3 + number % 5), 4 if number < 17 else 12) for number in range(20)}
    for number, (prompt, length) in asked.items():
        driver.submit(number, prompt, max_tokens=length, logprobs=1)
    driver.run()
    assert {held for held, rows in depths if rows >= 17} == {2}
    assert {held for held, rows in depths[-6:]} == {1}  # the three longest are left
    for number, (prompt, length) in asked.items():
        expected, reason = answer(prompt, max_tokens=length)
        assert (driver.tokens(number), driver.finish(number).reason) == (expected, reason)
        # One to each token: results of two steps never share a message.
        assert driver.seen[number].logprobs == pytest.approx([-token / 10 for token in expected])


def test_a_step_is_not_planned_long_before_it_can_run():
    """Who arrives while a step runs is part of the next one, unless that had to be planned already."""
    clock = Clock()
    driver = Driver(slots=20, depth=None, num_blocks=200, clock=clock)
    collect = driver.executor.collect

    def slow():
        clock.now += 0.04
        return collect()

    driver.executor.collect = slow
    for number in range(20):
        driver.submit(number, other(number, 3), max_tokens=10)
    for _ in range(7):
        driver.step()
    assert len(driver.executor.results) == 1  # one runs
    assert driver.core.idle_seconds == pytest.approx(0.7 * 0.04)
    clock.now += 0.02
    assert driver.core.idle_seconds == pytest.approx(0.7 * 0.04 - 0.02)
    driver.abort(3)  # to be said at once
    assert driver.core.idle_seconds == 0
    driver.step()
    clock.now += 0.03
    assert driver.core.idle_seconds == 0
    driver.run()
