"""Workloads: what is asked, how much of it, and when. Frozen by a seed; knows nothing of servers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import yaml

from noria.errors import ConfigError

Lengths = int | tuple[int, int]
_MOST_CUTS = 200  # tries to find a prompt that is not there yet


class Encoder(Protocol):
    """The part of a tokeniser that a workload needs."""

    def encode(self, text: str, add_bos: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload as data.

    Attributes:
        requests: how many.
        concurrency: closed loop: that many callers, each asks again when it has its answer. None: open loop.
        rate: open loop: mean arrivals per second; None: all at once.
        burstiness: shape of the gamma distribution of the gaps between arrivals: 1 is Poisson, below 1 comes in bursts.
        input, output: tokens, fixed or [low, high] drawn log-uniformly. shared: tokens that all prompts begin with.
    """

    about: str = ""
    requests: int = 100
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    input: Lengths = 128
    output: Lengths = 128
    shared: int = 0

    def __post_init__(self) -> None:
        for name, value, low in (("num-requests", self.requests, 1), ("concurrency", self.concurrency, 1)):
            if value is not None and value < low:
                raise ConfigError(f"must be at least {low}, got {value}", f"--{name}")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"must be above 0, got {self.rate}", "--request-rate")
        if not self.burstiness > 0:
            raise ConfigError(f"must be above 0, got {self.burstiness}", "--burstiness")
        if self.shared < 0:
            raise ConfigError(f"must be at least 0, got {self.shared}", "--shared-len")
        for name, lengths in (("input-len", self.input), ("output-len", self.output)):
            low, high = (lengths, lengths) if isinstance(lengths, int) else lengths
            if not 1 <= low <= high:
                raise ConfigError(f"must be N or LOW:HIGH with 1 ≤ LOW ≤ HIGH, got {lengths}", f"--{name}")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: `prompt_ids` and the text that encodes to them (BOS included in the count), tokens to generate,
    and seconds after the start at which an open loop sends it."""

    prompt: str
    prompt_ids: tuple[int, ...]
    output_tokens: int
    at: float = 0.0


Source = Literal["text", "random"]


def presets() -> dict[str, WorkloadSpec]:
    """The preset workloads by name."""
    text = resources.files("noria.bench").joinpath("data/presets.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, WorkloadSpec])


def english_text() -> str:
    """About 130 kB of English in the public domain, the default source of prompts."""
    return resources.files("noria.bench").joinpath("data/english.txt").read_text(encoding="utf-8")


def make_requests(
    spec: WorkloadSpec, encoder: Encoder, seed: int = 0, source: Source = "text", text_path: Path | None = None
) -> list[BenchRequest]:
    """Draws the requests of a workload; the same seed gives the same ones.

    Args:
        source: `text` cuts pieces out of English (or of `text_path`), `random` draws words of it independently.

    Raises:
        ConfigError: the text is not UTF-8, or has too few different pieces. Prompts are all different, since equal ones
            would be taken from a prefix cache.
    """
    rng = random.Random(seed)
    try:
        text = text_path.read_text(encoding="utf-8") if text_path else english_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text_path} as UTF-8 text: {error}", "--dataset") from None
    words = text.split(" ")
    if source == "random":
        words = rng.choices(words, k=len(words))
    arrivals = _arrivals(spec, rng)
    prompts = _Prompts(words, encoder, rng, spec.requests, spec.shared)
    made = []
    for at in arrivals:
        prompt, ids = prompts.cut(_length(spec.input, rng))
        made.append(BenchRequest(prompt, ids, _length(spec.output, rng), at))
    return made


def place_requests(
    rows: Sequence[tuple[float, int, int]], encoder: Encoder, seed: int = 0, unit: float = 1.0
) -> list[BenchRequest]:
    """Requests of known times and lengths, with different prompts of English.

    Args:
        rows: time of arrival, prompt tokens, output tokens. unit: seconds that a time of 1 stands for.
    """
    prompts = _Prompts(english_text().split(" "), encoder, random.Random(seed), len(rows))
    return [BenchRequest(*prompts.cut(tokens), output, at * unit) for at, tokens, output in rows]


class _Prompts:
    """Cuts prompts that are all different.

    Args:
        count: how many are wanted. shared: tokens that all prompts begin with.
    """

    def __init__(self, words: list[str], encoder: Encoder, rng: random.Random, count: int, shared: int = 0) -> None:
        self._words, self._encoder, self._rng, self._count = words, encoder, rng, count
        self._cutter = _Cutter(words, encoder)
        self._shared = self._cutter.cut(0, shared, first=True) if shared else ""
        self._seen: set[str] = set()

    def cut(self, tokens: int) -> tuple[str, tuple[int, ...]]:
        """The next one, of `tokens` own tokens, and what it encodes to."""
        for _ in range(_MOST_CUTS):
            start = self._rng.randrange(len(self._words))
            prompt = self._shared + self._cutter.cut(start, tokens, first=not self._shared)
            if prompt not in self._seen:
                break
        else:
            raise ConfigError(
                f"the text has too few pieces of {tokens} tokens for {self._count} different prompts: "
                "take a longer text or longer prompts",
                "--dataset",
            )
        self._seen.add(prompt)
        return prompt, tuple(self._encoder.encode(prompt, add_bos=True))


class _Cutter:
    """Cuts pieces of an exact number of tokens out of a list of words."""

    def __init__(self, words: list[str], encoder: Encoder) -> None:
        self._words = words
        self._encoder = encoder

    def cut(self, start: int, tokens: int, first: bool) -> str:
        """About `tokens` tokens of text from word `start` on, exactly so where the tokeniser allows it.

        A piece that is not the first begins with a space, so that it does not merge with what stands before it.
        """
        lead = "" if first else " "
        for attempt in range(8):
            begin = (start + attempt * 31) % len(self._words)
            taken = (self._words[begin:] + self._words)[: 4 * tokens + 8]
            ids = self._encoder.encode(lead + " ".join(taken), add_bos=first)
            piece = self._encoder.decode(ids[:tokens], skip_special=True)
            piece = piece if piece.startswith(lead) else lead + piece
            if len(self._encoder.encode(piece, add_bos=first)) == tokens:
                break
        return piece


def _length(lengths: Lengths, rng: random.Random) -> int:
    if isinstance(lengths, int):
        return lengths
    low, high = lengths
    return min(high, round(low * math.exp(rng.random() * math.log(high / low))))


def _arrivals(spec: WorkloadSpec, rng: random.Random) -> list[float]:
    if spec.rate is None:
        return [0.0] * spec.requests
    at = 0.0
    times = []
    for _ in range(spec.requests):
        times.append(at)
        at += rng.gammavariate(spec.burstiness, 1.0 / (spec.rate * spec.burstiness))
    return times
