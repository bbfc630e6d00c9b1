"""Runs requests through an engine in this process and returns exactly what came out, for tests of equality."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from noria.config import EngineOptions
from noria.engine.core import EngineCore
from noria.executor.local import LocalExecutor
from noria.messages import EngineStats, StepOutputs, Submit, Vocabulary
from noria.params import SamplingParams


@dataclass(slots=True)
class Answer:
    """Tokens and log-probabilities (as bytes, so that equality is of bits) of one request."""

    tokens: list[int] = field(default_factory=list)
    chosen: bytes = b""
    top_ids: bytes = b""
    top: bytes = b""
    reason: str | None = None
    message: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt with its parameters, and the step before which it is submitted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at_step: int = 0
    received: tuple[int, ...] = ()
    group: int | None = None
    choice: int = 0
    stop_ids: tuple[int, ...] = ()


def options(model: str, /, **parts: dict[str, Any]) -> EngineOptions:
    """Engine options with some keys of some parts set."""
    return msgspec.convert({"model": {"model": model}} | _merged(model, parts), EngineOptions)


def _merged(model: str, parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    merged = {name: dict(keys) for name, keys in parts.items()}
    merged["model"] = {"model": model} | merged.get("model", {})
    return merged


def column(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def run(
    engine_options: EngineOptions, asks: Sequence[Ask], vocabulary: Vocabulary | None = None
) -> tuple[list[Answer], EngineStats]:
    """Runs all asks to their end; answers in their order, and the engine's last statistics."""
    executor = LocalExecutor(engine_options)
    try:
        core = EngineCore(executor, engine_options.cache, engine_options.scheduler)
        if vocabulary is not None:
            core.handle(vocabulary)
        return drive(core, asks)
    finally:
        executor.close()


def drive(core: EngineCore, asks: Sequence[Ask]) -> tuple[list[Answer], EngineStats]:
    """The same on an engine that is there already; request ids start anew, so one call at a time."""
    answers = [Answer() for _ in asks]
    order = sorted(range(len(asks)), key=lambda index: asks[index].at_step)
    step = 0
    while order or core.has_work:
        while order and (asks[order[0]].at_step <= step or not core.has_work):
            index = order.pop(0)
            core.handle(_submit(index, asks[index]))
        if core.idle_seconds and not order:
            time.sleep(core.idle_seconds)
        outputs = core.step()
        step += 1
        if outputs is not None:
            _take(outputs, answers)
        assert step < 100_000, "the engine does not come to an end"
    return answers, core.stats


def _submit(index: int, ask: Ask) -> Submit:
    return Submit(
        request_id=index,
        prompt_ids=column(ask.prompt),
        received_ids=column(ask.received),
        params=ask.params,
        group=index if ask.group is None else ask.group,
        choice=ask.choice,
        stop_ids=ask.stop_ids,
        arrival=float(index),
    )


def _take(outputs: StepOutputs, answers: list[Answer]) -> None:
    tokens = iter(np.frombuffer(outputs.tokens, "<i4").tolist())
    ids = np.frombuffer(outputs.request_ids, "<i8").tolist()
    for index, count in zip(ids, np.frombuffer(outputs.counts, "<i4").tolist(), strict=True):
        answers[index].tokens += [next(tokens) for _ in range(count)]
    for index, values in outputs.logprobs.items():
        answers[index].chosen += values.chosen
        answers[index].top_ids += values.top_ids
        answers[index].top += values.top
    for end in outputs.finished:
        assert answers[end.request_id].reason is None, "a request ended twice"
        answers[end.request_id].reason = end.reason
        answers[end.request_id].message = end.message
        answers[end.request_id].cached_tokens = end.cached_tokens
