"""The fair policy: who is admitted, who computes, who gives way; and that it stays cheap and exact."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from helpers.engine_driver import Driver, submit
from helpers.fake_executor import VOCAB, FakeExecutor, alone
from noria.config import CacheOptions, SchedulerOptions
from noria.engine.core import EngineCore
from noria.engine.fair import Counters
from noria.errors import ConfigError
from noria.params import SamplingParams
from noria.plan import StepPlan, StepResult


def prompt(number, length=20):
    return [(number * 13 + 7 * position + 2) % VOCAB for position in range(length)]


class World(Driver):
    """Prompts of 20 tokens, by tenant."""

    def __init__(self, **more):
        super().__init__(**{"policy": "fair", "num_blocks": 400, "budget": 32, "max_model_len": 256} | more)
        self.of: dict[int, str] = {}

    def ask(self, tenant, count=1, length=20, **more):
        asked = []
        for _ in range(count):
            request_id = len(self.of) + 1
            self.of[request_id] = tenant
            self.submit(request_id, prompt(request_id, length), tenant=tenant, salt=tenant, **more)
            asked.append(request_id)
        return asked

    def tokens_of(self, tenant):
        return sum(len(seen.tokens) for request_id, seen in self.seen.items() if self.of[request_id] == tenant)

    def steps_until_first(self, request_id, most=100):
        for step in range(1, most):
            self.step()
            if request_id in self.seen and self.seen[request_id].tokens:
                return step
        raise AssertionError("no token came")

    def rows(self, tenant):
        plan = self.executor.plans[-1]
        return sum(
            int(count)
            for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)
            if self.core._scheduler.running.requests[slot] is not None
            and self.core._scheduler.running.requests[slot].tenant == tenant
        )


def test_within_one_tenant_it_is_the_order_of_priority_and_arrival():
    world = World(slots=1)
    late, early, urgent = 1, 2, 3
    for request_id, arrival, priority in ((late, 5.0, 1), (early, 3.0, 1), (urgent, 9.0, 0)):
        world.submit(request_id, prompt(request_id), arrival=arrival, priority=priority, max_tokens=1)
    world.run()
    assert list(world.seen) == [urgent, early, late]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_one_who_asks_now_and_then_is_not_behind_a_flood(policy):
    world = World(policy=policy, slots=4)
    world.ask("flood", 40, max_tokens=10)
    for _ in range(10):
        world.step()
    (quiet,) = world.ask("quiet", max_tokens=2)
    steps = world.steps_until_first(quiet)
    assert steps == 1 if policy == "fair" else steps > 20
    world.run()
    check(world, {"quiet": 2, "flood": 10})


def check(world, most):
    """Every answer is the one of the request alone."""
    for request_id, tenant in world.of.items():
        params = SamplingParams(max_tokens=most[tenant], seed=0)
        expected = alone(prompt(request_id), params, (), 0, 256)
        assert (world.tokens(request_id), world.finish(request_id).reason) == expected


def test_rows_far_ahead_skip_the_steps_of_a_prompt_of_one_far_behind():
    world = World(slots=8)
    world.ask("flood", 8, max_tokens=200)
    for _ in range(60):
        world.step()
    (quiet,) = world.ask("quiet", length=60, max_tokens=50)
    world.step()
    assert (world.rows("flood"), world.rows("quiet")) == (0, 32)
    assert world.core.stats.preemptions_total == 1  # there was no slot
    world.step()
    assert (world.rows("flood"), world.rows("quiet")) == (0, 28)
    assert len(world.tokens(quiet)) == 1
    world.step()
    assert (world.rows("flood"), world.rows("quiet")) == (7, 1)  # nobody waits for a first token any more
    world.run()


def test_who_has_no_blocks_gets_those_of_the_newest_of_one_far_ahead():
    world = World(slots=8, num_blocks=30, max_model_len=200)
    flood = world.ask("flood", 2, max_tokens=90)
    for _ in range(85):
        world.step()
    (quiet,) = world.ask("quiet", length=100, max_tokens=2)
    assert world.steps_until_first(quiet) == 4
    assert [one.id for one in world.core._scheduler.waiting] == [flood[1]]
    world.run()
    assert [world.finish(one).preemptions for one in flood] == [0, 1]


def test_who_did_not_fit_gets_room_once_the_others_are_far_ahead():
    world = World(slots=8, budget=256, num_blocks=80, max_model_len=640)
    flood = world.ask("flood", 2, length=100, max_tokens=200)
    world.step()
    (quiet,) = world.ask("quiet", length=500, max_tokens=2)
    assert world.steps_until_first(quiet) < 90
    world.run()
    assert [len(world.tokens(one)) for one in flood] == [200, 200]


def test_one_who_is_woken_when_another_gives_way_is_not_taken_for_the_next_in_line():
    """What the second tenant's first request waits for is given up for its third, which it goes before."""
    world = World(slots=3, max_model_len=512)
    world.ask("flood", max_tokens=200)
    for _ in range(90):
        world.step()
    shared = [Random(5).randrange(VOCAB) for _ in range(300)]
    world.submit(11, shared, max_tokens=5, tenant="flood", arrival=1.0)
    world.submit(12, prompt(6), max_tokens=5, tenant="flood", arrival=2.0)
    world.step()
    for request_id, words in ((21, [*shared[:299], 1]), (22, prompt(9, 5)), (23, prompt(10, 5))):
        world.submit(request_id, words, max_tokens=5, tenant="quiet", arrival=float(request_id))
    world.run()
    assert [len(world.tokens(one)) for one in (11, 12, 21, 22, 23)] == [5] * 5


