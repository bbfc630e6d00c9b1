"""Tokenisers of every kind: byte-level BPE, SentencePiece BPE and unigram, from GGUF metadata and tokenizer.json."""

from __future__ import annotations

import heapq
import json
import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from noria.errors import ModelError, TokenizerError
from noria.files.gguf import GGUFFile
from noria.files.resolve import ModelFiles
from noria.frontend.pretokenizers import _BY_NAME, named_pretokenizer
from noria.frontend.tokenizer import _GPT2_BYTES, MARK, Tokenizer, load_tokenizer
from noria.frontend.tokenizer_gguf import SPACE, build_tokenizer, merges_from_scores

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
CHARS = {byte: character for character, byte in _GPT2_BYTES.items()}


# ------------------------------------------------------------------------------------------------ tiny tokenisers


def byte_level_values(pre: str = "smollm", merges: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """All 256 bytes, some merges, two control tokens, a user-defined one."""
    tokens = [CHARS[byte] for byte in range(256)]
    tokens += ["".join(merge.split(" ")) for merge in merges]
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER]
    tokens += ["<|start|>", "<|end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.asarray(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


PIECES = ["▁", "a", "b", "c", "d", "▁a", "ab", "bc", "abc", "cd", "▁ab", "dd", "é", "ddd"]


def sentencepiece_values(pieces: list[str] = PIECES, kind: str = "llama", **more: Any) -> dict[str, Any]:
    """unk, s, /s; the bytes; a user-defined run of line ends; pieces, the earlier the better."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n\n", *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER, *[NORMAL] * len(pieces)]
    scores = [0.0] * 260 + [-float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.asarray(types, np.int32),
        "tokenizer.ggml.scores": np.asarray(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def made(values: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_tokenizer(values, (values["tokenizer.ggml.eos_token_id"],)))


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.raw.id_to_token(i) for i in ids]


def byte_level(**more: Any) -> Tokenizer:
    return made(byte_level_values(merges=("a b", "ab c", "Ġ ab"), **more))


def sentencepiece(**more: Any) -> Tokenizer:
    return made(sentencepiece_values(**more))


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


# ------------------------------------------------------------------------------------------------ damaged metadata


def test_repeated_texts_keep_their_ids() -> None:
    values = byte_level_values()
    values["tokenizer.ggml.tokens"][7] = "a"
    tokenizer = made(values)
    assert tokenizer.vocab_size == 259
    assert tokenizer.token_bytes(7) == b"a"
    assert tokenizer.decode([7, ord("b")], True) == "ab"
    assert tokenizer.encode("b", False) == [ord("b")]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "wordpiece", "tokenizer.ggml.model: 'wordpiece'"),
        ("tokens", [], "tokenizer.ggml.tokens"),
        ("tokens", np.arange(3), "tokenizer.ggml.tokens"),
        ("token_type", np.asarray([1, 2]), "tokenizer.ggml.token_type: must hold 259 numbers"),
        ("scores", "high", "tokenizer.ggml.scores"),
        ("merges", None, "tokenizer.ggml.merges: the list of merges is missing"),
        ("merges", ["ab"], "tokenizer.ggml.merges: a merge is not two tokens"),
        ("merges", ["a nothing"], "tokenizer.ggml.merges: "),
        ("bos_token_id", 10**6, "tokenizer.ggml.bos_token_id: 1000000 is no id"),
    ],
)
def test_wrong_metadata_names_its_key(key: str, value: Any, message: str) -> None:
    values = byte_level_values()
    values[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError) as caught:
        made(values)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------ files


def gguf_files(path: Path, values: dict[str, Any]) -> ModelFiles:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(path.stem, "gguf", path, (path,))


def test_from_a_gguf_file(tmp_path: Path) -> None:
    files = gguf_files(tmp_path / "m.gguf", sentencepiece_values())
    assert GGUFFile(files.path).metadata["tokenizer.ggml.model"] == "llama"
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode("ab", True) == sentencepiece().encode("ab", True)
    assert tokenizer.end_ids == (2,)
    assert load_tokenizer(files) is tokenizer


def test_errors_name_the_file(tmp_path: Path) -> None:
    values = byte_level_values("martian")
    del values["tokenizer.ggml.merges"]  # an empty array cannot be written
    with pytest.raises(TokenizerError, match=r"m\.gguf: tokenizer\.ggml\.merges"):
        load_tokenizer(gguf_files(tmp_path / "m.gguf", values))


def directory(folder: Path, config: dict[str, Any], bos: bool = True, normalized: bool = False) -> ModelFiles:
    """A byte-level tokenizer.json with two control tokens."""
    folder.mkdir(exist_ok=True)
    vocab = {CHARS[byte]: byte for byte in range(256)} | {"ab": 256}
    raw = Library(models.BPE(vocab, [("a", "b")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, normalized=normalized) for text in ("<s>", "</s>")])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    raw.enable_truncation(4)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles("m", "safetensors", folder, ())


NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("config", "processor", "bos"),
    [
        (NAMES, True, 257),
        (NAMES, False, None),
        ({**NAMES, "add_bos_token": False}, True, None),
        ({**NAMES, "add_bos_token": True}, False, 257),
        ({}, True, 257),
        ({"add_bos_token": True}, False, None),
    ],
)
def test_bos_from_tokenizer_json(tmp_path: Path, config: dict[str, Any], processor: bool, bos: int | None) -> None:
    tokenizer = load_tokenizer(directory(tmp_path, config, processor))
    assert tokenizer.bos_id == bos
    want = ([] if bos is None else [bos]) + [256, ord("c")] * 4
    assert tokenizer.encode("abc" * 4, True) == want  # not truncated either
    if bos is not None:
        assert tokenizer.encode_rendered("<s>" + "abc" * 4) == want


@pytest.mark.parametrize("normalized", [False, True])
def test_control_tokens_from_tokenizer_json(tmp_path: Path, normalized: bool) -> None:
    tokenizer = load_tokenizer(directory(tmp_path, NAMES, normalized=normalized))
    assert tokenizer.special_ids == {257, 258}
    assert tokenizer.end_ids == (258,)
    assert tokenizer.names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert 258 not in tokenizer.encode("x</s>y", True)
    assert tokenizer.encode_rendered(tokenizer.protect("</s>") + "</s>")[-1] == 258
    assert tokenizer.encode_rendered(tokenizer.protect("</s>") + "</s>").count(258) == 1
    assert tokenizer.token_bytes(258) == b"</s>"


def test_tokens_that_only_the_config_lists(tmp_path: Path) -> None:
    added = {
        "258": {"content": "</s>", "special": True, "rstrip": True},
        "259": {"content": "<|new|>", "special": True},
        "999": {"content": "<|far|>", "special": True},
    }
    tokenizer = load_tokenizer(directory(tmp_path, {**NAMES, "added_tokens_decoder": added}))
    assert tokenizer.encode_rendered("<|new|>")[-1] == 259
    assert tokenizer.encode_rendered("</s> \n a")[-2:] == [258, ord("a")]
    assert tokenizer.raw.token_to_id("<|far|>") is None


def test_sentencepiece_style_tokenizer_json(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "<0xC3>": 4, "<0xBC>": 5}
    raw = Library(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelFiles("m", "safetensors", tmp_path, ()))
    ids = tokenizer.encode("a aü", True)
    assert ids == [3, 3, 4, 5]
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a", b" a", b"\xc3", b"\xbc"]
    assert tokenizer.decode(ids, True) == "a aü"
    assert tokenizer.bos_id is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "tokenizer.json: "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder: x"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    files = directory(tmp_path, NAMES)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(files)
    assert message in str(caught.value)


_MADE: dict[str, Tokenizer] = {}


def _shared(kind: str) -> Tokenizer:
    if kind not in _MADE:
        _MADE[kind] = byte_level() if kind == "gpt2" else made(sentencepiece_values(kind=kind))
    return _MADE[kind]
