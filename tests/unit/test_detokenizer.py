"""Text must not depend on how the tokens arrive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.frontend.detokenizer import Detokenizer, Pieces, StopFinder


class Bytes:
    """Tokens are bytes; 256 is a control token, 257 a token of three bytes that ends within a character."""

    vocab_size = 258
    special_ids = frozenset((256,))

    def token_bytes(self, token_id: int) -> bytes:
        return {256: b"<end>", 257: "–".encode()[:2] + b"x"}.get(token_id) or bytes((token_id,))


def run(
    tokens: Sequence[int], cuts: Sequence[int], stop: Sequence[str] = (), **how: int
) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens used, when the tokens come in pieces cut at these places."""
    maker = Detokenizer(Pieces(Bytes()), stop, **how)
    out, used = [], 0
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(edges):
        text, taken, found = maker.push(tokens[start:end])
        out.append(text)
        used += taken
        if found is not None:
            return "".join(out), found, used
    text, _, found = maker.finish()
    return "".join(out) + text, found, used


def naive(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text one character longer at a time, until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


texts = st.text(st.sampled_from("ab–ö🌊 \n"), max_size=40)
stops = st.lists(st.text(st.sampled_from("ab–ö"), min_size=1, max_size=4), max_size=4)
cuts = st.lists(st.integers(0, 120), max_size=12)


@settings(max_examples=400, deadline=None)
@given(texts, stops, cuts)
def test_any_split_gives_the_same_text(text: str, stop: list[str], cuts: list[int]) -> None:
    made, found, _ = run(list(text.encode()), cuts, stop)
    assert (made, found) == naive(text, stop)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=40), cuts)
def test_bytes_that_are_no_text_are_replaced_alike(tokens: list[int], cuts: list[int]) -> None:
    data = b"".join(Bytes().token_bytes(token) for token in tokens if token != 256)
    assert run(tokens, cuts)[0] == data.decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(texts, stops, cuts)
def test_tokens_after_the_stop_string_are_not_used(text: str, stop: list[str], cuts: list[int]) -> None:
    tokens = list(text.encode())
    made, found, used = run(tokens, cuts, stop)
    if found is None:
        assert used == len(tokens)
    else:
        assert bytes(tokens[:used]).decode() == made + found


@settings(max_examples=200, deadline=None)
@given(texts, stops, cuts)
def test_a_stop_string_that_stays_is_the_end_of_the_text(text: str, stop: list[str], cuts: list[int]) -> None:
    kept, found, _ = run(list(text.encode()), cuts, stop, include_stop=True)
    cut, same = naive(text, stop)
    assert (kept, found) == (cut + (same or ""), same)


@settings(max_examples=200, deadline=None)
@given(texts, stops, cuts, st.integers(0, 40))
def test_stop_strings_begin_to_count_after_min_tokens(text: str, stop: list[str], cuts: list[int], least: int) -> None:
    """Each token is a byte: what the first `least` of them say is text, whatever it is, if it ends with a character."""
    data = text.encode()
    before = data[:least].decode("utf-8", "ignore")
    made, found, _ = run(list(data), cuts, stop, min_tokens=len(before.encode()))
    after, same = naive(text[len(before) :], stop)
    assert (made, found) == (before + after, same)


def test_text_that_may_become_a_stop_string_is_withheld() -> None:
    finder = StopFinder(["stop!", "op?"])
    assert finder.push("please st") == ("please ", None)
    assert finder.push("o") == ("", None)
    assert finder.push("p") == ("", None)
    assert finder.push("p") == ("stopp", None)
    assert finder.push("o") == ("", None)
    assert finder.flush() == "o"


def test_the_stop_string_that_ends_first_wins() -> None:
    assert StopFinder(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopFinder(["bc", "abc"]).push("xabcd") == ("x", "abc")


def test_no_character_comes_out_in_parts() -> None:
    maker = Detokenizer(Pieces(Bytes()))
    assert [maker.push([byte]).text for byte in "–".encode()] == ["", "", "–"]
    assert maker.push("🌊".encode()[:3]).text == ""
    assert maker.finish().text == "�"


def test_control_tokens() -> None:
    assert Detokenizer(Pieces(Bytes())).push([97, 256, 98]).text == "ab"
    assert Detokenizer(Pieces(Bytes()), skip_special=False).push([97, 256, 98]).text == "a<end>b"


def test_ids_beyond_the_tokeniser_are_empty() -> None:
    assert Detokenizer(Pieces(Bytes())).push([97, 4000, 98]).text == "ab"


@pytest.mark.parametrize(("least", "expected"), [(0, "a"), (2, "ab"), (3, "ab.b"), (5, "ab.b.")])
def test_stop_strings_are_not_looked_for_before_min_tokens(least: int, expected: str) -> None:
    text = run(list(b"ab.b."), [1, 2, 3], ["b"] if least == 0 else ["."], min_tokens=least)[0]
    assert text == expected


def test_a_hundred_streams_cost_little() -> None:
    pieces = Pieces(Bytes())
    plain = [Detokenizer(pieces) for _ in range(100)]
    stopped = [Detokenizer(pieces, ["\n\nHuman:", "<end>"]) for _ in range(100)]
    for makers, limit in ((plain, 10e-6), (stopped, 25e-6)):
        best = 1.0
        for _ in range(5):
            began = time.perf_counter()
            for token in b"water wheel\n" * 5:
                for maker in makers:
                    maker.push((token,))
            best = min(best, time.perf_counter() - began)
        assert best / 6000 < limit, f"{best / 6000 * 1e6:.1f} µs per token"
