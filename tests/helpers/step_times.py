"""A machine that is made up: what its steps take, and the steps that it is seen to run."""

from __future__ import annotations

import math

import numpy as np

from noria.pacer.base import StepShape
from noria.pacer.steptime import StepTimeModel


def truth(shape: StepShape, slow: float = 1.0) -> float:
    """Seconds on a machine with tiles of 16 rows, whose memory bounds small steps."""
    tiles = 16 * math.ceil(shape.tokens / 16)
    linear = max(3.0, 0.11 * tiles)
    head = 0.03 * (shape.decode_rows + shape.prefill_rows)
    attention = 6e-4 * shape.decode_context + 6e-5 * shape.prefill_context
    return slow * 1e-3 * (0.5 + linear + head + attention)


def decode(rows: int, context: int = 200) -> StepShape:
    return StepShape(decode_rows=rows, decode_context=rows * context)


def mixed(rows: int, prompts: int, tokens: int, context: int = 200) -> StepShape:
    return StepShape(rows, rows * context, prompts, tokens, tokens * tokens // (2 * prompts))


def shapes(random: np.random.Generator, count: int) -> list[StepShape]:
    """As they come: runs of decodes while the batch grows and shrinks, a few prefills in between."""
    made, rows, context = [], 8, 100
    for _ in range(count):
        rows = int(np.clip(rows + random.integers(-2, 3), 1, 120))
        context = int(np.clip(context + random.integers(-5, 8), 20, 600))
        if random.random() < 0.1:
            prompts = int(random.integers(1, 4))
            made.append(mixed(rows, prompts, prompts * int(random.integers(16, 200)), context))
        else:
            made.append(decode(rows, context))
    return made


def taught(count: int = 400, noise: float = 0.03, slow: float = 1.0, seed: int = 0) -> StepTimeModel:
    model, random = StepTimeModel(), np.random.default_rng(seed)
    for shape in shapes(random, count):
        model.learn(shape, truth(shape, slow) * random.lognormal(0.0, noise))
    return model
