"""The kernel thread pool: every task runs exactly once, whatever the counts, threads and steps."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria import _native

POOLS = {threads: _native.Pool(threads) for threads in (1, 2, 3, 7)}


@settings(max_examples=60, deadline=None)
@given(
    threads=st.sampled_from(sorted(POOLS)),
    count=st.integers(0, 3000),
    repeats=st.integers(1, 12),
    in_steps=st.booleans(),
)
def test_every_index_runs_exactly_once_per_run(threads: int, count: int, repeats: int, in_steps: bool) -> None:
    hits = POOLS[threads].exercise(count, repeats, in_steps)
    np.testing.assert_array_equal(hits, np.full(count, repeats))


def test_callers_on_several_threads_take_turns() -> None:
    pool = POOLS[3]
    found: list[np.ndarray] = []
    callers = [threading.Thread(target=lambda: found.append(pool.exercise(64, 200, True))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(found) == 4
    for hits in found:
        np.testing.assert_array_equal(hits, np.full(64, 200))


def test_an_idle_pool_uses_no_processor_time() -> None:
    pool = POOLS[2]
    pool.exercise(64, 50, True)
    time.sleep(0.01)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.03


def test_a_pool_put_to_rest_does_not_wait_awake() -> None:
    pool = _native.Pool(2, spin=3000.0)
    pool.exercise(4, 1, True)
    time.sleep(0.01)
    if _native.topology()["usable_cpus"] > 1:  # on a single processor no thread ever waits awake
        assert pool.asleep == 0
    pool.rest()
    wait_until(lambda: pool.asleep == 1)
    np.testing.assert_array_equal(pool.exercise(4, 1, True), np.ones(4))


def test_a_pool_that_waits_awake_ends_at_once() -> None:
    _native.Pool(2, spin=3000.0).exercise(4, 1, True)  # this returns only when its threads have ended


@pytest.mark.parametrize("spin", [-1.0, float("nan"), 1e9])
def test_a_senseless_spin_is_refused(spin: float) -> None:
    with pytest.raises(ValueError, match="spin"):
        _native.Pool(2, spin=spin)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_a_pool_at_rest_runs_what_comes(threads: int) -> None:
    pool = POOLS[threads]
    for in_steps in (False, True):
        pool.rest()
        np.testing.assert_array_equal(pool.exercise(100, 50, in_steps), np.full(100, 50))


def test_pools_come_and_go_without_leaving_threads() -> None:
    before = threading_tasks()
    for _ in range(20):
        assert _native.Pool(4).exercise(10, 3, True).sum() == 30
    assert threading_tasks() <= before


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def threading_tasks() -> int:
    """Threads of this process, native ones too."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))


@pytest.mark.parametrize("threads", [0, -1, 4096])
def test_a_senseless_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        _native.Pool(threads)
