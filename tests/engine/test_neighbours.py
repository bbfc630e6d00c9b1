"""Promise 1: your neighbours never change your answer. Exact equality of token ids and log-probabilities, in every
scheme, whatever else runs, however it is cut up, and whatever is lost and computed anew on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.engine_runs import Answer, Ask, drive, options, run
from helpers.tiny_models import write_checkpoint
from noria.engine.core import EngineCore
from noria.executor.local import LocalExecutor
from noria.params import SamplingParams

VOCAB = 317
SCHEMES: dict[str, dict[str, str]] = {
    "f32": {"dtype": "f32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
SUBJECTS = (
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, seed=0),
    SamplingParams(temperature=1.0, max_tokens=24, logprobs=3, seed=11),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_tokens=24, logprobs=0, seed=2**63 + 5),
    SamplingParams(temperature=1.3, min_p=0.05, max_tokens=24, logprobs=1, seed=4),
    SamplingParams(
        temperature=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias={3: 2.0, 9: -100.0},
        max_tokens=24,
        min_tokens=4,
        logprobs=2,
        seed=5,
    ),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_checkpoint("llama", Path(folder))
    return str(folder)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length))


def subjects(at_step: int = 0) -> list[Ask]:
    return [Ask(prompt(100 + i, 37 + 20 * i), params, at_step) for i, params in enumerate(SUBJECTS)]


def neighbours(count: int) -> list[Ask]:
    rng = np.random.default_rng(1)
    return [
        Ask(
            prompt(1000 + i, int(rng.integers(1, 150))),
            SamplingParams(temperature=float(i % 2), max_tokens=int(rng.integers(1, 40)), seed=i),
            at_step=int(rng.integers(0, 30)),
        )
        for i in range(count)
    ]


def alone(model: str, scheme: str, **parts: dict[str, Any]) -> list[Answer]:
    """Each subject on its own, one after the other, in an engine without a prefix cache."""
    cache = {"prefix_caching": False} | parts.pop("cache", {})
    chosen = options(model, model=SCHEMES[scheme], cache=cache, **parts)
    executor = LocalExecutor(chosen)
    try:
        core = EngineCore(executor, chosen.cache, chosen.scheduler)
        return [drive(core, [ask])[0][0] for ask in subjects()]
    finally:
        executor.close()


_baselines: dict[tuple[str, str], list[Answer]] = {}


def baseline(model: str, scheme: str, cache_dtype: str = "auto") -> list[Answer]:
    key = (scheme, cache_dtype)
    if key not in _baselines:
        _baselines[key] = alone(model, scheme, cache={"dtype": cache_dtype})
        assert all(len(answer.tokens) == 24 for answer in _baselines[key])
    return _baselines[key]


def same(found: list[Answer], expected: list[Answer]) -> None:
    for index, (one, other) in enumerate(zip(found[: len(expected)], expected, strict=True)):
        assert one.tokens == other.tokens, f"tokens of subject {index}"
        assert one.chosen == other.chosen, f"log-probabilities of subject {index}"
        assert (one.top_ids, one.top) == (other.top_ids, other.top), f"alternatives of subject {index}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_among_sixty_others(tiny: str, scheme: str) -> None:
    answers, _ = run(options(tiny, model=SCHEMES[scheme]), subjects(at_step=5) + neighbours(60))
    same(answers, baseline(tiny, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(tiny: str, scheme: str, threads: int) -> None:
    answers, _ = run(options(tiny, model=SCHEMES[scheme], device={"threads": threads}), subjects() + neighbours(8))
    same(answers, baseline(tiny, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_chunk_sizes(tiny: str, scheme: str, budget: int) -> None:
    scheduler = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 256)}
    answers, _ = run(options(tiny, model=SCHEMES[scheme], scheduler=scheduler), subjects() + neighbours(8))
    same(answers, baseline(tiny, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefix_cache_on_and_off(tiny: str, scheme: str) -> None:
    off, _ = run(options(tiny, model=SCHEMES[scheme], cache={"prefix_caching": False}), subjects() + neighbours(8))
    same(off, baseline(tiny, scheme))
    chosen = options(tiny, model=SCHEMES[scheme])
    executor = LocalExecutor(chosen)
    try:
        core = EngineCore(executor, chosen.cache, chosen.scheduler)
        same(drive(core, subjects())[0], baseline(tiny, scheme))
        again, _ = drive(core, subjects())
    finally:
        executor.close()
    same(again, baseline(tiny, scheme))
    assert all(answer.cached_tokens > 0 for answer in again)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_preemption(tiny: str, scheme: str) -> None:
    """A pool that holds hardly more than one request's blocks: requests are thrown out and computed anew."""
    cache = {"num_blocks": 20, "prefix_caching": False}
    answers, stats = run(options(tiny, model=SCHEMES[scheme], cache=cache), subjects() + subjects())
    assert stats.preemptions_total > 0
    same(answers, baseline(tiny, scheme))
    same(answers[len(SUBJECTS) :], baseline(tiny, scheme))


