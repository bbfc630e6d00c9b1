"""Every key of a configuration file that is built has a test that shows what it does, not that it is read.

`EFFECTS` holds them by key, those of the pacer from `helpers/pacer_effects.py`; a key without one fails
`test_every_key_is_here`.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes import serving

import helpers.pacer_effects  # noqa: F401 (effects of its own)
from helpers.configured import EFFECTS, Configured, Set, shows
from helpers.pacing import Clock
from helpers.tiny_models import write_checkpoint
from noria.cli.sections import KEYS
from noria.engine.core import EngineCore
from noria.executor.local import LocalExecutor
from noria.observe.logging import get_logger, logging_environment, setup_logging, setup_logging_from
from noria.worker import worker as worker_module

NOT_BUILT = ("moe.", "speculative_decoding.", "tracing_enabled", "tensor_parallel", "pipeline_parallel_size")
_BATCHING = "continuous_batching."
_BLOCKS, _SPEED = f"{_BATCHING}block_allocation.", f"{_BATCHING}performance_optimization."
_MONITORING = f"{_BATCHING}monitoring."


def test_every_key_is_here() -> None:
    built = {path for path in KEYS if not any(part in path for part in NOT_BUILT)}
    assert built == set(EFFECTS)


@pytest.mark.parametrize("path", EFFECTS)
def test_a_key_has_its_effect(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_HOME", str(tmp_path / "home"))  # nothing has been learned
    EFFECTS[path](Set(path, tmp_path))


# ------------------------------------------------------------------------------------------------ batching


@shows(f"{_BATCHING}enabled")
def requests_join_at_every_step_or_wait_for_the_batch(set_: Set) -> None:
    joined = {}
    for value in (True, False):
        clock = Clock()
        driver = Configured(set_.engine(value), clock=clock)
        driver.submit(1, [1], max_tokens=9)
        driver.step()
        assert driver.rows() == ([1] if value else [])  # a static batch waits for company
        clock.now = 1.0
        driver.step()
        driver.submit(2, [2], max_tokens=1)
        clock.now = 2.0
        for _ in range(3):
            driver.step()
        joined[value] = 2 in driver.seen
        driver.run()
        assert driver.tokens(2)
    assert joined == {True: True, False: False}


@shows(f"{_BATCHING}max_batch_size")
def no_more_run_at_once(set_: Set) -> None:
    for most in (2, 5):
        driver = Configured(set_.engine(most))
        for number in range(7):
            driver.submit(number, [number], max_tokens=3)
        driver.run()
        assert max(driver.rows()) == most


@shows(f"{_BATCHING}batch_build_interval")
def an_idle_engine_gathers(set_: Set) -> None:
    for interval, first_step in ((0, 1), (0.5, 2)):
        clock = Clock()
        driver = Configured(set_.engine(interval), clock=clock)
        driver.submit(1, [1], max_tokens=4)
        assert driver.core.idle_seconds == interval
        driver.step()
        clock.now = 0.25
        driver.submit(2, [2], max_tokens=4)
        driver.step()
        clock.now = 0.5
        assert driver.core.idle_seconds == 0
        driver.step()
        assert driver.rows()[0] == first_step
        driver.submit(3, [3], max_tokens=1)  # one that runs does not wait for company
        driver.step()
        assert 3 in driver.seen


# ------------------------------------------------------------------------------------------------ blocks and memory


def loaded(set_: Set, value: object, **beside: object) -> EngineCore:
    """An engine with a real worker."""
    model = set_.folder / "model"
    if not model.exists():
        write_checkpoint("llama", model)
    set_.model = str(model)
    options = set_.engine(value, threads=1, **beside)
    executor = LocalExecutor(options)
    executor.close()
    return EngineCore(executor, options.cache, options.scheduler)


@shows(f"{_BLOCKS}num_blocks")
def the_cache_has_so_many_blocks(set_: Set) -> None:
    assert loaded(set_, 40).stats.total_blocks == 40
    assert loaded(set_, 50).stats.total_blocks == 50
    preemptions = {}
    for value in (3, 60):
        driver = Configured(set_.engine(value, block_size=8))
        for number in (1, 2):
            driver.submit(number, [number] * 8, max_tokens=10)
        driver.run()
        preemptions[value] = driver.core.stats.preemptions_total
    assert preemptions[3] > preemptions[60] == 0


@shows(f"{_BLOCKS}block_size")
def prefixes_are_shared_in_whole_blocks(set_: Set) -> None:
    assert loaded(set_, 32).info.block_size == 32
    shared = {}
    for value in (8, 16):
        driver = Configured(set_.engine(value))
        for number in (1, 2):
            driver.submit(number, list(range(25)), max_tokens=1)
            driver.run()
        shared[value] = driver.finish(2).cached_tokens
    assert shared == {8: 24, 16: 16}


def cached_after(driver: Configured, prompts: dict[int, list[int]], order: list[int], new: list[int]) -> set[int]:
    """Which of the prompts are still cached once they were asked for in this order, and then a new one."""
    for turn, number in enumerate(order):
        driver.submit(100 + turn, prompts[number], max_tokens=1)
        driver.run()
    driver.submit(99, new, max_tokens=1)
    driver.run()
    manager = driver.core._manager
    kept = set()
    for number, prompt in prompts.items():
        chain = manager.chain("")
        tokens = array("i", prompt)
        chain.extend(tokens)
        if manager.match(chain, tokens, len(prompt)).blocks:
            kept.add(number)
    return kept


@shows(f"{_BLOCKS}reclaim_strategy")
def which_blocks_go_first(set_: Set) -> None:
    prompts = {number: [number] * 9 for number in range(1, 8)}  # a full block each
    kept = {}
    for value in ("lru", "fifo", "random"):
        driver = Configured(set_.engine(value, num_blocks=9, block_size=8, reclaim_ratio=0.01))
        kept[value] = cached_after(driver, prompts, [1, 2, 3, 4, 5, 6, 7, 1], [9] * 41)
    assert kept["lru"] == {1, 6, 7}
    assert kept["fifo"] == {5, 6, 7}
    assert kept["random"] not in (kept["lru"], kept["fifo"])
    assert len(kept["random"]) == 3


@shows(f"{_BLOCKS}reclaim_ratio")
def how_many_blocks_go_at_a_time(set_: Set) -> None:
    cached = {}
    for value in (0.01, 0.5):
        driver = Configured(set_.engine(value, num_blocks=10, block_size=8))
        for number in range(1, 11):
            driver.submit(number, [number] * 8, max_tokens=1)
            driver.run()
        driver.submit(11, [11] * 8, max_tokens=1)
        driver.run()
        cached[value] = driver.core.stats.cached_blocks
    assert cached == {0.01: 10, 0.5: 6}


@shows("engine_config.max_model_len")
def prompt_and_answer_have_so_many_tokens(set_: Set) -> None:
    for most in (20, 30):
        core = loaded(set_, most)
        assert core.info.max_model_len == most
    driver = Configured(set_.engine(20), max_model_len=20)
    driver.submit(1, [1] * 15, max_tokens=None)
    driver.submit(2, [2] * 20, max_tokens=1)
    driver.run()
    assert len(driver.tokens(1)) == 5
    assert "no room in a context of 20 tokens" in driver.finish(2).message


@shows("engine_config.gpu_memory_utilization")
def so_much_of_the_memory_is_used(set_: Set) -> None:
    # As if there were 10 MB, so that memory is what bounds the cache.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "available_memory", lambda: 10_000_000)
        taken = {value: loaded(set_, value, max_num_seqs=64, max_num_batched_tokens=16).info for value in (0.4, 0.8)}
    sizes = {value: info.cache_bytes for value, info in taken.items()}
    assert 0.9 * 4_000_000 < sizes[0.8] - sizes[0.4] < 1.1 * 4_000_000


# ------------------------------------------------------------------------------------------------ performance


def most_in_flight(driver: Configured) -> int:
    """Steps that were submitted and not collected, with twenty requests."""
    found, submit = 0, driver.executor.submit

    def noted(plan: object, alone: bool = False) -> None:
        nonlocal found
        submit(plan, alone)
        found = max(found, len(driver.executor.results))

    driver.executor.submit = noted
    for number in range(20):
        driver.submit(number, [number], max_tokens=6)
    driver.run()
    return found


def mixed_steps(driver: Configured) -> int:
    """Steps in which one row decodes and another computes several tokens."""
    driver.submit(1, [1] * 2, max_tokens=20)
    driver.step()
    driver.submit(2, [2] * 40, max_tokens=4)
    driver.run()
    plans = driver.executor.plans
    assert len(driver.tokens(1)) == 20
    return sum(1 in plan.counts and max(plan.counts) > 1 for plan in plans)


def cached_at_admission(driver: Configured) -> int:
    """Tokens that a request finds cached which had to wait while others took blocks."""
    prompt = [7] * 17
    driver.submit(1, prompt, max_tokens=1)
    driver.run()
    driver.submit(2, [8] * 17, max_tokens=1)  # younger, and nobody waits for it
    driver.run()
    driver.submit(3, [3] * 8, max_tokens=40)
    driver.step()
    driver.submit(4, prompt, max_tokens=1)
    driver.run()
    return driver.finish(4).cached_tokens


def compiled_when_it_came(driver: Configured) -> bool:
    """Whether a grammar is being compiled while its request waits for a place."""
    asked = driver.executor.asked
    driver.submit(1, [1], max_tokens=3)
    driver.step()
    driver.submit(2, [2], grammar="later", max_tokens=2)
    driver.step()
    before = list(asked)
    driver.run()
    assert asked == ["later"]
    assert len(driver.tokens(2)) == 2
    return before == ["later"]


_TIGHT = {"num_blocks": 8, "block_size": 8, "reclaim_ratio": 0.01, "max_num_seqs": 1}


@shows(f"{_SPEED}enable_async_batch_building")
def the_next_step_is_planned_while_one_is_computed(set_: Set) -> None:
    assert most_in_flight(Configured(set_.engine(True))) == 2
    assert most_in_flight(Configured(set_.engine(False))) == 1


@shows(f"{_SPEED}enable_batch_fusion")
def prefill_and_decode_share_steps_or_take_turns(set_: Set) -> None:
    assert mixed_steps(Configured(set_.engine(True, max_num_batched_tokens=8))) >= 4
    driver = Configured(set_.engine(False, max_num_batched_tokens=8))
    assert mixed_steps(driver) == 0
    kinds = "".join("p" if max(plan.counts) > 1 else "d" for plan in driver.executor.plans[:9])
    assert kinds == "pdpdpdpdp"  # neither starves


@shows(f"{_SPEED}enable_prefetch")
def who_waits_is_prepared(set_: Set) -> None:
    assert cached_at_admission(Configured(set_.engine(True, **_TIGHT))) == 16
    assert cached_at_admission(Configured(set_.engine(False, **_TIGHT))) == 0
    assert compiled_when_it_came(Configured(set_.engine(True, max_num_seqs=1)))
    assert not compiled_when_it_came(Configured(set_.engine(False, max_num_seqs=1)))


@shows(f"{_SPEED}enabled")
def all_three_or_none(set_: Set) -> None:
    for value in (True, False):
        assert most_in_flight(Configured(set_.engine(value))) == (2 if value else 1)
        assert bool(mixed_steps(Configured(set_.engine(value, max_num_batched_tokens=8)))) is value
        assert bool(cached_at_admission(Configured(set_.engine(value, **_TIGHT)))) is value


# ------------------------------------------------------------------------------------------------ monitoring


def counts(set_: Set, value: object) -> bool:
    """Whether a server has metrics, and counts what is asked of it."""
    with serving(options=set_.server(value)) as server:
        asked = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert asked.status_code == 200
        page = httpx.get(f"{server.url}/metrics")
        counted = "noria_generation_tokens_total" in page.text
        line = b'noria_request_success_total{finished_reason="length",model_name="wheel"} '
        assert (line + b"1.0" in server.state.metrics.render()) is counted
        assert page.status_code == (200 if counted else 404)
        assert counted or "--no-enable-metrics" in page.json()["error"]["message"]
        assert server.state.client.metrics.stats.steps_total > 0  # what a watchdog goes by
    return counted


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("noria", "uvicorn")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def logged(set_: Set, value: object) -> list[str]:
    """What this process and an engine's process log of five messages."""
    import contextlib
    import io

    server = set_.server(value)
    processes = []
    for engine in (False, True):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            if engine:
                setup_logging_from(logging_environment(server.log_level, server.log_format))
            else:
                setup_logging(server.log_level, server.log_format)
            log = get_logger("noria.test")
            for say in (log.debug, log.info, log.warning, log.error, log.critical):
                say("the wheel turns")
        processes.append(said.getvalue().splitlines())
    assert len(processes[0]) == len(processes[1])
    return processes[1]


@shows(f"{_MONITORING}enabled")
def nothing_is_told(set_: Set) -> None:
    assert counts(set_, True)
    assert not counts(set_, False)
    assert len(logged(set_, True)) == 4
    assert logged(set_, False) == []


@shows(f"{_MONITORING}metrics_enabled")
def there_are_metrics(set_: Set) -> None:
    assert counts(set_, True)
    assert not counts(set_, False)


@shows(f"{_MONITORING}logging_enabled")
def something_is_logged(set_: Set) -> None:
    assert len(logged(set_, True)) == 4
    assert logged(set_, False) == []


@shows(f"{_MONITORING}log_level")
def from_a_level_on(set_: Set) -> None:
    lines = {level: len(logged(set_, level)) for level in ("debug", "info", "warning", "error", "none")}
    assert lines == {"debug": 5, "info": 4, "warning": 3, "error": 2, "none": 0}


@shows(f"{_MONITORING}log_format")
def in_a_format(set_: Set) -> None:
    assert [json.loads(line)["message"] for line in logged(set_, "json")] == ["the wheel turns"] * 4
    assert not any(line.startswith("{") for line in logged(set_, "text"))
