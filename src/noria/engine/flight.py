"""Steps in the making and under way: from the scheduler's decisions to a plan of columns and differences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from noria.engine.columns import Running
from noria.engine.request import Request
from noria.plan import Admission, Int32, StepPlan


@dataclass(slots=True)
class Draft:
    """A plan in the making.

    Attributes:
        slots, counts: [rows] of requests that were running before, and how many tokens each computes.
        appended: slot → new blocks.
        preempted: whether a request had to give way; then none is admitted.
        admitted, admitted_counts: requests that begin with this step, and how many tokens each computes.
        copies: source and destination blocks.
    """

    slots: Int32
    counts: Int32
    appended: dict[int, list[int]] = field(default_factory=dict)
    preempted: bool = False
    admitted: list[Admission] = field(default_factory=list)
    admitted_counts: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not len(self.slots) and not self.admitted


@dataclass(slots=True)
class Flight:
    """A plan under way, and whom its results concern.

    Attributes:
        sampled: in plan order. They may have been finished or preempted since.
        progress: rows whose computed tokens matter to others or to their end, and how many are computed by then.
        scored: slot → request, of rows with prompt log-probabilities.
        prompt_tokens: of the tokens computed, those of prompts.
        repeats: how many steps after this one need only repeat it (`StepPlan.repeats`) while no request comes or goes.
        changes: `Running.changes` when it was planned.
    """

    plan: StepPlan
    sampled: list[Request]
    progress: list[tuple[Request, int]]
    scored: dict[int, Request]
    prompt_tokens: int
    repeats: int
    changes: int


def launch(
    draft: Draft, step: int, running: Running, block_size: int, released: list[int], scoring: set[int]
) -> Flight:
    """Makes the plan, and counts its tokens as computed and its samples as known.

    Args:
        released: slots given up since the plan before.
        scoring: slots that owe prompt log-probabilities.
    """
    slots, counts = draft.slots, draft.counts
    if draft.admitted:
        slots = np.concatenate((slots, np.array([one.slot for one in draft.admitted], np.int32)))
        counts = np.concatenate((counts, np.array(draft.admitted_counts, np.int32)))
    starts, known, prompt = running.computed[slots], running.known[slots], running.prompt[slots]
    ends = starts + counts
    sample = (ends == known) & (known < running.limit[slots])
    running.computed[slots] = ends
    running.known[slots] = known + sample
    # Others wait for full blocks and for whole prompts; of other rows only the sampled token matters.
    matters = (ends // block_size > starts // block_size) | (starts < prompt)
    matters[len(draft.slots) :] = True  # the worker needs what they hold, and they may be aborted before it comes to it
    notable = np.flatnonzero(matters)
    scored = _scored_rows(slots, starts < prompt - 1, scoring)
    plan = StepPlan(
        step=step,
        slots=slots,
        starts=starts,
        counts=counts,
        sample=sample,
        admitted=tuple(draft.admitted),
        append_slots=np.array([slot for slot, new in draft.appended.items() for _ in new], np.int32),
        append_blocks=np.array([block for new in draft.appended.values() for block in new], np.int32),
        copies=np.array(draft.copies, np.int32).reshape(-1, 2),
        released=np.array(released, np.int32),
        prompt_logprobs=tuple(scored),
    )
    return Flight(
        plan,
        running.owners(slots[sample]),
        list(zip(running.owners(slots[notable]), ends[notable].tolist(), strict=True)),
        dict(zip(slots[scored].tolist(), running.owners(slots[scored]), strict=True)),
        int(np.maximum(np.minimum(ends, prompt) - starts, 0).sum()),
        _repeats(running, slots, block_size) if len(slots) == len(running) and sample.all() else 0,
        running.changes,
    )


def _repeats(running: Running, slots: Int32, block_size: int) -> int:
    """Steps until a row, all of which have just sampled, has its last token or begins or needs a block."""
    computed = running.computed[slots]
    left = np.minimum(running.limit[slots] - running.known[slots], running.capacity[slots] - computed)
    return max(0, int(np.minimum(left, -computed % block_size - 1).min()))


def repeat(flight: Flight, running: Running) -> Flight:
    """The step after one that can be repeated; what `launch` would make of it."""
    plan = flight.plan
    running.repeat()
    single = plan.repeats or len(plan.slots) == plan.tokens
    counts = plan.counts if single else np.ones(len(plan.slots), np.int32)
    starts = plan.starts + plan.counts
    again = StepPlan(plan.step + 1, plan.slots, starts, counts, plan.sample, repeats=single)
    return Flight(again, flight.sampled, [], {}, 0, flight.repeats - 1, flight.changes)


def _scored_rows(slots: Int32, early: np.ndarray[tuple[int], np.dtype[np.bool_]], scoring: set[int]) -> list[int]:
    """Rows that compute what prompt log-probabilities need. `early`: [rows] begins before the last prompt token, which
    predicts output."""
    if not scoring:
        return []
    return [row for row in np.flatnonzero(early).tolist() if int(slots[row]) in scoring]