def test_two_that_both_flood_get_the_same():
    world = World(slots=6)
    world.ask("one", 60, max_tokens=20)
    for _ in range(30):
        world.step()
    world.ask("two", 60, max_tokens=20)
    for _ in range(50):  # the second takes its slots from the first, and its credit
        world.step()
    one, two = world.tokens_of("one"), world.tokens_of("two")
    preempted = world.core.stats.preemptions_total
    for _ in range(150):
        world.step()
    assert 0.8 < (world.tokens_of("two") - two) / (world.tokens_of("one") - one) < 1.25
    assert world.core.stats.preemptions_total == preempted
    world.run()
    check(world, {"one": 20, "two": 20})


def test_a_share_of_three_gets_three_times_as_much():
    world = World(slots=8)
    world.ask("big", 100, max_tokens=20, share=3.0)
    world.ask("small", 100, max_tokens=20, share=1.0)
    for _ in range(200):
        world.step()
    assert 2.4 < world.tokens_of("big") / world.tokens_of("small") < 3.6


def test_nobody_starves_while_others_keep_coming():
    """A tenant that always has something new cannot keep another from its tokens, however small its requests."""
    world = World(slots=4)
    (long,) = world.ask("long", length=40, max_tokens=30)
    for _ in range(200):
        world.ask("many", 3, length=4, max_tokens=1)
        world.step()
    assert world.finish(long).reason == "length"


def test_time_away_is_worth_a_bounded_credit():
    world = World(slots=4)
    world.ask("flood", 100, max_tokens=20)
    for _ in range(200):
        world.step()
    world.ask("back", 100, max_tokens=20)
    before = world.tokens_of("flood")
    for _ in range(150):
        world.step()
    flood, back = world.tokens_of("flood") - before, world.tokens_of("back")
    assert flood > 0.5 * back


def test_a_flood_alone_uses_the_whole_budget_for_prompts():
    world = World(slots=4)
    world.ask("flood", 4, length=30, max_tokens=1)
    world.step()
    assert world.executor.plans[-1].tokens == 32


def test_while_others_are_about_prompts_fill_a_quarter_of_a_step():
    now = [100.0]
    world = World(slots=4, clock=lambda: now[0])
    world.ask("quiet", length=8, max_tokens=1)
    world.run()
    world.ask("flood", 4, length=30, max_tokens=4)
    world.step()
    assert world.executor.plans[-1].tokens == 8
    now[0] += 61.0
    world.step()
    assert world.executor.plans[-1].tokens == 32
    world.run()


def test_a_flood_that_came_long_ago_is_about_until_it_has_ended():
    now = [100.0]
    world = World(slots=4, clock=lambda: now[0])
    world.ask("flood", 8, max_tokens=200)
    for _ in range(100):
        world.step()
    world.ask("quiet", max_tokens=1)
    for _ in range(10):
        world.step()
    now[0] += 61.0
    (quiet,) = world.ask("quiet", max_tokens=1)
    assert world.steps_until_first(quiet) == 1
    world.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_that_cannot_be_used_is_given_to_the_others(depth):
    """The one far behind does not fit, and nobody may be preempted for it: the others go on."""
    world = World(slots=4, num_blocks=20, max_model_len=160, max_preemptions=0, depth=depth)
    (flood,) = world.ask("flood", max_tokens=130)
    for _ in range(100):
        world.step()
    (quiet,) = world.ask("quiet", length=100, max_tokens=2)
    world.run()
    assert len(world.tokens(flood)) == 130
    assert len(world.tokens(quiet)) == 2


