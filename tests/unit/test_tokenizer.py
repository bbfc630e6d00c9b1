"""Tokenisers of every kind: byte-level BPE, SentencePiece BPE and unigram, and the rules that hold for all."""

from __future__ import annotations

import heapq
import random
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiny_tokenizers import (
    CONTROL,
    PIECES,
    byte_level,
    byte_level_values,
    made,
    pieces_of,
    sentencepiece,
    sentencepiece_values,
)
from noria.errors import InvalidRequestError, TokenizerError
from noria.frontend.pretokenizers import _BY_NAME, named_pretokenizer
from noria.frontend.tokenizer import _GPT2_BYTES, MARK, Tokenizer
from noria.frontend.tokenizer_gguf import SPACE, merges_from_scores

# ------------------------------------------------------------------------------------------------ byte-level BPE


def test_byte_level_merges_in_order() -> None:
    tokenizer = byte_level()
    assert pieces_of(tokenizer, tokenizer.encode("abc ab", False)) == ["abc", "Ġab"]
    assert tokenizer.vocab_size == 256 + 3 + 3


def test_byte_level_bytes_and_text() -> None:
    tokenizer = byte_level()
    text = "abc é 日本\n\t🦙 <tool>"
    ids = tokenizer.encode(text, False)
    assert tokenizer.decode(ids, True) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert tokenizer.token_bytes(tokenizer.raw.token_to_id("Ġab")) == b" ab"
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.decode([0xC3], True) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_every_text_survives_byte_level(text: str) -> None:
    tokenizer = _shared("gpt2")
    text = text.replace(MARK, "")
    assert tokenizer.decode(tokenizer.encode(text, True), True) == text


SPLITS = {
    "gpt-2": ["abc", "ĠD", "'s", "Ġ", "Ġx", "1234", "!?", "Ċ", "Ċ", "y"],
    "smollm": ["abc", "ĠD", "'s", "Ġ", "Ġx", "1", "2", "3", "4", "!?", "Ċ", "Ċ", "y"],
    "llama-bpe": ["abc", "ĠD", "'s", "Ġ", "Ġx", "123", "4", "!?ĊĊ", "y"],
    "qwen2": ["abc", "ĠD", "'s", "Ġ", "Ġx", "1", "2", "3", "4", "!?ĊĊ", "y"],
    "tekken": ["abc", "ĠD", "'s", "Ġ", "Ġx", "1", "2", "3", "4", "!?ĊĊ", "y"],
    "gpt-4o": ["abc", "ĠD's", "Ġ", "Ġx", "123", "4", "!?ĊĊ", "y"],
    "deepseek-v3": ["abc", "ĠD", "'s", "Ġ", "Ġx", "123", "4", "!?ĊĊ", "y"],
    "deepseek-llm": ["abc", "ĠD", "'", "s", "Ġ", "Ġx", "1234", "!?", "Ċ", "Ċ", "y"],
    "deepseek-coder": ["abc", "ĠD", "'", "s", "Ġ", "Ġx", "1", "2", "3", "4", "!?", "Ċ", "Ċ", "y"],
    "falcon": ["abc", "ĠD", "'", "s", "Ġ", "Ġx", "123", "4", "!?", "Ċ", "Ċ", "y"],
    "default": ["abc", "ĠD", "'", "s", "Ġ", "Ġx", "123", "4", "!?", "Ċ", "Ċ", "y"],
}


@pytest.mark.parametrize("name", SPLITS)
def test_named_pretokenizers_cut_as_the_models_do(name: str) -> None:
    pieces = named_pretokenizer(name).build().pre_tokenize_str("abc D's  x1234!?\n\ny")
    assert [piece for piece, _ in pieces] == SPLITS[name]


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_every_named_pretokenizer_loses_nothing(name: str) -> None:
    text = "Hello  Wörld's 12345 (x)?!\r\n\n  日本語のテスト №5 ᾳ 🦙 end "
    pieces = named_pretokenizer(name).build().pre_tokenize_str(text)
    assert bytes(_GPT2_BYTES[c] for piece, _ in pieces for c in piece).decode() == text


