"""Words of an answer are never cut by the edge of a terminal, however the answer comes."""

from __future__ import annotations

import random

import pytest

from noria.cli.wrap import WordWrap


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join(map(wrap.push, pieces)) + wrap.flush()


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("the wheel turns", 9, "the wheel\nturns"),
        ("the wheel turns", 10, "the wheel\nturns"),
        ("the wheel turns", 15, "the wheel turns"),
        ("a\n\n  indented  twice", 80, "a\n\n  indented  twice"),
        ("12345678901234 b c", 5, "12345678901234\nb c"),  # a word wider than the line, whose last part has 4 cells
        ("水車 水車", 8, "水車\n水車"),  # two cells a character
        ("one\ttwo", 80, "one    two"),
        ("", 5, ""),
    ],
)
def test_lines_break_between_words(text: str, width: int, expected: str) -> None:
    assert wrapped([text], width) == expected
    assert wrapped(list(text), width) == expected


def test_pieces_change_nothing_and_no_word_is_lost() -> None:
    draw = random.Random(7)
    text = " ".join("x" * draw.randint(1, 9) + draw.choice(["", "", "\n"]) for _ in range(200))
    whole = wrapped([text], 20)
    cuts = sorted(draw.sample(range(len(text)), 60))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert wrapped(pieces, 20) == whole
    assert whole.split() == text.split()
    assert max(map(len, whole.split("\n"))) <= 20
