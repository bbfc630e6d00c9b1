"""All that may delay, refuse or divide work at once, in virtual time: nobody waits for ever, and no answer changes."""

from __future__ import annotations

import math
from concurrent.futures import Future
from itertools import pairwise
from random import Random

import pytest

from helpers.engine_driver import Driver
from helpers.fake_executor import alone
from helpers.pacing import Clock, Told, make_monitor, make_pacer
from noria.config import PacerOptions
from noria.errors import GrammarError
from noria.messages import Explain
from noria.pacer.base import Sizes
from noria.pacer.start import make_gate
from noria.params import SamplingParams

STEP = 1 / 16  # seconds of a step; sums of such are exact
REQUESTS = 24


class World:
    """An engine whose loop is driven as its process does, with a clock that only steps and sleep move on."""

    def __init__(self, random: Random) -> None:
        self.random, self.clock = random, Clock()
        policy = random.choice(["fcfs", "priority", "fair"])
        continuous = policy == "fair" or random.random() < 0.85
        slots, budget = random.randint(1, 8), random.choice([1, 2, 5, 9, 20, 64])
        self.told = Told(Sizes(slots, budget))
        pacer = make_pacer(Sizes(slots, budget), self.told, monitor=make_monitor(), smoothing_factor=0.0)
        tpot = random.choice([None, 200.0])
        objectives = PacerOptions(admission="slo", slo_ttft_ms=random.choice([300.0, 3000.0]), slo_tpot_ms=tpot)
        self.driver = Driver(
            clock=self.clock,
            pacer=pacer if continuous and random.random() < 0.8 else None,
            gate=make_gate(objectives, None, wall=self.clock) if random.random() < 0.5 else None,
            cache={"layout": random.choice(["paged", "paged", "contiguous"]), "prefix_caching": random.random() < 0.7},
            num_blocks=random.randint(8, 16),
            depth=random.choice([None, 1, 2]),
            slots=slots,
            budget=budget,
            policy=policy,
            continuous=continuous,
            static_timeout=random.choice([0.0, 0.5]),
            build_interval=random.choice([0.0, 0.0, 0.2, 1.5]),
            fusion=random.random() < 0.5,
            prefetch=random.random() < 0.5,
            max_preemptions=random.randint(0, 3),
        )
        collect = self.driver.executor.collect

        def slowly():
            self.clock.now += STEP
            return collect()

        self.driver.executor.collect = slowly
        self.grammars: list[tuple[float, Future[str], bool]] = []  # when each is to be ready, and whether it is good

    @property
    def core(self):
        return self.driver.core

    def grammar(self, number: int) -> str:
        """One that takes a while to be compiled, and may turn out to be bad."""
        name, future = f"grammar {number}", Future()
        self.driver.executor.compiling[name] = future
        self.grammars.append((self.clock.now + self.random.choice([0.0, 0.1, 2.0]), future, self.random.random() < 0.8))
        return name

    def turn(self, until: float) -> None:
        """A turn of the loop, which sleeps when there is nothing to do, but not beyond `until` (inf: no limit)."""
        for ready, future, good in self.grammars:
            if ready <= self.clock.now and not future.done():
                future.set_result("good") if good else future.set_exception(GrammarError("the grammar is bad"))
        self.told.sizes = Sizes(self.random.randint(1, 9), self.random.choice([1, 3, 10, 64]))
        pause = self.core.idle_seconds if self.core.has_work else math.inf
        if pause > 0.0 and self.clock.now < until:
            assert min(pause, until - self.clock.now) < math.inf, "it would sleep for ever"
            self.clock.now = min(self.clock.now + pause, until)
        if self.core.has_work:
            self.driver.step()
            if self.core.may_launch:
                self.core.launch()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_together(seed):
    random = Random(seed)
    world = World(random)
    driver, core, wanted, aborted = world.driver, world.core, {}, set()
    due = 0.0
    for number in range(1, REQUESTS + 1):
        prompt = [random.randrange(3)] * random.choice([1, 8, 9, 17, 30])
        grammar = world.grammar(number) if random.random() < 0.3 else None
        params = SamplingParams(max_tokens=random.choice([1, 4, 15, 30]), seed=0, grammar=grammar)
        output, _ = alone(prompt, params, (), 0, core.info.max_model_len)
        received = output[:-1][: random.choice([0, 0, 0, 3])]
        wanted[number] = output[len(received) :]
        driver.submit(
            number,
            prompt,
            received=received,
            max_tokens=params.max_tokens,
            grammar=grammar,
            arrival=world.clock.now,
            priority=random.randrange(3),
            tenant=random.choice(["", "a", "b"]),
            group=random.choice([0, 0, 5]),
            sheddable=random.random() < 0.7,
        )
        due += random.choice([0.0, 0.0, 0.05, 0.4, 3.0])
        while world.clock.now < due:
            world.turn(due)
        if random.random() < 0.15:
            one = random.randint(1, number)
            if not (one in driver.seen and driver.seen[one].finished):
                driver.abort(one)
                aborted.add(one)
    for _ in range(5000):
        if not core.has_work:
            break
        world.turn(max([world.clock.now + 1.0, *(ready for ready, _, _ in world.grammars)]))
    assert not core.has_work, f"requests are starving: {list(core._scheduler.requests)}"
    for number, tokens in wanted.items():
        check(world, number, None if number in aborted else tokens)
    check_nothing_is_left(core)


def check(world: World, number: int, tokens: list[int] | None) -> None:
    """That a request was answered, or refused before it had begun; and that its time is told without a gap."""
    driver = world.driver
    if tokens is not None:
        end, seen = driver.finish(number), driver.seen[number]
        if end.shed is not None:
            assert not seen.tokens
            assert not seen.started
        elif end.reason == "error":
            assert end.message == "the grammar is bad"
            assert not seen.tokens
        else:
            assert seen.tokens == tokens
    driver.core.handle(Explain(1, number))
    (told,) = driver.core._outputs.answers
    driver.core._outputs.answers.clear()
    assert told.ended is not None
    edges = [(phase.start, phase.end) for phase in told.phases]
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert math.isclose(sum(end - start for start, end in edges), told.ended - told.submitted, abs_tol=1e-9)


def check_nothing_is_left(core) -> None:
    stats = core.stats
    assert (stats.running, stats.waiting, stats.held_blocks) == (0, 0, 0)
    assert core._history.unfinished == 0
    assert not core._history.ring._flying
    assert not core._scheduler.waiting.parked
    if core._shedding is not None:
        assert core._shedding._ahead.all[:2] == (0, 0.0)
        assert core._shedding._under_way == 0
