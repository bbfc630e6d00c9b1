"""What is measured, in which order: the rows that matter most come first, every turn of them before the next turn.

One turn of a preset runs every engine once, close together, on the same prompts: what is compared is measured within
minutes. Counterparts of one precision stand next to each other, for a machine's speed drifts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Within a turn. What is not listed follows in the order of the engines.
ORDER = (
    "OpenVINO GenAI int8",
    "Noria int8",
    "llama.cpp Q8_0",
    "vLLM bf16",
    "vLLM f32",
    "Noria bf16",
    "llama.cpp BF16",
    "Noria stored",
    "llama.cpp Q4_0",
    "llama.cpp Q4_1",
)
# Measured once, late: slow, and not the engine's best on that preset, or far from the best peer there.
ONCE: dict[str, tuple[str, ...]] = {
    "W1": ("llama.cpp Q4_0", "llama.cpp Q4_1", "llama.cpp BF16", "transformers bf16"),
    "W2": ("transformers bf16",),
    "W3": ("llama.cpp Q4_0", "llama.cpp Q4_1", "llama.cpp BF16", "transformers bf16"),
    "W4": ("llama.cpp Q8_0",),
    "W5": ("llama.cpp Q8_0",),
}
# Not measured unless everything is asked for: neither quick nor of interest there.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "W4": ("llama.cpp Q4_0", "llama.cpp Q4_1", "llama.cpp BF16", "transformers bf16"),
    "W5": ("llama.cpp Q4_0", "llama.cpp Q4_1", "llama.cpp BF16", "transformers bf16"),
}
ONCE_REQUESTS = {"W1": 100, "W5": 100}  # of what is measured once: half of them, all callers are there
ONCE_AT = (2, 3)  # before which turn's which preset, on prompts of the turn before


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement. `turn` counts from 0; `most`: requests, where it gets only a part of the preset."""

    preset: str
    turn: int
    engine: str
    variant: str
    most: int | None = None

    @property
    def name(self) -> str:
        """Of its file in the store."""
        return f"{self.preset}-{self.turn + 1}-{self.engine}-{self.variant}".replace(" ", "_")


def label(engine: str, variant: str) -> str:
    return f"{engine} {variant}"


def jobs(
    players: Sequence[tuple[str, str]], presets: Sequence[str], turns: int, everything: bool = False
) -> Iterator[Job]:
    """All measurements in order.

    Args:
        players: (engine, variant), Noria's own among them.
        everything: every variant on every preset in every turn.
    """
    ordered = sorted(players, key=_rank)
    for turn in range(turns):
        for index, preset in enumerate(presets):
            if (turn, index) == ONCE_AT and not everything:
                yield from _once(ordered, presets, turn - 1)
            often = [player for player in ordered if everything or not _seldom(preset, player)]
            yield from (Job(preset, turn, *player) for player in often)
    if (turns - 1, len(presets) - 1) < ONCE_AT and not everything:
        yield from _once(ordered, presets, min(turns, ONCE_AT[0]) - 1)


def _once(players: Sequence[tuple[str, str]], presets: Sequence[str], turn: int) -> Iterator[Job]:
    for preset in presets:
        for player in players:
            if label(*player) in ONCE.get(preset, ()):
                yield Job(preset, turn, *player, ONCE_REQUESTS.get(preset))


def _seldom(preset: str, player: tuple[str, str]) -> bool:
    return label(*player) in ONCE.get(preset, ()) + LEFT_OUT.get(preset, ())


def _rank(player: tuple[str, str]) -> int:
    name = label(*player)
    return ORDER.index(name) if name in ORDER else len(ORDER)
