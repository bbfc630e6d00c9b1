"""What `/debug/requests` answers: the time of a request as phases that follow each other, from its arrival to its end.

Puts together what this process saw (`frontend/course.py`) and what engines tell (`messages.Explained`). Shows no text
and no token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from noria.frontend.course import Course, Passage, Stint
from noria.messages import Explained, FinishReason
from noria.messages import Phase as EnginePhase
from noria.server.advice import advise

What = Literal[
    "reading", "preparing", "binding", "submitting", "held", "waiting", "running", "lost", "others", "delivering"
]


class Phase(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A stretch of a request's time. Fields at 0, and an empty `cause`, are left out.

    Attributes:
        what: reading (the body), preparing (template and tokens), binding (to a grammar), submitting; held (there was
            no engine for it), waiting (in the engine), running, lost (with an engine that can tell nothing); others (it
            waits for the other choices of its answer), delivering.
        cause: what it waits for in the engine.
        at_ms: since arrival. ms: how long.
        steps: that ran it, from number `first_step` on; of a wait, how often a step was planned without it.
        tokens: that were computed.
        batch, budget: most running requests, and most tokens of a step, at its end; running, waiting: requests, then.
    """

    what: What
    cause: str = ""
    at_ms: float
    ms: float
    steps: int = 0
    first_step: int = 0
    tokens: int = 0
    batch: int = 0
    budget: int = 0
    running: int = 0
    waiting: int = 0


class Step(msgspec.Struct):
    """A step that ran a request. `tokens`: computed of it; `rows`, `step_tokens`: of the whole step; `ms`: null while
    it runs."""

    step: int
    at_ms: float | None
    ms: float | None
    tokens: int
    rows: int
    step_tokens: int


class Sums(msgspec.Struct):
    """Milliseconds. They add up to `total_ms`.

    Attributes:
        before_ms: until it was with the engine. waited: by cause. waiting_ms: all of that.
        ran_ms: in `steps` steps. own_ms: of that, its share by tokens; the rest was its neighbours'.
        others_ms: for the other choices. delivery_ms: after the engine. lost_ms: unknown, or without an engine.
    """

    total_ms: float
    before_ms: float
    waiting_ms: float
    waited: dict[str, float]
    ran_ms: float
    steps: int
    own_ms: float
    others_ms: float
    delivery_ms: float
    lost_ms: float


class Choice(msgspec.Struct, kw_only=True):
    """One choice of a request.

    Attributes:
        known: whether an engine told of it. engines: how many had it.
        ahead: requests that waited when it came to the engine.
        tokens: of the answer. steps_left_out: earlier ones than those in `steps`.
    """

    index: int
    state: Literal["running", "finished"]
    finish_reason: FinishReason | None
    known: bool
    engines: int
    ahead: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    ttft_ms: float | None
    phases: list[Phase]
    sums: Sums
    steps: list[Step]
    steps_left_out: int


class Summary(msgspec.Struct, kw_only=True):
    """A request in short. `time`: when it came, seconds since 1970."""

    id: str
    kind: str
    state: Literal["running", "finished"]
    time: float
    total_ms: float
    ttft_ms: float | None
    prompt_tokens: int
    tokens: int
    choices: int
    finish_reasons: list[FinishReason | None]


class Requests(msgspec.Struct):
    """`GET /debug/requests`: the last ones first."""

    data: list[Summary]


class Account(msgspec.Struct, kw_only=True):
    """`GET /debug/requests/ID`.

    Attributes:
        latest: index of the choice that ended last. choices_left_out: others than those in `choices`.
        advice: what would have made it faster.
        notes: what this account lacks, and why.
    """

    id: str
    kind: str
    state: Literal["running", "finished"]
    streamed: bool
    time: float
    total_ms: float
    ttft_ms: float | None
    latest: int
    choices: list[Choice]
    choices_left_out: int
    advice: str
    notes: list[str]


_WHOLE = ("stop", "length")
_AT_ONCE = 0.001  # seconds


def summary(course: Course, now: float) -> Summary:
    """A request in short."""
    passages = course.passages
    return Summary(
        id=course.id,
        kind=course.kind,
        state="running" if course.ended is None else "finished",
        time=course.time,
        total_ms=_ms(_end(course, now) - course.arrived),
        ttft_ms=_first([passage.first for passage in passages], course.arrived),
        prompt_tokens=course.prompt_tokens,
        tokens=sum(passage.tokens for passage in passages),
        choices=len(passages),
        finish_reasons=[passage.reason for passage in passages],
    )


