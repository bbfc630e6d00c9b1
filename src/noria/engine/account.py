"""A request's time in the engine, told as phases: from its moments and the plannings between them.

Works on copies, when somebody asks. Phases follow each other without gap or overlap, from submission to end.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from noria.engine.history import NEVER, Cause, History, Life, Run
from noria.messages import Explained, Phase

_MOST_STEPS = 5000  # told one by one
_MOST_PHASES = 1000
RUNNING = "running"
SEVERAL = "several"  # causes, of phases that were put together


def explain(history: History, ask: int, request_id: int) -> Explained:
    """What became of a request, up to `history.now`."""
    life = history.life(request_id)
    if life is None:
        return Explained(ask=ask, now=history.now, known=False)
    return _Account(history, life).told(ask)


class _Account:
    """One life, told: `phases`, and the steps that ran it as indices into the plannings of its time."""

    def __init__(self, history: History, life: Life) -> None:
        self._life = life
        self._ring = history.ring
        self._lead = Cause.STATIC if history.static else Cause.GATHERING
        self._gathers = history.static or history.gathers
        self._now = history.now
        self._end = history.now if life.ended is None else life.ended
        self._rows = history.ring.rows(life.submitted, self._end)
        self._since = float(self._rows["planned"][0]) if history.ring.full and len(self._rows) else -NEVER
        self._phases: list[Phase] = []
        self._lost = 0  # steps that are forgotten
        self._steps = [np.empty(0, np.int64)]
        self._own = [np.empty(0, np.int32)]  # [steps] tokens that it computed

    def told(self, ask: int) -> Explained:
        life = self._life
        self._tell()
        own = np.concatenate(self._own)
        rows, last = self._rows[np.concatenate(self._steps)], slice(-_MOST_STEPS, None)
        spans = np.minimum(rows["end"], self._end) - np.minimum(rows["start"], self._end)
        return Explained(
            ask=ask,
            now=self._now,
            submitted=life.submitted,
            ended=life.ended,
            reason=life.reason,
            prompt_tokens=life.prompt_tokens,
            received=life.received,
            cached_tokens=life.cached_tokens,
            preemptions=sum(run.preempted is not None for run in life.runs),
            ahead=life.ahead,
            phases=_bounded(self._phases),
            numbers=rows["step"][last].astype("<i8").tobytes(),
            starts=rows["start"][last].astype("<f8").tobytes(),
            ends=rows["end"][last].astype("<f8").tobytes(),
            own=own[last].astype("<i4").tobytes(),
            rows=rows["rows"][last].astype("<i4").tobytes(),
            tokens=rows["tokens"][last].astype("<i4").tobytes(),
            left_out=self._lost + max(0, len(own) - _MOST_STEPS),
            own_seconds=float((spans * own / np.maximum(rows["tokens"], 1)).sum()),
        )

    def _tell(self) -> None:
        life, before = self._life, None
        at = life.submitted
        at = self._add(at, self._end if life.queued is None else life.queued, Cause.GRAMMAR)
        for run in life.runs:
            at = self._wait(at, self._start(run), before, run)
            at = self._run(at, run)
            before = run
        self._wait(at, self._end, before, None)

    def _index(self, step: int) -> int:
        """The row of a step; the first one if that is forgotten, one beyond the last if it was not planned yet."""
        return int(np.searchsorted(self._rows["step"], step))

    def _row_of(self, run: Run) -> int | None:
        """The row of the first step of a run, unless it is forgotten."""
        at = self._index(run.first)
        return at if at < len(self._rows) and int(self._rows["step"][at]) == run.first else None

    def _start(self, run: Run) -> float:
        """When the first step of a run began."""
        row = self._row_of(run)
        return min(run.at if row is None else float(self._rows["start"][row]), self._end)

    # ------------------------------------------------------------------------------------------ waiting

    def _wait(self, at: float, end: float, before: Run | None, run: Run | None) -> float:
        """From `at` to `end`, when `run` begins (None: none does). `before`: what ended at `at`. Returns the end."""
        at = self._add(at, min(end, self._since), Cause.FORGOTTEN)
        if at >= end:
            return at
        planned = self._rows["planned"]
        first, last = (int(np.searchsorted(planned, time)) for time in (at, end))
        admitted = None if run is None else self._row_of(run)
        causes = self._causes(first, last if admitted is None else admitted)
        if admitted is not None:  # it waits for the end of the step before
            causes = np.append(causes, np.uint8(Cause.STEP))
        lead = float(planned[first]) if len(causes) else end
        if before is not None and before.preempted is not None:
            causes[planned[first : first + len(causes)] <= before.preempted] = Cause.PREEMPTED
            causes[:1] = Cause.PREEMPTED
            self._lay(at, lead, Cause.PREEMPTED)
        else:
            busy = min(max(at, self._busy(first)), lead)
            self._lay(at, busy, Cause.STEP)
            self._lay(busy, lead, self._lead if self._gathers or busy == at else Cause.STEP)
        self._plannings(lead, end, first, causes)
        return end

    def _causes(self, first: int, last: int) -> NDArray[np.uint8]:
        """[rows] what it waited for after each planning of a range."""
        rows = self._rows[first:last]
        causes: NDArray[np.uint8] = rows["closed"].copy()
        causes[causes == Cause.OPEN] = Cause.STEP
        causes[rows["newest"] > self._life.order] = Cause.POLICY
        for pause in self._life.pauses:  # not in line then, so that nobody can have come first
            causes[(rows["planned"] >= pause.begin) & (rows["planned"] < pause.end)] = Cause.STEP
        return causes

    def _busy(self, first: int) -> float:
        """Until when the steps planned before row `first` ran."""
        before = self._rows[:first]
        ran = before["end"][before["rows"] > 0]
        return float(ran[-1]) if len(ran) else -NEVER

    def _plannings(self, at: float, end: float, first: int, causes: NDArray[np.uint8]) -> None:
        """Up to `end`, a phase for each stretch of plannings of one cause."""
        if not len(causes):
            return
        edges = [0, *(np.flatnonzero(np.diff(causes)) + 1).tolist(), len(causes)]
        for begin, stop in pairwise(edges):
            until = end if stop == len(causes) else float(self._rows["planned"][first + stop])
            self._lay(at, until, Cause(int(causes[begin])), first + stop - 1, stop - begin)
            at = max(at, until)

    def _lay(self, at: float, end: float, cause: Cause, row: int | None = None, turns: int = 0) -> None:
        """A wait, but for the pauses within it."""
        for pause in self._life.pauses:
            if pause.end > at and pause.begin < end:
                at = self._add(at, pause.begin, cause, row, turns)
                at = self._add(at, min(pause.end, end), pause.cause, row, turns)
        self._add(at, end, cause, row, turns)

    def _add(self, at: float, end: float, cause: Cause, row: int | None = None, turns: int = 0) -> float:
        """A wait, if it has any length; returns its end. `row`: the last of `turns` plannings without the request."""
        if end <= at:
            return at
        name, phases = cause.name.lower(), self._phases
        if phases and phases[-1].cause == name:  # a pause that lasted for several plannings
            at, turns = phases[-1].start, phases.pop().steps + turns
        phases.append(Phase(at, end, name, turns, 0, 0, *self._sizes(row)))
        return end

    def _sizes(self, row: int | None) -> tuple[int, int, int, int]:
        if row is None:
            return 0, 0, 0, 0
        last = self._rows[row]
        return int(last["batch"]), int(last["budget"]), int(last["running"]), int(last["waiting"])

    # ------------------------------------------------------------------------------------------ running

    def _run(self, at: float, run: Run) -> float:
        """A run from `at` on: stretches of steps with a row of the request, and of steps without. Returns its end."""
        rows, first = self._rows, self._index(run.first)
        if self._row_of(run) is None and at < self._end:
            at = self._forgotten(at, run, first)
        own_rows = (rows["rows"] > 0) & (rows["start"] < self._end)
        own_rows[:first] = False
        if run.preempted is not None and run.last is not None:
            own_rows[self._index(run.last + 1) :] = False
        indices = np.flatnonzero(own_rows)
        own = np.ones(len(indices), np.int32)
        noted, counts = self._ring.notes(rows[indices], run.slot)
        own[noted] = counts
        self._steps.append(indices[own > 0])
        self._own.append(own[own > 0])
        edges = [0, *(np.flatnonzero(np.diff(own > 0)) + 1).tolist(), len(own)]
        for begin, stop in pairwise(edges if len(own) else ()):
            at = self._stretch(at, run, indices, own, begin, stop)
        return at

    def _stretch(
        self, at: float, run: Run, indices: NDArray[np.int64], own: NDArray[np.int32], begin: int, stop: int
    ) -> float:
        """Consecutive steps `begin` to `stop` of a run, all with a row of the request or all without."""
        rows, last = self._rows, int(indices[stop - 1])
        if stop == len(own) and run.preempted is None:
            end = self._end
        elif own[begin] or stop == len(own):
            end = float(rows["end"][last])
        else:
            end = float(rows["start"][int(indices[stop])])
        end = min(end, self._end)
        if not own[begin]:
            return self._add(at, end, Cause(int(rows["skipped"][last])), last, stop - begin)
        if end > at:
            first, tokens = int(rows["step"][int(indices[begin])]), int(own[begin:stop].sum())
            self._phases.append(Phase(at, end, RUNNING, stop - begin, first, tokens, *self._sizes(last)))
        return max(at, end)

    def _forgotten(self, at: float, run: Run, first: int) -> float:
        """The steps of a run that the ring has lost. Returns their end."""
        known = first < len(self._rows) and (run.last is None or int(self._rows["step"][first]) <= run.last)
        if known:
            steps, end = int(self._rows["step"][first]) - run.first, float(self._rows["start"][first])
        else:
            steps = 0 if run.last is None else run.last - run.first + 1
            end = self._end if run.preempted is None else run.preempted
        end = min(max(at, end), self._end)
        self._phases.append(Phase(at, end, RUNNING, steps, run.first))
        self._lost += steps
        return end


def _bounded(phases: list[Phase]) -> tuple[Phase, ...]:
    """Phases, those in the middle put together if there are very many."""
    over = len(phases) - _MOST_PHASES
    if over <= 0:
        return tuple(phases)
    head = _MOST_PHASES // 2
    lost = phases[head : head + over + 1]
    middle = Phase(lost[0].start, lost[-1].end, SEVERAL, sum(one.steps for one in lost), 0, sum(o.tokens for o in lost))
    return (*phases[:head], middle, *phases[head + over + 1 :])
