"""The order of the measurements: each engine in turns with Noria, A B A B, on the same prompts.

Noria and its counterpart are both up during their turns, but only one of them is ever at work. A machine's speed
drifts; within a pair of turns it hardly does, so ratios are taken turn by turn.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from noria.bench.workloads import english_text, make_requests, presets
from noria.frontend.tokenizer import load_tokenizer
from peers.base import Load, Outcome, Peer, Place, Session, Unavailable, Variant

WARM_UP_SEED = 100_003
WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8


@dataclass(slots=True)
class Run:
    """One measurement. `pair`: the engine and variant whose turns it belongs to. `settings`: what it ran with."""

    preset: str
    engine: str
    variant: str
    pair: str
    turn: int
    outcome: Outcome
    start_s: float | None = None
    settings: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """All measurements, and engines (or variants) that could not be had, with the reason."""

    runs: list[Run] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `requests`: at most so many a preset; `limit`: seconds of one measurement."""

    presets: tuple[str, ...]
    turns: int
    limit: float
    requests: int | None = None


def label(engine: str, variant: str) -> str:
    return f"{engine} {variant}"


class Loads:
    """Makes the workloads: of a preset for a turn, the same for every engine, other prompts in every turn."""

    def __init__(self, place: Place, plan: Plan) -> None:
        self._tokenizer = load_tokenizer(place.files)
        self._folder = place.folder("prompts")
        self._plan = plan
        self._made: dict[tuple[str, int], Load] = {}

    def of(self, preset: str, turn: int) -> Load:
        if (preset, turn) not in self._made:
            spec = presets()[preset]
            if self._plan.requests is not None:
                spec = msgspec.structs.replace(spec, requests=min(spec.requests, self._plan.requests))
            text = self._text(turn)
            requests = make_requests(spec, self._tokenizer, turn, "text", text)
            self._made[preset, turn] = Load(preset, spec, turn, text, tuple(requests), self._plan.limit)
        return self._made[preset, turn]

    def warm_up(self, load: Load) -> Load:
        """A few short requests, of prompts that do not come again."""
        spec = msgspec.structs.replace(
            load.spec, requests=min(WARM_UP_REQUESTS, load.spec.requests), output=WARM_UP_TOKENS, shared=0
        )
        text = self._text(WARM_UP_SEED)
        requests = make_requests(spec, self._tokenizer, WARM_UP_SEED, "text", text)
        return replace(load, spec=spec, seed=WARM_UP_SEED, text=text, requests=tuple(requests))

    def _text(self, turn: int) -> Path:
        """The English text, begun elsewhere: the shared prefix of a workload is cut from its beginning."""
        path = self._folder / f"{turn}.txt"
        words = english_text().split(" ")
        start = turn * 1009 % len(words)
        path.write_text(" ".join(words[start:] + words[:start]), encoding="utf-8")
        return path


def turns(engine: str, variant: Variant, count: int) -> Iterator[tuple[int, str, str]]:
    """(turn, engine, variant) in the order of measuring: A B A B, or A1 A2 B A1 A2 B with two of Noria's."""
    for turn in range(count):
        for name in variant.against:
            yield turn, "Noria", name
        yield turn, engine, variant.name


class Runner:
    """Measures every variant of every engine against Noria's counterparts. `show` takes lines about the progress."""

    def __init__(self, place: Place, noria: Peer, plan: Plan, show: Any = print) -> None:
        self._place = place
        self._noria = noria
        self._plan = plan
        self._show = show
        self._loads = Loads(place, plan)
        self.report = Report(versions={noria.name: noria.version()})

    def run(self, peers: Sequence[Peer], only: Sequence[str] = ()) -> Report:
        """`only`: names of variants; all if empty. An engine that fails is noted and the next one is taken."""
        for peer in peers:
            self._show(f"{peer.name}: installing, if need be, and converting the model")
            try:
                peer.prepare()
                self.report.versions[peer.name] = peer.version()
            except Exception as error:  # whatever it is, the others go on
                self.report.missing[peer.name] = reason(error)
                self._show(f"{peer.name}: {reason(error)}")
                continue
            for variant in peer.variants:
                if not only or variant.name in only:
                    self._pair(peer, variant)
        return self.report

    def _pair(self, peer: Peer, variant: Variant) -> None:
        name = label(peer.name, variant.name)
        ours = {v.name: v for v in self._noria.variants}
        with contextlib.ExitStack() as stack:
            players = {("Noria", v): stack.enter_context(Player(self._noria, ours[v])) for v in variant.against}
            players[peer.name, variant.name] = stack.enter_context(Player(peer, variant))
            for preset in self._plan.presets:
                try:
                    self._preset(preset, name, players, turns(peer.name, variant, self._plan.turns))
                except Exception as error:  # the other presets go on
                    self.report.missing[f"{name} on {preset}"] = reason(error)
                    self._show(f"{preset} {name}: {reason(error)}")

    def _preset(
        self, preset: str, pair: str, players: dict[tuple[str, str], Player], order: Iterator[tuple[int, str, str]]
    ) -> None:
        scratch = self._place.folder("scratch")
        first = self._loads.of(preset, 0)
        for player in players.values():
            if player.ready_for(first):
                player.session.measure(self._loads.warm_up(first), scratch)
        failed: set[tuple[str, str]] = set()
        for turn, engine, variant in order:
            player = players[engine, variant]
            if (engine, variant) in failed:
                continue
            load = self._loads.of(preset, turn)
            player.ready_for(load)
            outcome = player.session.measure(load, scratch)
            seconds, settings = player.session.seconds, player.settings
            self.report.runs.append(Run(preset, engine, variant, pair, turn, outcome, seconds, settings))
            self._show(f"{preset} turn {turn + 1}: {label(engine, variant)}: {brief(outcome)}")
            if outcome.broken:
                player.close()
                failed.add((engine, variant))


class Player:
    """One variant of an engine, up as long as its settings stay the same."""

    def __init__(self, peer: Peer, variant: Variant) -> None:
        self._peer = peer
        self._variant = variant
        self._stack = contextlib.ExitStack()
        self._session: Session | None = None
        self.settings: tuple[str, ...] = ()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    def ready_for(self, load: Load) -> bool:
        """Starts it if it is not up in the right settings; whether it did. Raises Unavailable."""
        settings = self._peer.settings(self._variant, load)
        if self._session is not None and settings == self.settings:
            return False
        self.close()
        self._session = self._stack.enter_context(self._peer.start(self._variant, settings))
        self.settings = settings
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