def latest(course: Course) -> int:
    """Index of the choice that ended last, or has not ended."""
    ends = [math.inf if passage.ended is None else passage.ended for passage in course.passages]
    return ends.index(max(ends))


def account(
    course: Course, told: Mapping[int, Explained], shown: Iterable[int], now: float, limits: Mapping[str, int]
) -> Account:
    """A request's account.

    Args:
        told: what the engine says, by the id that it knows a choice by.
        shown: indices of the choices to be told of.
        limits: most of `batch` and `budget` that may be set.
    """
    choices = [_Teller(course, course.passages[index], told, now).choice() for index in shown]
    last = latest(course)
    judged = next((one for one in choices if one.index == last), choices[0])
    return Account(
        id=course.id,
        kind=course.kind,
        state="running" if course.ended is None else "finished",
        streamed=course.streamed,
        time=course.time,
        total_ms=_ms(_end(course, now) - course.arrived),
        ttft_ms=_first([passage.first for passage in course.passages], course.arrived),
        latest=last,
        choices=choices,
        choices_left_out=len(course.passages) - len(choices),
        advice=advise(judged, limits),
        notes=_notes(course, choices),
    )


def _notes(course: Course, choices: list[Choice]) -> list[str]:
    notes = []
    if any(not one.known for one in choices):
        notes.append("the engine tells nothing of it: it remembers the last requests, and answers between steps")
    deaths = sum(stint.died for passage in course.passages for stint in passage.stints)
    if deaths:
        notes.append("an engine died with this request: what happened there is not known; another one resumed it")
    if any(phase.cause == "forgotten" for one in choices for phase in one.phases):
        notes.append("some of it was so long ago that the engine has forgotten the steps")
    return notes


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _end(course: Course, now: float) -> float:
    """When a request's time ends: its answer was sent, or will never be, or it is still under way."""
    if course.ended is None:
        return now
    return course.ended if math.isnan(course.sent) else max(course.sent, course.ended)


def _first(moments: list[float | None], arrived: float) -> float | None:
    known = [moment for moment in moments if moment is not None]
    return _ms(min(known) - arrived) if known else None


@dataclass(slots=True)
class _Stretch:
    """A phase in the making. Seconds, `time.monotonic()`. `engine`: what the engine says of it."""

    start: float
    end: float
    what: What
    cause: str
    engine: EnginePhase | None

    def phase(self, arrived: float) -> Phase:
        made = Phase(what=self.what, cause=self.cause, at_ms=_ms(self.start - arrived), ms=_ms(self.end - self.start))
        if (told := self.engine) is not None:
            made.steps, made.first_step, made.tokens = told.steps, told.first_step, told.tokens
            made.batch, made.budget, made.running, made.waiting = told.batch, told.budget, told.running, told.waiting
        return made