def test_unknown_pretokenizer_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre: unknown pre-tokeniser 'martian'"):
        made(byte_level_values("martian"))


def test_words_that_are_tokens_are_taken_whole_where_the_model_does() -> None:
    values = byte_level_values("llama-bpe", add_bos_token=False)
    values["tokenizer.ggml.tokens"][0:1] = ["abc"]  # cannot be made by merging
    assert pieces_of(made(values), made(values).encode("abc", False)) == ["abc"]
    values["tokenizer.ggml.pre"] = "qwen2"
    assert pieces_of(made(values), made(values).encode("abc", False)) == ["a", "b", "c"]


# ------------------------------------------------------------------------------------------------ SentencePiece


def by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: always join the neighbours with the best joint score, the leftmost of equals."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, i = heapq.nsmallest(1, pairs)[0]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_sentencepiece_joins_by_score() -> None:
    tokenizer = sentencepiece()
    # ▁a beats ab beats bc: "▁abcd" → ▁a bc d, then nothing; computed by hand.
    assert pieces_of(tokenizer, tokenizer.encode("abcd", False)) == ["▁a", "bc", "d"]
    assert pieces_of(tokenizer, tokenizer.encode("cabc", False)) == ["▁", "c", "abc"]
    assert pieces_of(tokenizer, tokenizer.encode("ddddd", False)) == ["▁", "dd", "ddd"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.text("abc ", min_size=1, max_size=24))
def test_merges_from_scores_are_sentencepiece(seed: int, text: str) -> None:
    rng = random.Random(seed)
    words = {"".join(rng.choices("abc▁", k=rng.randint(2, 5))) for _ in range(30)}
    pieces = ["▁", "a", "b", "c", *sorted(words, key=lambda _: rng.random())]
    tokenizer = made(sentencepiece_values(pieces))
    want = by_scores(SPACE + text.replace(" ", SPACE), {piece: -float(i) for i, piece in enumerate(pieces)})
    assert pieces_of(tokenizer, tokenizer.encode(text, False)) == want


def test_merges_are_all_cuts_in_order_of_score() -> None:
    tokens = ["a", "b", "ab", "aba", "é", "éa", "", "ba", "ctrl"]
    scores = np.asarray([0, 0, -2, -1, 0, -3, 0, -4, 0], np.float32)
    mergeable = np.asarray([True] * 8 + [False])
    want = [("a", "ba"), ("ab", "a"), ("a", "b"), ("é", "a"), ("b", "a")]
    assert merges_from_scores(tokens, scores, mergeable) == want
    assert merges_from_scores(["x"], np.zeros(1, np.float32), np.asarray([False])) == []


def test_merges_of_a_large_vocabulary_equal_the_plain_search() -> None:
    rng = random.Random(3)
    tokens = list(dict.fromkeys("".join(rng.choices("abcdefgh▁é", k=rng.randint(1, 6))) for _ in range(20000)))
    scores = -np.arange(len(tokens), dtype=np.float32)
    got = merges_from_scores(tokens, scores, np.ones(len(tokens), bool))
    known = set(tokens)
    want = {(t[:k], t[k:]) for t in tokens for k in range(1, len(t)) if t[:k] in known and t[k:] in known}
    assert len(got) == len(want)
    assert set(got) == want


def test_sentencepiece_space_prefix() -> None:
    with_prefix, without = sentencepiece(), sentencepiece(add_space_prefix=False)
    assert pieces_of(with_prefix, with_prefix.encode("a a", False)) == ["▁a", "▁a"]
    assert pieces_of(without, without.encode("a a", False)) == ["a", "▁a"]
    assert with_prefix.decode(with_prefix.encode("a a", True), True) == "a a"
    assert without.decode(without.encode(" a a", True), True) == " a a"
    assert with_prefix.token_bytes(with_prefix.raw.token_to_id("▁a")) == b" a"


