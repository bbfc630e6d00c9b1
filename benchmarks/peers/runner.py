"""Puts the loads on the engines, in the order of `schedule`, and keeps every measurement as soon as it is there.

All engines stay up while their settings last, but only one of them is ever at work. One that dies, hangs or cannot be
had loses its own rows and nobody else's.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from noria.bench.workloads import english_text, make_requests, presets
from noria.frontend.tokenizer import load_tokenizer
from peers.base import Load, Outcome, Peer, Place, Session, Unavailable, Variant
from peers.schedule import Job, jobs, label
from peers.store import Report, Run, Store

WARM_UP_SEED = 100_003
WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8
# Seconds that a measurement may be expected to take before there is one of its kind.
GUESS = {"W1": 60.0, "W2": 15.0, "W3": 15.0, "W4": 30.0, "W5": 80.0}
START_GUESS = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        limit: seconds of one measurement. requests: at most so many a preset.
        seconds: no measurement begins that would not end within so many seconds from the start of the run.
        everything: see `schedule.jobs`.
    """

    presets: tuple[str, ...]
    turns: int
    limit: float
    requests: int | None = None
    seconds: float = float("inf")
    everything: bool = False


class Loads:
    """Makes the workloads: of a preset for a turn, the same for every engine, other prompts in every one of them."""

    def __init__(self, place: Place, plan: Plan) -> None:
        self._tokenizer = load_tokenizer(place.files)
        self._folder = place.folder("prompts")
        self._plan = plan
        self._made: dict[tuple[str, int, int | None], Load] = {}

    def of(self, preset: str, turn: int, most: int | None = None) -> Load:
        """`most`: requests, where a variant gets only a part of the preset."""
        if (preset, turn, most) not in self._made:
            spec = presets()[preset]
            asked = min(given for given in (spec.requests, self._plan.requests, most) if given is not None)
            spec = msgspec.structs.replace(spec, requests=asked)
            # A seed of its own for every preset too: the same start of a prompt would be found in a prefix cache.
            seed = 100 * turn + list(presets()).index(preset)
            text = self._text(seed)
            requests = make_requests(spec, self._tokenizer, seed, "text", text)
            self._made[preset, turn, most] = Load(preset, spec, seed, text, tuple(requests), self._plan.limit)
        return self._made[preset, turn, most]

    def warm_up(self, load: Load) -> Load:
        """A few short requests, of prompts that do not come again."""
        spec = msgspec.structs.replace(
            load.spec, requests=min(WARM_UP_REQUESTS, load.spec.requests), output=WARM_UP_TOKENS, shared=0
        )
        text = self._text(WARM_UP_SEED)
        requests = make_requests(spec, self._tokenizer, WARM_UP_SEED, "text", text)
        return replace(load, spec=spec, seed=WARM_UP_SEED, text=text, requests=tuple(requests))

    def _text(self, seed: int) -> Path:
        """The English text, begun elsewhere: the shared prefix of a workload is cut from its beginning."""
        path = self._folder / f"{seed}.txt"
        words = english_text().split(" ")
        start = seed * 1009 % len(words)
        path.write_text(" ".join(words[start:] + words[:start]), encoding="utf-8")
        return path


