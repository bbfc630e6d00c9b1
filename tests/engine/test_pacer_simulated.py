"""The learned predictor in a whole engine, in virtual time: real scheduler and pacer, steps that take what a machine of
known speed would take."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from noria.bench.http import Record
from noria.bench.offline import run_offline
from noria.bench.simulate import VirtualClock, numbered_requests, simulated_engine, small_machine
from noria.cli.common import engine_options
from noria.pacer.base import Decision, StepShape

Row = tuple[float, int, int]  # seconds, tokens of the prompt and of the output


class Run:
    """A replay: `met` says who was answered within the objectives, `decisions` what the pacer did, both by time."""

    def __init__(
        self,
        rows: list[Row],
        ttft: float | None = None,
        tpot: float | None = None,
        concurrency: int | None = None,
        batch: int = 256,
        paced: bool = True,
        outliers: float = 0.0,
    ) -> None:
        clock, random = VirtualClock(), Random(2)
        self.ttft, self.tpot = ttft, tpot
        slo = {"slo_ttft_ms": ttft and 1e3 * ttft, "slo_tpot_ms": tpot and 1e3 * tpot}
        options = engine_options(
            model={"model": "simulated"}, scheduler={"max_num_seqs": batch}, pacer={"enabled": paced, **slo}
        )

        def seconds(shape: StepShape) -> float:
            return small_machine(shape) * (10.0 if random.random() < outliers else 1.0)

        core = simulated_engine(options, clock, seconds, noise=0.05)
        self.start = clock.now()
        self.records = run_offline(core, numbered_requests(rows), concurrency, clock=clock)
        self.end = clock.now()
        pacing = core._pacing
        self.decisions: list[Decision] = [] if pacing is None else list(pacing.pacer.decisions)

    def met(self, record: Record) -> bool:
        late = self.ttft is not None and record.ttft > self.ttft
        return not late and (self.tpot is None or (record.tpot or 0.0) <= self.tpot)

    def share(self, first: float, last: float = np.inf) -> float:
        """Of the requests that came in these seconds, those within the objectives."""
        return float(np.mean([self.met(one) for one in self.records if first <= one.start - self.start < last]))

    def batches(self, first: float, last: float) -> list[int]:
        return [one.after.batch for one in self.decisions if first <= one.at - self.start < last]

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return sum(one.output_tokens for one in self.records) / (self.end - self.start)


def arrivals(spans: list[tuple[float, float]], prompt: int, output: int, seed: int = 1) -> list[Row]:
    """Poisson arrivals: of each span, seconds and requests per second. Lengths vary by a third."""
    random, rows, at, end = Random(seed), [], 0.0, 0.0
    for seconds, rate in spans:
        end += seconds
        while at < end:
            rows.append((at, *(random.randint(int(0.7 * mean), int(1.3 * mean)) for mean in (prompt, output))))
            at += random.expovariate(rate)
    return rows


@pytest.mark.parametrize(("rate", "prompt", "output"), [(8.0, 64, 32), (1.5, 256, 64)])
def test_eight_times_the_arrivals_are_within_the_objectives_two_seconds_later(
    rate: float, prompt: int, output: int
) -> None:
    run = Run(arrivals([(8.0, rate), (12.0, 8.0 * rate)], prompt, output), ttft=1.0, tpot=0.03)
    for second in range(10, 20):
        assert run.share(second, second + 1) >= 0.9
    after = run.batches(10.0, 20.0)
    assert len(after) > 50
    assert max(after) <= 1.1 * np.median(after)
    assert min(after) >= 0.9 * np.median(after)


def test_more_is_met_than_by_any_fixed_size_when_the_load_changes() -> None:
    """Many short requests need a large batch to begin in time, long prompts a small one to go on in time."""
    short = [(4.0 + 2.6 * group + 0.001 * number, 16, 50) for group in range(3) for number in range(150)]
    long = [(13.0 + 2.2 * group + 0.002 * number, 200, 16) for group in range(8) for number in range(44)]
    rows = arrivals([(3.0, 8.0)], 48, 32) + short + long
    fixed = [Run(rows, 1.9, 0.021, batch=size, paced=False).share(0.0) for size in (8, 32, 64)]
    assert max(fixed) < 0.7
    assert Run(rows, 1.9, 0.021).share(0.0) > 1.25 * max(fixed)


@pytest.mark.parametrize(("requests", "callers"), [(250, 100), (400, 200)])
def test_without_objectives_no_throughput_is_lost(requests: int, callers: int) -> None:
    rows = [(0.0, 128, 64)] * requests
    fixed = [Run(rows, concurrency=callers, batch=size, paced=False).throughput for size in (64, 128, 256)]
    assert Run(rows, concurrency=callers).throughput > 0.97 * max(fixed)


def test_one_caller_is_as_quick_as_without_a_pacer() -> None:
    rows = [(0.0, 128, 128)] * 4
    paced, plain = (Run(rows, concurrency=1, paced=paced) for paced in (True, False))
    assert paced.end == pytest.approx(plain.end, rel=0.001)


def test_page_faults_and_noisy_neighbours_do_not_shake_the_batch() -> None:
    rows = arrivals([(20.0, 40.0)], 64, 32)
    calm, shaken = (Run(rows, 1.0, 0.03, outliers=share).batches(5.0, 20.0) for share in (0.0, 0.02))
    assert np.median(shaken) >= 0.5 * np.median(calm)
    assert max(shaken) - min(shaken) <= 0.5 * np.median(shaken)
