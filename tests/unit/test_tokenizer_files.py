"""Tokenisers from GGUF files and from tokenizer.json, sound and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from helpers.tiny_tokenizers import (
    CHARS,
    byte_level_values,
    made,
    sentencepiece,
    sentencepiece_values,
)
from noria.errors import ModelError, TokenizerError
from noria.files.gguf import GGUFFile
from noria.files.resolve import ModelFiles
from noria.frontend.tokenizer import load_tokenizer

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