class _Teller:
    """Tells of one choice. Each phase begins where the one before it ended: `self._at`."""

    def __init__(self, course: Course, passage: Passage, told: Mapping[int, Explained], now: float) -> None:
        self._course = course
        self._passage = passage
        self._told = told
        self._now = now
        self._at = course.arrived
        self._phases: list[_Stretch] = []
        self._steps: list[Step] = []
        self._own = 0.0
        self._left_out = 0

    def choice(self) -> Choice:
        passage, course = self._passage, self._course
        self._tell()
        stories = [self._told[stint.request_id] for stint in passage.stints if stint.request_id in self._told]
        stories = [story for story in stories if story.known]
        return Choice(
            index=passage.choice,
            state="running" if passage.ended is None else "finished",
            finish_reason=passage.reason,
            known=bool(stories),
            engines=len(passage.stints),
            ahead=stories[0].ahead if stories else 0,
            preemptions=sum(story.preemptions for story in stories),
            prompt_tokens=passage.prompt_tokens,
            cached_tokens=passage.cached_tokens,
            tokens=passage.tokens,
            ttft_ms=_first([passage.first], course.arrived),
            phases=[one.phase(course.arrived) for one in self._phases],
            sums=self._sums(),
            steps=self._steps,
            steps_left_out=self._left_out,
        )

    def _tell(self) -> None:
        course, passage = self._course, self._passage
        self._until(course.read, "reading")
        self._until(course.prepared, "preparing")
        self._until(course.bound, "binding")
        self._until(passage.accepted, "submitting")
        for stint in passage.stints:
            # Nobody held it up if it was sent at once.
            self._until(stint.sent, "submitting" if stint.sent - passage.accepted < _AT_ONCE else "held")
            self._stint(stint)
        if passage.ended is None:
            self._until(self._now, "held")
            return
        self._until(passage.ended, "delivering")
        if course.ended is not None:
            self._until(course.ended, "others")
        self._until(_end(course, self._now), "delivering")

    def _stint(self, stint: Stint) -> None:
        """What happened in one engine."""
        passage, story = self._passage, self._told.get(stint.request_id)
        end = next(one for one in (stint.left, passage.ended, self._now) if one is not None)
        if stint.died or story is None or not story.known:
            self._until(end, "lost")
            return
        last = end if story.ended is None else min(end, story.ended)
        if stint.left is None and passage.last is not None and passage.reason in _WHOLE and story.reason not in _WHOLE:
            last = _last_end(story, passage.last)  # at a stop string, of which the engine hears some steps later
        self._waits(min(story.submitted, last), "step")
        for phase in story.phases:
            self._engine(phase, last)
        self._note_steps(story, last)

    def _engine(self, phase: EnginePhase, last: float) -> None:
        end = min(phase.end, last)
        if phase.cause != "running":
            self._waits(end, phase.cause, phase)
        elif end > self._at:
            self._add(end, "running", "", phase)

    def _waits(self, end: float, cause: str, phase: EnginePhase | None = None) -> None:
        """A wait in the engine; that for the step under way begins when the request is sent there."""
        if end > self._at:
            self._add(end, "waiting", cause, phase)

    def _until(self, end: float, what: What) -> None:
        if end > self._at:  # not if it is unknown
            self._add(end, what, "")

    def _add(self, end: float, what: What, cause: str, phase: EnginePhase | None = None) -> None:
        before = self._phases[-1] if self._phases else None
        if before is not None and (before.what, before.cause) == (what, cause) and what != "running":
            self._at = self._phases.pop().start
        self._phases.append(_Stretch(self._at, end, what, cause, phase))
        self._at = end

    def _note_steps(self, story: Explained, last: float) -> None:
        arrived = self._course.arrived
        columns = (
            np.frombuffer(story.numbers, "<i8").tolist(),
            np.frombuffer(story.starts, "<f8").tolist(),
            np.frombuffer(story.ends, "<f8").tolist(),
            np.frombuffer(story.own, "<i4").tolist(),
            np.frombuffer(story.rows, "<i4").tolist(),
            np.frombuffer(story.tokens, "<i4").tolist(),
        )
        for number, start, end, own, rows, tokens in zip(*columns, strict=True):
            if start < last:
                took = None if math.isinf(end) else _ms(end - start)
                self._steps.append(Step(number, _ms(start - arrived), took, own, rows, tokens))
        self._own += story.own_seconds
        self._left_out += story.left_out

    def _sums(self) -> Sums:
        by: dict[str, float] = {}
        waited: dict[str, float] = {}
        for phase in self._phases:
            took = (phase.end - phase.start) * 1e3
            by[phase.what] = by.get(phase.what, 0.0) + took
            if phase.what == "waiting":
                waited[phase.cause] = waited.get(phase.cause, 0.0) + took
        before = sum(by.get(what, 0.0) for what in ("reading", "preparing", "binding", "submitting"))
        ran = by.get("running", 0.0)
        return Sums(
            total_ms=sum(by.values()),
            before_ms=before,
            waiting_ms=by.get("waiting", 0.0),
            waited=dict(sorted(waited.items(), key=lambda item: -item[1])),
            ran_ms=ran,
            steps=sum(one.engine.steps for one in self._phases if one.engine is not None and one.what == "running"),
            own_ms=min(ran, self._own * 1e3),
            others_ms=by.get("others", 0.0),
            delivery_ms=by.get("delivering", 0.0),
            lost_ms=by.get("lost", 0.0) + by.get("held", 0.0),
        )


def _last_end(story: Explained, known: float) -> float:
    """When the last step ended of which the results were known at `known`."""
    ends = np.frombuffer(story.ends, "<f8")
    ends = ends[ends <= known]
    return float(ends.max()) if len(ends) else known