class Runner:
    """Measures what the store lacks. `show` takes lines about the progress."""

    def __init__(
        self, place: Place, engines: Sequence[Peer], plan: Plan, store: Store, about: dict[str, Any], show: Any = print
    ) -> None:
        self._place = place
        self._engines = engines
        self._plan = plan
        self._store = store
        self._about = about
        self._show = show
        self._loads = Loads(place, plan)
        self._end = time.monotonic() + plan.seconds
        self._took: dict[tuple[str, str, str], float] = {}
        self._failed: set[tuple[str, str, str]] = set()
        self.report = Report()

    def run(self, only: Sequence[str] = ()) -> Report:
        """`only`: names of the other engines' variants; all if empty. Of Noria's, those run that they are compared
        with, and all where there is no other."""
        ready = [engine for engine in self._engines if self._prepared(engine)]
        others = [
            (engine, variant)
            for engine in ready
            if engine.name != "Noria"
            for variant in engine.variants
            if not only or variant.name in only
        ]
        compared = {name for _, variant in others for name in variant.against}
        ours = [
            (engine, variant)
            for engine in ready
            if engine.name == "Noria"
            for variant in engine.variants
            if not others or variant.name in compared
        ]
        variants = {(engine.name, variant.name): (engine, variant) for engine, variant in [*ours, *others]}
        todo = jobs(list(variants), self._plan.presets, self._plan.turns, self._plan.everything)
        with contextlib.ExitStack() as stack:
            players = {key: stack.enter_context(Player(*about)) for key, about in variants.items()}
            self._measure_all(todo, players)
        return self.report

    def _prepared(self, engine: Peer) -> bool:
        self._show(f"{engine.name}: installing, if need be, and converting the model")
        try:
            engine.prepare()
            self.report.versions[engine.name] = engine.version()
        except Exception as error:  # whatever it is, the others go on
            self.report.missing[engine.name] = reason(error)
            self._show(f"{engine.name}: {reason(error)}")
            return False
        return True

    def _measure_all(self, todo: Iterable[Job], players: dict[tuple[str, str], Player]) -> None:
        for job in todo:
            player, key = players[job.engine, job.variant], (job.engine, job.variant, job.preset)
            if (known := self._store.get(job)) is not None:
                self._note(job, known)
                continue
            if key in self._failed or (job.engine, job.variant, "*") in self._failed:
                continue
            if time.monotonic() + self._expected(job, player) > self._end:
                self._show(f"{job.preset} turn {job.turn + 1}: {label(*key[:2])}: no time left")
                continue
            self._measure(job, player)

    def _expected(self, job: Job, player: Player) -> float:
        load = self._load(job, player)
        start = START_GUESS if player.needs_start(load) else 0.0
        return start + self._took.get((job.engine, job.variant, job.preset), GUESS.get(job.preset, 60.0))

    def _load(self, job: Job, player: Player) -> Load:
        caps = [most for most in (job.most, player.variant.most_requests) if most is not None]
        return self._loads.of(job.preset, job.turn, min(caps, default=None))

    def _measure(self, job: Job, player: Player) -> None:
        load = self._load(job, player)
        scratch = self._place.folder("scratch")
        began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        name = label(job.engine, job.variant)
        try:
            if player.ready_for(load):
                player.session.measure(self._loads.warm_up(load), scratch)
            outcome = player.session.measure(load, scratch)
        except Exception as error:  # it did not start, or its driver broke: the others go on
            self._failed.add((job.engine, job.variant, job.preset if player.was_up else "*"))
            self.report.missing[f"{name} on {job.preset}"] = reason(error)
            self._show(f"{job.preset} turn {job.turn + 1}: {name}: {reason(error)}")
            player.close()
            return
        short = load.spec.requests if load.spec.requests < presets()[job.preset].requests else None
        run = Run(job.preset, job.turn, job.engine, job.variant, outcome)
        run.start_s, run.settings, run.requests = player.session.seconds, player.settings, short
        run.commit, run.began = self._about.get("commit"), began
        self._store.put(job, run)
        self._note(job, run)
        self._show(f"{job.preset} turn {job.turn + 1}: {name}: {brief(outcome)}")
        if outcome.broken:
            player.close()

    def _note(self, job: Job, run: Run) -> None:
        self.report.runs.append(run)
        key = (job.engine, job.variant, job.preset)
        if run.outcome.broken:
            self._failed.add(key)
        elif run.outcome.figures:
            self._took[key] = 1.1 * run.outcome.figures["wall_s"] + 3.0


class Player:
    """One variant of an engine, up as long as its settings stay the same."""

    def __init__(self, peer: Peer, variant: Variant) -> None:
        self._peer = peer
        self.variant = variant
        self._stack = contextlib.ExitStack()
        self._session: Session | None = None
        self.settings: tuple[str, ...] = ()
        self.was_up = False

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    def needs_start(self, load: Load) -> bool:
        return self._session is None or self._peer.settings(self.variant, load) != self.settings

    def ready_for(self, load: Load) -> bool:
        """Starts it if it is not up in the right settings; whether it did. Raises Unavailable."""
        if not self.needs_start(load):
            return False
        self.close()
        settings = self._peer.settings(self.variant, load)
        self._session = self._stack.enter_context(self._peer.start(self.variant, settings))
        self.settings = settings
        self.was_up = True
        return True

    def close(self) -> None:
        self._session = None
        self._stack.close()


def reason(error: Exception) -> str:
    """A line for the table."""
    text = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:80]} … {line[-300:]}"  # the end of a log says what happened


def brief(outcome: Outcome) -> str:
    if outcome.figures is None:
        return outcome.error or "failed"
    text = f"{outcome.figures['output_tokens_per_s']:,.1f} tok/s in {outcome.figures['wall_s']:,.1f} s"
    return f"{text} ({outcome.error})" if outcome.error else text


def terminate(signum: int, _: object) -> None:
    """A handler for signals: ends the run in order, so that no server is left behind."""
    sys.exit(128 + signum)