def test_aborted_requests_of_a_tenant_are_no_burden():
    world = World(slots=2)
    asked = world.ask("flood", 500, max_tokens=4)
    world.step()
    world.abort(*asked[2:])
    world.ask("quiet", 2, max_tokens=4)
    world.run()
    assert len(world.core._scheduler.waiting._line) == 0


def test_static_batches_are_not_shared():
    with pytest.raises(ConfigError, match="--scheduling-policy"):
        SchedulerOptions(policy="fair", continuous=False)


def test_tenants_that_are_owed_nothing_are_forgotten():
    counters = Counters(credit=10.0)
    for number in range(5000):
        counters.prune()
        tenant = counters.number(f"key {number}")
        counters.come_back(tenant)
        counters.unfinished[tenant] += 1
        counters.served[tenant] += 100.0
        counters.leave(tenant)
    assert len(counters.numbers) < 2100
    assert len(set(counters.numbers.values())) == len(counters.numbers)
    assert len(counters.served) <= 4096
    assert np.all(counters.unfinished == 0)


# ------------------------------------------------------------------------------------------------- in virtual time


class Costly(FakeExecutor):
    """Steps cost time, as on a processor: so much for each prompt token and for each row that decodes."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4000, slots=64, max_model_len=1024, depth=1)
        self.now = 0.0
        self._cost = 0.0

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        decoding = int((plan.counts == 1).sum())
        self._cost = 0.002 + 0.0003 * decoding + 0.0002 * (plan.tokens - decoding)
        sampled = plan.slots[plan.sample]
        self.results.append(StepResult(plan.step, sampled, np.ones(len(sampled), np.int32)))

    def collect(self) -> StepResult:
        self.now += self._cost
        return self.results.popleft()


def first_tokens(policy: str, flood: int) -> list[float]:
    """Seconds until a caller who asks every half second has its first token, beside a flood of so many callers."""
    executor = Costly()
    options = SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=512, in_flight_depth=1, policy=policy)
    core = EngineCore(executor, CacheOptions(block_size=8), options, clock=lambda: executor.now)
    random, asked, waits = Random(0), {}, []

    def ask(tenant: str, at: float, length: int, output: int) -> None:
        words = [random.randrange(VOCAB) for _ in range(length)]
        request_id = len(asked) + 1
        asked[request_id] = (tenant, at)
        core.handle(submit(request_id, words, max_tokens=output, tenant=tenant, salt=tenant, arrival=at))

    for _ in range(flood):
        ask("flood", 0.0, 300, random.randint(40, 120))
    due = 3.0
    while executor.now < 15.0:
        if executor.now >= due:
            ask("quiet", due, 400, 5)
            due += 0.4 + 0.2 * random.random()
        if not core.has_work:
            executor.now = due
            continue
        outputs = core.step()
        if outputs is None:
            continue
        for request_id in np.frombuffer(outputs.request_ids, "<i8").tolist():
            tenant, at = asked[request_id]
            if tenant == "quiet" and at >= 0.0:
                waits.append(executor.now - at)
            asked[request_id] = (tenant, -1.0)
        for _ in outputs.finished:
            if len(core._scheduler.requests) < flood:
                ask("flood", executor.now, 300, random.randint(40, 120))
    return sorted(waits[1:])  # before the first, nobody but the flood was about, and its steps were full ones


def test_beside_a_flood_a_first_token_takes_at_most_twice_as_long_as_alone() -> None:
    alone_, fair, fcfs = (first_tokens(*how) for how in (("fair", 0), ("fair", 100), ("fcfs", 100)))
    assert len(alone_) > 15
    assert len(fair) > 15
    middle, worst = alone_[len(alone_) // 2], alone_[-1]
    assert fair[len(fair) // 2] < 1.6 * middle
    assert fair[-1] < 2.0 * worst
    assert fcfs[len(fcfs) // 2] > 5.0 * middle