def test_sentencepiece_byte_fallback_and_user_defined() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    ids = tokenizer.encode("aé\n\n\nü", False)
    assert pieces_of(tokenizer, ids) == ["a", "é", "\n\n", "<0x0A>", "<0xC3>", "<0xBC>"]
    assert [tokenizer.token_bytes(i) for i in ids] == [b"a", "é".encode(), b"\n\n", b"\n", b"\xc3", b"\xbc"]
    assert tokenizer.decode(ids, True) == "aé\n\n\nü"


def test_control_tokens_are_never_made_by_merging() -> None:
    tokenizer = made(sentencepiece_values([*PIECES, "<", "/", "s", ">", "</", "s>", "<s"]))
    ids = tokenizer.encode("</s><s>", False)
    assert not set(ids) & tokenizer.special_ids
    assert pieces_of(tokenizer, ids) == ["▁", "</", "s>", "<", "s>"]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_every_text_survives_sentencepiece(text: str) -> None:
    tokenizer = _shared("llama")
    text = text.replace(MARK, "").replace(SPACE, "")
    assert tokenizer.decode(tokenizer.encode(text, True), True) == text


def test_unigram_takes_the_likeliest_cut() -> None:
    values = sentencepiece_values(["▁", "a", "b", "▁a", "ab", "▁ab"], kind="t5", add_space_prefix=True)
    values["tokenizer.ggml.scores"][260:] = [-3, -4, -4, -5, -1, -9]
    tokenizer = made(values)
    # ▁ + ab = -4; ▁ab = -9; ▁a + b = -9.
    assert pieces_of(tokenizer, tokenizer.encode("ab", True)) == ["▁", "ab"]
    assert tokenizer.bos_id is None
    for text in ("ab ab", " ab", "  b  a "):
        assert tokenizer.decode(tokenizer.encode(text, True), True) == text


def test_unigram_removes_extra_spaces_where_the_model_does() -> None:
    values = sentencepiece_values(["▁", "a", "▁a"], kind="t5", remove_extra_whitespaces=True)
    tokenizer = made(values)
    assert tokenizer.encode("  a   a ", False) == tokenizer.encode("a a", False)


# ------------------------------------------------------------------------------------------------ rules


def test_exactly_one_bos() -> None:
    for tokenizer, bos in ((sentencepiece(), "<s>"), (byte_level(add_bos_token=True), "<|start|>")):
        one = [tokenizer.bos_id]
        plain = tokenizer.encode("ab", False)
        assert plain[0] != tokenizer.bos_id
        assert tokenizer.encode("ab", True) == one + plain
        assert tokenizer.encode(bos + "ab", True) == one + plain
        assert tokenizer.encode_rendered("ab") == one + plain
        assert tokenizer.encode_rendered(bos + "ab") == one + plain
        assert tokenizer.encode_rendered(bos + bos + "ab") == one + plain
        assert tokenizer.encode_rendered("") == tokenizer.encode("", True) == one


def test_models_without_bos_get_none() -> None:
    tokenizer = byte_level()
    assert tokenizer.bos_id is None
    assert tokenizer.encode("ab", True) == tokenizer.encode("ab", False) == tokenizer.encode_rendered("ab")
    # The template's own control token stays, though the file calls it BOS too (as SmolLM2's does).
    assert pieces_of(tokenizer, tokenizer.encode_rendered("<|start|>ab")) == ["<|start|>", "ab"]
    assert tokenizer.names["bos_token"] == "<|start|>"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_control_tokens_in_user_text_are_text(kind: str) -> None:
    tokenizer = _shared(kind)
    control = "<|end|>" if kind == "gpt2" else "</s>"
    user = f"a{control}b{control[:-1]}{control}{control[0]}"
    ids = tokenizer.encode(user, False)
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids, True) == user
    rendered = tokenizer.encode_rendered(f"{control}{tokenizer.protect(user)}{control}")
    assert sum(i in tokenizer.end_ids for i in rendered) == 2
    assert tokenizer.decode(rendered, True).strip() == user


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<|start|>", "<|end|>", "<", "|", "end", ">", "|>", "a", MARK, " "]), max_size=12))
def test_no_spelling_of_a_control_token_gets_through(parts: list[str]) -> None:
    tokenizer = _shared("gpt2")
    text = "".join(parts)
    ids = tokenizer.encode(text, False)
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids, True) == text.replace(MARK, "")
    assert tokenizer.encode_rendered(tokenizer.protect(text)) == ids


