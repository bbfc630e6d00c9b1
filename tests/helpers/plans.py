"""Plans made by hand: a few lines of scheduler, so that the worker is tested without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.params import SamplingParams
from noria.plan import Admission, StepPlan

GREEDY = SamplingParams(temperature=0.0, seed=0)


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def admit(
    slot: int, tokens: Sequence[int], blocks: Sequence[int], prompt_length: int | None = None, **params: Any
) -> Admission:
    """A request with all its blocks. `params`: of SamplingParams; greedy unless it says otherwise."""
    chosen = SamplingParams(**{"temperature": 0.0, "seed": 0, **params})
    length = len(tokens) if prompt_length is None else prompt_length
    return Admission(slot, int32(*tokens), length, chosen, (), 0, int32(*blocks))


def plan(step: int, rows: Sequence[tuple[int, int, int, bool]], **changes: Any) -> StepPlan:
    """`rows`: (slot, start, count, sample) each."""
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], []]
    slots, starts, counts = (np.array(column, np.int32) for column in columns[:3])
    return StepPlan(step, slots, starts, counts, np.array(columns[3], bool), **changes)
