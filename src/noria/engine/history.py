"""What became of each request: what it waited for, and which steps ran it.

Each planning is written down once, as a row of a ring, with what closed admission in it: whoever is in line then waits
for the same. Of a request, only its own few moments are kept. What it lived through follows from both, when somebody
asks (`engine/account.py`). No clock of its own: `now` is set by whoever drives the engine, before anything happens.
"""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from noria.engine.columns import Running
from noria.engine.request import Request
from noria.messages import FinishReason
from noria.plan import Int32, StepPlan

_KEPT = 1000  # lives that have ended
_ROWS = 1 << 15  # plannings; at 20 ms a step these are ten minutes
_NOTES = 1 << 18  # rows of steps that did not compute just one token
_BEFORE = 3  # rows that are given beside those asked for: steps that may have been under way
_MOST_PAUSES = 64  # of one request
NEVER = float("inf")


class Cause(enum.IntEnum):
    """What a request waits for. The names, in lower case, are those of messages and replies."""

    OPEN = 0  # nothing: admission was not closed
    STEP = 1  # the step under way
    CAP = 2  # a place in the batch: as many run as may now
    BUDGET = 3  # tokens of the step
    BLOCKS = 4  # blocks of the cache
    POLICY = 5  # its turn: others came first, under the fair or the priority policy
    PREFIX = 6  # a prefix that another request computes
    GRAMMAR = 7  # its grammar to be compiled
    STATIC = 8  # a static batch that fills, or runs to its end
    PREEMPTED = 9  # it had to give way
    LOOKUPS = 10  # a step that looks up no more prefixes
    GATHERING = 11  # an engine at rest to begin
    KIND = 12  # a step of its kind: prefill and decode are kept apart
    FORGOTTEN = 13  # not known any more


# planned, start, end, step, newest, notes, rows, tokens, running, waiting, batch, budget, noted, closed, skipped
_ROW = struct.Struct("<dddqqqiiiiiiiBB")
_TIMES = struct.Struct("<dd")
_TIMES_AT = 8
ROW = np.dtype(
    [
        ("planned", "<f8"),
        ("start", "<f8"),
        ("end", "<f8"),
        ("step", "<i8"),
        ("newest", "<i8"),
        ("notes", "<i8"),
        ("rows", "<i4"),
        ("tokens", "<i4"),
        ("running", "<i4"),
        ("waiting", "<i4"),
        ("batch", "<i4"),
        ("budget", "<i4"),
        ("noted", "<i4"),
        ("closed", "u1"),
        ("skipped", "u1"),
    ]
)
Rows = NDArray[np.void]


@dataclass(slots=True)
class Run:
    """Steps from an admission to the preemption or the end that follows.

    Attributes:
        at: when the first of them was planned.
        first, last: numbers of steps; there is a last one if it had to give way.
        preempted: when it did.
    """

    at: float
    slot: int
    first: int
    last: int | None = None
    preempted: float | None = None


@dataclass(slots=True)
class Pause:
    """Time out of line, until another request has computed a prefix, or a grammar is there."""

    begin: float
    cause: Cause
    end: float = NEVER


@dataclass(slots=True)
class Life:
    """The moments of one request. Times are seconds on the engine's clock.

    Attributes:
        received: output tokens that it had from another engine.
        ahead: how many waited when it came.
        queued: when it was in line; later than `submitted` if its grammar had to be compiled.
    """

    request_id: int
    order: int
    submitted: float
    prompt_tokens: int
    received: int
    ahead: int = 0
    queued: float | None = None
    runs: list[Run] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    cached_tokens: int = 0
    ended: float | None = None
    reason: FinishReason | None = None


@dataclass(slots=True)
class Planned:
    """What a planning decided.

    Attributes:
        plan: None: nothing could be computed.
        running, waiting: requests, afterwards.
        batch, budget: sizes in force.
        closed: why no more were admitted.
        skipped: why running requests have no row, if there are such.
        without: [skipped] slots of those.
    """

    plan: StepPlan | None
    running: int
    waiting: int
    batch: int
    budget: int
    closed: Cause
    skipped: Cause = Cause.OPEN
    without: Int32 | None = None


