"""The worker with plans made by hand: what it says never depends on how the plans are cut."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.plans import admit, int32, plan
from helpers.tiny_gguf import write_gguf
from helpers.tiny_models import write_checkpoint
from noria.config import CacheOptions, DeviceOptions, EngineOptions, ModelOptions, SchedulerOptions
from noria.errors import BackendError, ConfigError, EngineError, PullError
from noria.executor.local import LocalExecutor
from noria.plan import StepPlan, StepResult
from noria.worker.worker import Worker

PROMPT = np.random.default_rng(5).integers(0, 320, 50).tolist()
BACKENDS = ["reference", "cpu"]


def options(path: Path, backend: str, tokens: int = 64, **parts: Any) -> EngineOptions:
    return EngineOptions(
        model=ModelOptions(model=str(path), **parts.get("model", {"dtype": "f32"})),
        cache=CacheOptions(**{"num_blocks": 64, "dtype": "f32", **parts.get("cache", {})}),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=tokens),
        device=DeviceOptions(backend=backend, threads=parts.get("threads", 2)),
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("worker")
    for name in ("llama", "llama_biases", "mistral", "qwen3", "gemma3", "phi3_longrope"):
        write_checkpoint(name, folder / name)
    return folder


def generate(worker: Worker, chunks: list[int], count: int, slot: int = 0, **params: Any) -> list[StepResult]:
    """Computes PROMPT in chunks of these sizes (the last one repeated), then samples `count` tokens."""
    blocks = range(1 + 8 * slot, 9 + 8 * slot)
    results, at, step = [], 0, 0
    while len(results) < count:
        known = len(PROMPT) + len(results)
        size = min(chunks[min(step, len(chunks) - 1)], known - at)
        first = (admit(slot, PROMPT, blocks, **params),) if step == 0 else ()
        result = worker.execute(plan(step, [(slot, at, size, at + size == known)], admitted=first))
        at, step = at + size, step + 1
        if len(result.tokens):
            results.append(result)
    worker.execute(plan(step, [], released=int32(slot)))
    return results


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_the_files_of_a_loaded_model_are_unmapped(tiny: Path, tmp_path: Path, kind: str) -> None:
    path = tiny / "llama"
    if kind == "gguf":
        path = tmp_path / "tiny.gguf"
        write_gguf("llama", path)
    worker = Worker(options(path, "cpu"))
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(tokens(generate(worker, [64], 2))) == 2


def tokens(results: list[StepResult]) -> list[int]:
    return [int(result.tokens[0]) for result in results]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "llama_biases", "mistral", "qwen3", "gemma3", "phi3_longrope"])
def test_same_tokens_however_chunked(tiny: Path, name: str, backend: str) -> None:
    worker = Worker(options(tiny / name, backend))
    whole = tokens(generate(worker, [64], 8))
    assert len(set(whole)) > 1
    assert whole == tokens(generate(worker, [1], 8)) == tokens(generate(worker, [7, 30, 2], 8, slot=3))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama_biases"])
def test_cpu_says_what_the_reference_says(tiny: Path, name: str) -> None:
    first, second = (Worker(options(tiny / name, backend)) for backend in BACKENDS)
    reference = generate(first, [64], 12, logprobs=2)
    cpu = generate(second, [16], 12, logprobs=2)
    assert tokens(reference) == tokens(cpu)
    for ours, theirs in zip(cpu, reference, strict=True):
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        np.testing.assert_allclose(ours.logprobs.top, theirs.logprobs.top, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(ours.logprobs.top_ids, theirs.logprobs.top_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_side_by_side(tiny: Path, backend: str) -> None:
    """Two requests in one batch, one in prefill while the other decodes, say what they say alone."""
    worker = Worker(options(tiny / "llama", backend))
    alone = generate(worker, [64], 3)
    worker.execute(plan(0, [(0, 0, 50, True)], admitted=(admit(0, PROMPT, range(4)),)))
    mixed = worker.execute(plan(1, [(0, 50, 1, True), (5, 0, 30, False)], admitted=(admit(5, PROMPT, range(9, 13)),)))
    both = worker.execute(plan(2, [(5, 30, 20, True), (0, 51, 1, True)]))
    assert mixed.tokens.tolist() == tokens(alone)[1:2]
    assert both.slots.tolist() == [5, 0]
    assert both.tokens.tolist() == [tokens(alone)[0], tokens(alone)[2]]
    assert both.step == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows_among_others(tiny: Path, backend: str) -> None:
    """Rows of which only the largest logit is wanted go apart; each row's results are its own, in the plan's order."""
    asked: list[dict[str, Any]] = [{"logprobs": 2}, {}, {"temperature": 0.8, "seed": 3}, {}, {"logprobs": 0}]
    alone = Worker(options(tiny / "llama", backend, 256))
    expected = [generate(alone, [50], 4, slot, **params) for slot, params in enumerate(asked)]
    together = Worker(options(tiny / "llama", backend, 256))
    admitted = tuple(admit(slot, PROMPT, range(1 + 8 * slot, 9 + 8 * slot), **p) for slot, p in enumerate(asked))
    for step in range(4):
        rows = [(slot, 49 + step, 1, True) if step else (slot, 0, 50, True) for slot in (3, 0, 2, 1, 4)]
        result = together.execute(plan(step, rows, admitted=admitted if step == 0 else ()))
        assert result.slots.tolist() == [3, 0, 2, 1, 4]
        assert result.tokens.tolist() == [int(expected[slot][step].tokens[0]) for slot in (3, 0, 2, 1, 4)]
        assert result.logprobs is not None
        for row, slot in ((1, 0), (4, 4)):
            one = expected[slot][step].logprobs
            assert one is not None
            width = one.top.shape[1]
            assert result.logprobs.chosen[row] == one.chosen[0]
            assert result.logprobs.ranks[row] == one.ranks[0] >= 1
            assert result.logprobs.top_ids[row, :width].tolist() == one.top_ids[0].tolist()
        assert result.logprobs.ranks[[0, 2, 3]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_appended_and_copied_blocks(tiny: Path, backend: str) -> None:
    worker = Worker(options(tiny / "llama", backend))
    alone = tokens(generate(worker, [64], 4))
    # 50 tokens fill three blocks and begin a fourth, which a second request takes over by copy.
    worker.execute(plan(0, [(0, 0, 32, False)], admitted=(admit(0, PROMPT, [20, 21]),)))
    more = {"append_slots": int32(0, 0), "append_blocks": int32(22, 23)}
    worker.execute(plan(1, [(0, 32, 18, True)], **more))
    worker.execute(plan(2, [(0, 50, 1, True)]))
    shared = admit(1, PROMPT, [20, 21, 22, 40])
    result = worker.execute(
        plan(3, [(1, 49, 1, True), (0, 51, 1, True)], admitted=(shared,), copies=np.array([[23, 40]], np.int32))
    )
    assert result.tokens.tolist() == [alone[0], alone[2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_logprobs_in_any_chunks(tiny: Path, backend: str) -> None:
    """More rows than the head computes at once, and the values of tokens computed in chunks are those of the whole."""
    worker = Worker(options(tiny / "llama", backend))
    admitted = (admit(0, PROMPT, range(4), prompt_logprobs=3),)
    whole = worker.execute(plan(0, [(0, 0, 50, True)], admitted=admitted, prompt_logprobs=(0,)))
    (scores,) = whole.prompt_logprobs
    assert (scores.slot, scores.first) == (0, 1)
    assert scores.tokens.tolist() == PROMPT[1:]
    assert scores.values.top.shape == (49, 3)
    assert np.all(scores.values.chosen <= scores.values.top[:, 0])
    parts = []
    admitted = (admit(1, PROMPT, range(8, 12), prompt_logprobs=3),)
    for step, (start, stop) in enumerate([(0, 1), (1, 20), (20, 50)]):
        rows = [(1, start, stop - start, stop == 50)]
        result = worker.execute(plan(step, rows, admitted=admitted if start == 0 else (), prompt_logprobs=(0,)))
        parts += result.prompt_logprobs
    assert [part.first for part in parts] == [1, 2, 21]
    assert np.concatenate([part.values.chosen for part in parts]).tobytes() == scores.values.chosen.tobytes()
    assert np.concatenate([part.values.top_ids for part in parts]).tobytes() == scores.values.top_ids.tobytes()


def test_more_sampled_rows_than_the_head_computes_at_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.worker.worker._MIN_LOGITS_ROWS", 3)
    monkeypatch.setattr("noria.worker.worker._LOGITS_BYTES", 0)
    worker = Worker(options(tiny / "llama", "reference"))
    # Only one row asks for log-probabilities, in the second slice of the head.
    admitted = tuple(
        admit(slot, PROMPT[: 5 + slot], [slot], **({"logprobs": 2} if slot == 4 else {})) for slot in range(7)
    )
    result = worker.execute(plan(0, [(slot, 0, 5 + slot, True) for slot in range(7)], admitted=admitted))
    assert len(result.tokens) == 7
    assert result.logprobs is not None
    assert result.logprobs.top_ids.shape == (7, 2)
    assert result.logprobs.top_ids[4, 0] == result.tokens[4]
    assert result.logprobs.top_ids[0].tolist() == [-1, -1]
    for slot in range(7):
        alone = worker.execute(plan(1, [(slot, 0, 5 + slot, True)], released=int32(slot), admitted=(admitted[slot],)))
        assert alone.tokens[0] == result.tokens[slot]


def test_resumed_request_goes_on_where_it_was(tiny: Path) -> None:
    """After preemption tokens and sampling state come back from what the engine knows."""
    worker = Worker(options(tiny / "llama", "reference"))
    params = {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.3}
    whole = tokens(generate(worker, [64], 8, **params))
    resumed = admit(2, PROMPT + whole[:5], range(6), prompt_length=len(PROMPT), **params)
    result = worker.execute(plan(0, [(2, 0, 55, True)], admitted=(resumed,)))
    assert result.tokens.tolist() == whole[5:6]


def test_info_and_sizes(tiny: Path) -> None:
    info = Worker(options(tiny / "llama", "reference", cache={"num_blocks": None})).info
    assert info.num_blocks == 8 * 512 // 16  # memory allows more than 8 requests of full length could use
    assert info.cache_bytes == info.num_blocks * 2 * 3 * 2 * 16 * 16 * 4
    assert (info.vocab_size, info.max_model_len, info.num_slots, info.weights) == (320, 512, 8, "f32")
    assert info.details["architecture"] == "llama"


def test_context_shrinks_to_what_the_cache_holds(tiny: Path) -> None:
    chosen = options(tiny / "llama", "reference", cache={"num_blocks": 10})
    worker = Worker(chosen)
    assert worker.info.max_model_len == 160
    assert len(set(tokens(generate(worker, [20], 3)))) == 3


def test_context_beyond_the_model_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len: 513 exceeds the 512 tokens"):
        Worker(options(tiny / "llama", "reference", model={"dtype": "f32", "max_model_len": 513}))


def test_executor_overlaps_and_keeps_order(tiny: Path) -> None:
    expected = tokens(generate(Worker(options(tiny / "llama", "reference")), [64], 3))
    executor = LocalExecutor(options(tiny / "llama", "reference"))
    try:
        assert executor.info.vocab_size == 320
        # The second step starts at the token that the first one, still in flight, samples.
        executor.submit(plan(0, [(0, 0, 50, True)], admitted=(admit(0, PROMPT, range(4)),)))
        executor.submit(plan(1, [(0, 50, 1, True)]))
        executor.submit(plan(2, [(0, 51, 1, True)]))
        results = [executor.collect() for _ in range(3)]
        assert [result.step for result in results] == [0, 1, 2]
        assert tokens(results) == expected
        with pytest.raises(EngineError, match="no step is in flight"):
            executor.collect()
    finally:
        executor.close()
        executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.submit(StepPlan(3))


def test_a_step_that_is_alone_runs_where_it_is_collected(tiny: Path) -> None:
    expected = tokens(generate(Worker(options(tiny / "llama", "cpu")), [64], 4))
    threads: list[int] = []
    rests: list[int] = []

    class Noting(Worker):
        def execute(self, plan: StepPlan) -> StepResult:
            threads.append(threading.get_ident())
            return super().execute(plan)

        def rest(self) -> None:
            rests.append(len(threads))
            super().rest()

    executor = LocalExecutor(options(tiny / "llama", "cpu"), Noting)
    executor.submit(plan(0, [(0, 0, 50, True)], admitted=(admit(0, PROMPT, range(4)),)), alone=True)
    with pytest.raises(EngineError, match="not collected yet"):
        executor.submit(plan(1, [(0, 50, 1, True)]))
    results = [executor.collect()]
    executor.submit(plan(1, [(0, 50, 1, True)]))
    executor.submit(plan(2, [(0, 51, 1, True)], repeats=True), alone=True)  # it is not: it waits its turn
    results += [executor.collect(), executor.collect()]
    executor.submit(plan(3, [(0, 52, 1, True)], repeats=True), alone=True)
    assert tokens([*results, executor.collect()]) == expected
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False, False, True]
    assert rests == [1, 4]  # the processors are wanted by others only while nothing else is in flight
    executor.submit(plan(4, [(5, 0, 1, True)]), alone=True)
    with pytest.raises(BackendError, match="slot is free"):
        executor.collect()
    with pytest.raises(EngineError, match="an earlier step failed"):
        executor.collect()
    executor.close()


def test_executor_hands_back_what_went_wrong(tiny: Path) -> None:
    with pytest.raises(PullError):
        LocalExecutor(options(tiny / "nothing", "reference"))
    executor = LocalExecutor(options(tiny / "llama", "reference"))
    executor.submit(plan(0, [(0, 0, 1, True)]))
    executor.submit(plan(1, [(0, 1, 1, True)]))
    with pytest.raises(BackendError, match="slot is free"):
        executor.collect()
    with pytest.raises(EngineError, match="an earlier step failed"):
        executor.collect()
    executor.close()