@pytest.mark.parametrize("cache_dtype", ["f32", "bf16", "int8"])
def test_cache_types(tiny: str, cache_dtype: str) -> None:
    chosen = options(tiny, model=SCHEMES["int8"], cache={"dtype": cache_dtype})
    answers, _ = run(chosen, subjects(at_step=3) + neighbours(20))
    same(answers, baseline(tiny, "int8", cache_dtype))


@pytest.mark.parametrize(
    "parts",
    [
        {"cache": {"layout": "contiguous", "prefix_caching": False}, "scheduler": {"max_num_seqs": 16}},
        {"scheduler": {"continuous": False, "static_timeout": 0.0, "max_num_seqs": 7}},
        {"scheduler": {"in_flight_depth": 2}},
        {"scheduler": {"fusion": False, "prefetch": False, "build_interval": 0.001, "max_num_batched_tokens": 40}},
        {"cache": {"block_size": 16, "reclaim_strategy": "random", "num_blocks": 64}},
    ],
    ids=["contiguous", "static", "in-flight-depth-2", "apart", "small-pool-random-reclaim"],
)
@pytest.mark.parametrize("scheme", ["f32", "int8"])
def test_engine_modes(tiny: str, scheme: str, parts: dict[str, dict[str, Any]]) -> None:
    answers, _ = run(options(tiny, model=SCHEMES[scheme], **parts), subjects() + neighbours(20))
    same(answers, baseline(tiny, scheme))


@pytest.mark.parametrize(
    ("name", "window"),
    [("llama", None), ("mistral", 600), ("gemma3", 20), ("gemma3", 700), ("phi3", 30), ("qwen3", None)],
)
@pytest.mark.parametrize("scheme", ["f32", "int8"])
def test_long_contexts_and_windows(tmp_path: Path, name: str, window: int | None, scheme: str) -> None:
    """Contexts of several segments, which threads share when a request is alone, and windows that end within them."""
    write_checkpoint(name, tmp_path, max_position_embeddings=2048, **({"sliding_window": window} if window else {}))
    asks = [
        Ask(prompt(1, 1300), SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, seed=0)),
        Ask(prompt(2, 509), SamplingParams(temperature=1.0, max_tokens=8, logprobs=2, seed=2)),  # enters a segment
        Ask(prompt(3, 40), SamplingParams(temperature=1.0, max_tokens=6, logprobs=2, seed=3)),
    ]

    def found(threads: int, budget: int, others: list[Ask]) -> list[Answer]:
        scheduler = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 64)}
        chosen = options(
            str(tmp_path),
            model=SCHEMES[scheme],
            scheduler=scheduler,
            cache={"num_blocks": 300},
            device={"threads": threads},
        )
        return run(chosen, asks + others)[0]

    expected = found(1, 2048, [])
    assert [len(answer.tokens) for answer in expected] == [6, 8, 6]
    same(found(3, 1000, []), expected)
    same(found(2, 45, neighbours(12)), expected)
    same(found(1, 333, neighbours(12)), expected)


@pytest.mark.parametrize("scheme", ["bf16", "int8"])
def test_resumed_in_the_middle(tiny: str, scheme: str) -> None:
    """A request that is submitted again with the tokens it already has goes on as if nothing had happened."""
    expected = baseline(tiny, scheme)
    for kept in (1, 9, 23):
        asks = [
            Ask(ask.prompt, ask.params, received=tuple(answer.tokens[:kept]))
            for ask, answer in zip(subjects(), expected, strict=True)
        ]
        answers, _ = run(options(tiny, model=SCHEMES[scheme]), asks)
        for answer, full in zip(answers, expected, strict=True):
            assert answer.tokens == full.tokens[kept:]
            assert answer.chosen == full.chosen[4 * kept :]


def test_choices_of_one_request_share_and_differ(tiny: str) -> None:
    """n choices with one seed: each equals itself alone, and they are not all the same."""
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=3, logprobs=0)
    asks = [Ask(prompt(5, 45), params, group=1, choice=choice) for choice in range(4)]
    together, _ = run(options(tiny, model=SCHEMES["int8"]), asks)
    for ask, answer in zip(asks, together, strict=True):
        single, _ = run(options(tiny, model=SCHEMES["int8"]), [ask])
        same([answer], single)
    assert len({tuple(answer.tokens) for answer in together}) > 1