def test_spelled_bytes_are_text() -> None:
    for kind in ("llama", "t5"):
        tokenizer = _shared(kind)
        ids = tokenizer.encode("a<0x0A>", False)
        assert tokenizer.decode(ids, True) == "a<0x0A>"


def test_user_defined_tokens_stay_tokens_in_user_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a<tool>", False)
    assert pieces_of(tokenizer, ids) == ["a", "<tool>"]
    assert tokenizer.decode(ids, True) == "a<tool>"


def test_skip_special() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode_rendered("ab<|end|>c")
    assert tokenizer.decode(ids, True) == "abc"
    assert tokenizer.decode(ids, False) == "ab<|end|>c"


def test_protecting_is_quick_on_hostile_text() -> None:
    values = sentencepiece_values()
    values["tokenizer.ggml.tokens"] += [f"<unused{i}>" for i in range(3000)]
    values["tokenizer.ggml.token_type"] = np.append(values["tokenizer.ggml.token_type"], [CONTROL] * 3000)
    values["tokenizer.ggml.scores"] = np.append(values["tokenizer.ggml.scores"], [0.0] * 3000)
    tokenizer = made(values)
    text = "<u" * 100_000 + "<unused2999>"
    assert tokenizer.protect(text) == "<u" * 100_000 + f"<{MARK}unused2999>"
    assert tokenizer.protect("nothing < here") == "nothing < here"


def test_phi3_control_tokens_swallow_spaces_behind_them() -> None:
    values = sentencepiece_values()
    values["tokenizer.ggml.tokens"] += ["<|user|>"]
    values["tokenizer.ggml.token_type"] = np.append(values["tokenizer.ggml.token_type"], [CONTROL])
    values["tokenizer.ggml.scores"] = np.append(values["tokenizer.ggml.scores"], [0.0])
    user = len(values["tokenizer.ggml.tokens"]) - 1
    tokenizer = made(values)
    assert tokenizer.encode_rendered("<|user|>\na")[:2] == [1, user]
    assert tokenizer.encode_rendered("<|user|>\na")[-2:] == [3 + ord("\n"), tokenizer.raw.token_to_id("a")]
    values["general.name"] = "Phi-3 Mini"
    assert made(values).encode_rendered("<|user|>\n  a") == [1, user, tokenizer.raw.token_to_id("▁a")]


def test_threads_share_a_tokenizer() -> None:
    tokenizer = sentencepiece()
    texts = [f"ab{'c' * i} <s>\n\nd" for i in range(40)]
    want = [tokenizer.encode(text, True) for text in texts]
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(texts, want, strict=True):
            if tokenizer.encode(text, True) != ids:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_MADE: dict[str, Tokenizer] = {}


def _shared(kind: str) -> Tokenizer:
    if kind not in _MADE:
        _MADE[kind] = byte_level() if kind == "gpt2" else made(sentencepiece_values(kind=kind))
    return _MADE[kind]


def test_a_long_text_does_not_stop_other_threads() -> None:
    tokenizer = byte_level()
    ticks: list[int] = []
    running, done = threading.Event(), threading.Event()

    def tick() -> None:
        running.set()
        while not done.wait(0.002):
            ticks.append(0)

    thread = threading.Thread(target=tick)
    thread.start()
    running.wait()
    before = len(ticks)
    tokenizer.raw.encode_batch_fast(["warm"])
    tokenizer.encode("the wheel turns and turns. " * 40_000, False)
    during = len(ticks) - before
    done.set()
    thread.join()
    assert during > 10


def test_half_of_a_character_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        _shared("gpt2").encode("a \ud83d", add_bos=False)
