"""What a step of a model asks of a machine at least, as a function of what the step computes: from the model's graph,
once, when it has been loaded."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from noria.backends.base import Attention, Batch, CacheLayout, Embed, Graph, RopeCache
from noria.backends.counts import Work, count_step
from noria.plan import AttentionWork, StepWork


def step_work(graph: Graph, cache: CacheLayout) -> StepWork:
    """The operations and bytes of `count_step`, but of any step: those of one token that is sampled from, told apart by
    what they grow with."""
    token: dict[str, float] = defaultdict(float)
    output: dict[str, float] = defaultdict(float)
    attention: dict[int, AttentionWork] = {}
    weights, passing = 0.0, 0.0
    for (name, index), work in count_step(graph, _one_token(), cache).items():
        if name == "convert":
            continue  # activations alone, which caches hold
        op = None if index is None else graph.ops[index]
        if isinstance(op, Attention):
            attention[op.window] = _sum(attention.get(op.window), op.window, work)
            continue
        grows = output if op is None or op.out.rows == "outputs" else token
        for kind, operations in work.operations.items():
            grows[kind] += operations
        if isinstance(op, Embed | RopeCache):
            passing += work.stored
        else:
            weights += work.stored
    return StepWork(dict(token), dict(output), weights, passing, tuple(attention.values()))


def _sum(before: AttentionWork | None, window: int, work: Work) -> AttentionWork:
    """Ops of one window together."""
    ((kind, operations),) = work.operations.items()
    more = AttentionWork(window, kind, float(operations), float(work.stored))
    if before is None:
        return more
    return AttentionWork(window, kind, before.operations + more.operations, before.bytes + more.bytes)


def _one_token() -> Batch:
    zero = np.zeros(1, np.int32)
    starts, length = np.array([0, 1], np.int32), np.ones(1, np.int32)
    return Batch(zero, zero, zero, starts, length, zero, np.zeros((1, 1), np.int32), zero)
