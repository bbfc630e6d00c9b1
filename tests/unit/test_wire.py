"""Messages come out of a stream as they went in, however it is cut."""

from __future__ import annotations

import random

import pytest

from noria.wire import Frames, frame

MESSAGES = [b"", b"a", b"bc" * 400, b"", bytes(range(256)) * 999, b"end"]


@pytest.mark.parametrize("most", [1, 3, 4, 5, 1000, 1 << 20])
def test_the_pieces_do_not_matter(most: int) -> None:
    rng = random.Random(most)
    stream = b"".join(map(frame, MESSAGES))
    frames, messages, at = Frames(), [], 0
    while at < len(stream):
        end = at + rng.randint(1, most)
        messages += frames.feed(stream[at:end])
        at = end
    assert messages == MESSAGES


def test_a_message_comes_with_its_last_byte() -> None:
    frames = Frames()
    assert frames.feed(frame(b"first") + frame(b"second")[:-1]) == [b"first"]
    assert frames.feed(b"") == []
    assert frames.feed(memoryview(b"d" + frame(b"third"))) == [b"second", b"third"]