def without(plan: StepPlan, running: Running) -> Int32 | None:
    """[slots] of running requests that have no row in a plan; None: all have one."""
    if len(plan.slots) == len(running):
        return None
    idle = np.zeros(int(running.slots.max()) + 1, np.bool_)
    idle[running.slots] = True
    idle[plan.slots] = False
    return np.flatnonzero(idle).astype(np.int32)


class Ring:
    """The last plannings, oldest first, and beside them the rows that computed none or several tokens.

    A step's row is written when it is planned and completed when its results are in.
    """

    def __init__(self, rows: int = _ROWS, notes: int = _NOTES) -> None:
        self._size, self._most_notes = rows, notes
        self._table = np.zeros(rows, ROW)  # memory that the system gives when it is first written
        self._bytes = self._table.view(np.uint8).data
        self._slots = np.zeros(notes, np.int32)  # [notes]
        self._counts = np.zeros(notes, np.int32)  # [notes] tokens; 0: it ran, without a row
        self._turns = 0  # written so far
        self._notes = 0
        self._flying: deque[int] = deque()  # offsets of rows whose results are not in
        self._step = 0
        self._end = -NEVER  # of the last step whose results are in
        self._idle: tuple[Cause, int] | None = None  # of the last row, if nothing could be computed

    def plan(self, planned: float, made: Planned, newest: int) -> None:
        """A planning. `newest`: order of the last to come of those that were admitted for the first time."""
        plan = made.plan
        if plan is None:
            if self._idle == (made.closed, made.waiting):
                return  # as before
            self._idle = made.closed, made.waiting
            self._write(planned, planned, planned, newest, 0, 0, made, 0)
            return
        self._idle, self._step = None, plan.step
        before = self._notes
        if not plan.repeats:
            self._note(plan, made.without)
        start = NEVER if self._flying else planned
        rows = len(plan.slots)
        tokens = rows if plan.repeats else plan.tokens
        offset = self._write(planned, start, NEVER, newest, rows, tokens, made, self._notes - before)
        self._flying.append(offset)

    def _write(
        self,
        planned: float,
        start: float,
        end: float,
        newest: int,
        rows: int,
        tokens: int,
        made: Planned,
        noted: int,
    ) -> int:
        offset = self._turns % self._size * _ROW.size
        sizes = made.running, made.waiting, made.batch, made.budget
        first = self._notes - noted
        _ROW.pack_into(
            self._bytes, offset, planned, start, end, self._step, newest, first, rows, tokens, *sizes, noted,
            made.closed, made.skipped,
        )  # fmt: skip
        self._turns += 1
        return offset

    def _note(self, plan: StepPlan, without: Int32 | None) -> None:
        """Rows with other than one token, and running requests without a row."""
        if plan.tokens != len(plan.slots):
            several = plan.counts != 1
            self._put(plan.slots[several], plan.counts[several])
        if without is not None and len(without):
            self._put(without, np.zeros(len(without), np.int32))

    def _put(self, slots: Int32, counts: Int32) -> None:
        at = np.arange(self._notes, self._notes + len(slots)) % self._most_notes
        self._slots[at], self._counts[at] = slots, counts
        self._notes += len(slots)

    def ran(self, end: float) -> None:
        """The results of the oldest step are in."""
        offset = self._flying.popleft()
        (planned, start) = _TIMES.unpack_from(self._bytes, offset)
        if start == NEVER:  # it followed the one before
            start = max(planned, self._end)
        _TIMES.pack_into(self._bytes, offset + _TIMES_AT, start, end)
        self._end = end

    @property
    def full(self) -> bool:
        """Whether plannings have been overwritten."""
        return self._turns > self._size

    def rows(self, since: float, until: float = NEVER) -> Rows:
        """[rows] a copy of those planned from `since` to `until` and of a few before, oldest first. `end` is inf of
        steps under way, `start` too of those that have not begun."""
        at, count = self._turns % self._size if self.full else 0, min(self._turns, self._size)
        planned = self._table["planned"]
        planned = np.concatenate((planned[at:], planned[:at]))[:count]
        first = max(0, int(np.searchsorted(planned, since)) - _BEFORE)
        last = int(np.searchsorted(planned, until, "right"))
        found: Rows = self._table[(np.arange(first, last) + at) % self._size]
        return found

    def notes(self, rows: Rows, slot: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Indices of consecutive `rows` in which the request in `slot` computed other than one token, and how many; 0:
        it had no row in the step. Notes that were overwritten are missing."""
        noted = np.flatnonzero(rows["noted"])
        firsts = rows["notes"][noted]
        begin = max(int(firsts[0]), self._notes - self._most_notes) if len(noted) else 0
        end = int(firsts[-1] + rows["noted"][noted[-1]]) if len(noted) else 0
        numbers = np.arange(begin, max(begin, end))
        numbers = numbers[self._slots[numbers % self._most_notes] == slot]
        found = noted[np.searchsorted(firsts, numbers, "right") - 1]
        return found, self._counts[numbers % self._most_notes]


class History:
    """What happens in one engine, as it happens. Every call costs the same, however many run or wait.

    Attributes:
        now: the moment at hand.
        static: an engine at rest waits for a batch to fill. gathers: it waits for company.
    """

    def __init__(
        self, static: bool = False, gathers: bool = False, ring: Ring | None = None, kept: int = _KEPT
    ) -> None:
        self.now = 0.0
        self.static = static
        self.gathers = gathers
        self.ring = ring or Ring()
        self._kept = kept
        self._lives: dict[int, Life] = {}
        self._ended: OrderedDict[int, Life] = OrderedDict()
        self._newest = 0  # order of the last to come of those that the planning at hand admitted

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._lives)

    def life(self, request_id: int) -> Life | None:
        """Of a request that lives, or has ended lately."""
        return self._lives.get(request_id) or self._ended.get(request_id)

    # ------------------------------------------------------------------------------------------ requests

    def submitted(self, request: Request, ahead: int) -> None:
        """It came; `ahead`: how many waited."""
        self._lives[request.id] = Life(
            request.id, request.order, self.now, request.prompt_length, request.output_length, ahead
        )

    def queued(self, request: Request) -> None:
        """It is in line."""
        if (life := self._lives.get(request.id)) is not None:
            life.queued = self.now

    def entered(self, request: Request, step: int) -> None:
        """It is admitted to a step."""
        self._newest = max(self._newest, 0 if request.preemptions else request.order)
        if (life := self._lives.get(request.id)) is not None:
            life.runs.append(Run(self.now, request.slot, step))

    def preempted(self, request: Request, step: int) -> None:
        """It has to give way; `step` is the last that has a row of it."""
        if (life := self._lives.get(request.id)) is not None and life.runs:
            life.runs[-1].last, life.runs[-1].preempted = step, self.now

    def paused(self, request: Request, cause: Cause) -> None:
        """It is out of line."""
        if (life := self._lives.get(request.id)) is not None and len(life.pauses) < _MOST_PAUSES:
            life.pauses.append(Pause(self.now, cause))

    def resumed(self, request: Request) -> None:
        """It is in line again."""
        if (life := self._lives.get(request.id)) is not None and life.pauses and life.pauses[-1].end == NEVER:
            life.pauses[-1].end = self.now

    def ended(self, request: Request, reason: FinishReason) -> None:
        """It has come to its end, or is forgotten."""
        life = self._lives.pop(request.id, None)
        if life is None:
            return
        life.ended, life.reason, life.cached_tokens = self.now, reason, request.cached_tokens
        self._ended[request.id] = life
        if len(self._ended) > self._kept:
            self._ended.popitem(last=False)

    # ------------------------------------------------------------------------------------------ steps

    def planned(self, made: Planned) -> None:
        """A planning, begun `now`."""
        self.ring.plan(self.now, made, self._newest)
        self._newest = 0

    def ran(self) -> None:
        """The results of the oldest step are in, `now`."""
        self.ring.ran(self.now)
