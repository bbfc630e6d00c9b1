"""What each key of a configuration file does to the pacer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helpers.configured import Configured, Set, shows
from helpers.fake_executor import FakeExecutor
from helpers.overload import World, poisson
from helpers.pacing import Clock
from noria.pacer.base import Decision, Load, Sizes, StepShape
from noria.pacer.monitor import Census
from noria.pacer.pacer import Pacer
from noria.pacer.start import make_pacer

_BATCHING = "continuous_batching."
_LOAD, _ADAPTIVE = f"{_BATCHING}dynamic_load_monitoring.", f"{_BATCHING}adaptive_batch_size."
CAPACITY = 12.9  # requests per second that an engine of `World` can answer
BUSY = Load(running=64, device=0.95, memory=0.1)
ASKED = Load(running=20, waiting=10, device=0.1, memory=0.1, mean_prompt=50, mean_output=50)
LONG = Load(running=20, waiting=10, device=0.1, memory=0.1, mean_prompt=20, mean_output=200)


@dataclass
class Still:
    """A monitor that measures what it is told."""

    measured: Load
    due: float = float("inf")

    def sample(self, census: Census, now: float) -> None:
        pass

    def load(self, census: Census, now: float) -> Load:
        return self.measured

    def stepped(self, shape: StepShape, now: float) -> None:
        pass

    def arrived(self, prompt: int, now: float) -> None:
        pass

    def ended(self, count: int, tokens: int) -> None:
        pass


class Paced:
    """A pacer as an engine would have it, in a time of its own. `load`: what is measured; None: what there is."""

    def __init__(self, set_: Set, value: Any, load: Load | None = None, **beside: Any) -> None:
        beside = {"max_num_seqs": 256} | beside
        if not set_.path.endswith("adjustment_interval"):
            beside["adjustment_interval"] = 0.125  # which floats hold exactly
        self.options = options = set_.engine(value, **beside)
        self.clock = Clock()
        made = make_pacer(options, FakeExecutor(slots=options.scheduler.max_num_seqs).info, self.clock)
        assert made is not None
        self.pacer: Pacer = made
        if load is not None:
            self.measure(load)

    def measure(self, load: Load) -> None:
        self.pacer.monitor = Still(load)

    def run(self, seconds: float, every: float = 0.125) -> Decision:
        """Turns so often for so long; returns the last decision."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.sizes: Sizes = self.pacer.turn(Census(), self.clock.now)
            self.clock.now += every
        return self.pacer.decisions[-1]

    def learn(self, steps: int = 400) -> None:
        """Steps of all sizes: ten milliseconds, a tenth for each row and a fiftieth for each token of a prompt. Some of
        them take longer."""
        for number in range(steps):
            rows, tokens = 1 + number * 37 % 256, 64 * (number % 5 == 0)
            shape = StepShape(rows, 80 * rows, 1 if tokens else 0, tokens, tokens * tokens // 2)
            longer = 1.0 + 0.05 * (number % 4)
            self.pacer.stepped(shape, longer * (0.01 + 0.0001 * rows + 0.00002 * tokens), 0.05 * number)


RULES = {"batch_size_predictor": "rules", "smoothing_factor": 0.0}


def by_rules(set_: Set, value: Any, load: Load, **beside: Any) -> Decision:
    """What rules say to a load once the batch is small."""
    paced = Paced(set_, value, BUSY, **{"batch_size_predictor": "rules", "smoothing_factor": 0.0} | beside)
    paced.run(1.0)
    paced.measure(load)
    return paced.run(0.125)


def factor(decision: Decision) -> float:
    return decision.prediction.sizes.batch / decision.before.batch


@shows(f"{_BATCHING}min_batch_size")
def the_batch_is_never_smaller(set_: Set) -> None:
    for least in (1, 24):
        paced = Paced(set_, least, BUSY, **RULES)
        paced.run(30.0)
        assert paced.sizes.batch == least


# ------------------------------------------------------------------------------------------------ load


@shows(f"{_LOAD}enabled")
def load_is_measured(set_: Set) -> None:
    paced = Paced(set_, True, **RULES)
    paced.run(1.0)
    assert len(paced.pacer.monitor.history) > 0
    assert len(paced.pacer.decisions) > 0
    options = set_.engine(False)
    assert make_pacer(options, FakeExecutor(slots=4).info, Clock()) is None


@shows(f"{_LOAD}monitoring_interval")
def so_often(set_: Set) -> None:
    samples = {}
    for value in (0.125, 0.5):
        paced = Paced(set_, value, **RULES)
        paced.run(4.0, every=0.0625)
        samples[value] = len(paced.pacer.monitor.history)
    assert samples == {0.125: 32, 0.5: 8}


@shows(f"{_LOAD}gpu_util_threshold")
def a_full_device_lets_the_batch_not_grow(set_: Set) -> None:
    load = Load(running=20, waiting=50, device=0.7, memory=0.1)
    found = {value: by_rules(set_, value, load) for value in (0.6, 0.8)}
    assert [decision.reached for decision in found.values()] == [("device",), ()]
    assert factor(found[0.6]) < 1.0 < factor(found[0.8])


@shows(f"{_LOAD}memory_util_threshold")
def full_memory_lets_the_batch_not_grow(set_: Set) -> None:
    load = Load(running=20, waiting=50, device=0.1, memory=0.7)
    found = {value: by_rules(set_, value, load) for value in (0.6, 0.8)}
    assert [decision.reached for decision in found.values()] == [("memory",), ()]
    assert factor(found[0.6]) < 1.0 < factor(found[0.8])


# ------------------------------------------------------------------------------------------------ decisions


@shows(f"{_ADAPTIVE}enabled")
def sizes_change(set_: Set) -> None:
    rows = {}
    for value in (True, False):
        paced = Paced(set_, value, BUSY, max_num_seqs=16, **RULES)
        driver = Configured(paced.options, clock=paced.clock, pacer=paced.pacer)
        for number in range(100):
            driver.submit(number, [number % 60], max_tokens=5)
        while driver.core.has_work:
            driver.step()
            paced.clock.now += 0.125
        assert max(driver.rows()) == 16
        rows[value] = driver.rows()[-30:][:20]
    assert set(rows[True]) == {1}  # the device is full, and stays so
    assert min(rows[False]) >= 8


@shows(f"{_ADAPTIVE}adjustment_interval")
def decisions_are_so_far_apart(set_: Set) -> None:
    decisions = {}
    for value in (0.125, 0.5):
        paced = Paced(set_, value, BUSY, **RULES)
        decisions[value] = paced.run(4.0, every=0.0625).number
    assert decisions == {0.125: 32, 0.5: 8}


@shows(f"{_ADAPTIVE}use_ml_model")
def who_predicts(set_: Set) -> None:
    for value, who in ((True, "learned"), (False, "rules")):
        paced = Paced(set_, value, ASKED)
        paced.learn()
        assert paced.run(0.125).predictor == who


@shows(f"{_ADAPTIVE}smoothing_factor")
def how_fast_it_follows(set_: Set) -> None:
    first = {}
    for value in (0.0, 0.75):
        paced = Paced(set_, value, BUSY, batch_size_predictor="rules")
        paced.run(4.0)
        first[value] = next(one for one in paced.pacer.decisions if one.after != one.before)
    target = first[0.0].prediction.sizes.batch
    assert first[0.0].before.batch == first[0.75].before.batch == 256
    assert first[0.0].after.batch == target
    assert first[0.75].after.batch == round(0.75 * 256 + 0.25 * target)


def learned_size(set_: Set, value: Any, **beside: Any) -> Sizes:
    """What the learned predictor names."""
    paced = Paced(set_, value, LONG, **beside)
    paced.learn()
    return paced.run(0.125).prediction.sizes


@shows(f"{_ADAPTIVE}slo_tpot_ms")
def a_further_token_takes_no_longer(set_: Set) -> None:
    free, slow, fast = (learned_size(set_, value) for value in (None, 25.0, 18.0))
    assert free.batch > slow.batch > fast.batch
    assert 0.01 + 0.0001 * fast.batch < 0.018


@shows(f"{_ADAPTIVE}slo_ttft_ms")
def the_first_token_comes_no_later(set_: Set) -> None:
    free, slow, fast = (learned_size(set_, value) for value in (None, 50.0, 25.0))
    assert free.batch > slow.batch > fast.batch


@shows(f"{_ADAPTIVE}slo_percentile")
def for_so_many_requests(set_: Set) -> None:
    few, many = (learned_size(set_, value, slo_ttft_ms=50.0) for value in (50.0, 99.0))
    assert few.batch > many.batch


@shows(f"{_ADAPTIVE}admission")
def what_cannot_meet_its_objective_is_refused(set_: Set) -> None:
    good = {}
    for value in ("all", "slo"):
        world = World(options=set_.engine(value, slo_ttft_ms=1000.0).pacer)
        world.run(poisson(2 * CAPACITY), 8.0)
        assert all(one.taken for one in world.asked) is (value == "all")
        good[value] = sum(one.taken and one.ttft <= 1.0 for one in world.asked)
    assert good["slo"] > 2 * good["all"]


# ------------------------------------------------------------------------------------------------ rules


def rule(name: str) -> Any:
    return shows(f"rules.{name}", f"{_ADAPTIVE}rules.{name}")


@rule("growth")
def how_fast_it_grows(set_: Set) -> None:
    for value in (1.25, 2.0):
        assert value <= factor(by_rules(set_, value, ASKED)) < value + 0.2


@rule("shrink")
def how_fast_it_shrinks(set_: Set) -> None:
    for value in (0.5, 0.75):
        paced = Paced(set_, value, BUSY, **RULES)
        assert factor(paced.run(0.125)) == value


@rule("low_utilization")
def when_there_is_room(set_: Set) -> None:
    load = Load(running=20, waiting=10, device=0.6)
    assert factor(by_rules(set_, 0.5, load)) == 1.0
    assert factor(by_rules(set_, 0.7, load)) > 1.0


@rule("long_queue")
def when_it_grows_twice_as_fast(set_: Set) -> None:
    assert 1.25 <= factor(by_rules(set_, 1.0, ASKED)) < 1.25**2
    assert factor(by_rules(set_, 0.5, ASKED)) >= 1.25**2


@rule("long_request")
def when_requests_are_long(set_: Set) -> None:
    load = Load(running=20, mean_prompt=200, mean_output=200)
    named = {value: Paced(set_, value, load, **RULES).run(0.125).prediction.sizes.batch for value in (1024, 300)}
    assert named == {1024: 256, 300: 192}


@rule("long_request_shrink")
def what_long_requests_leave(set_: Set) -> None:
    load = Load(running=20, mean_prompt=5000, mean_output=5240)
    named = {value: Paced(set_, value, load, **RULES).run(0.125).prediction.sizes.batch for value in (0.5, 0.25, 1.0)}
    assert named == {0.5: 128, 0.25: 64, 1.0: 256}
