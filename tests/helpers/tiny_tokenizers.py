"""Tiny tokenisers as the metadata of a GGUF file: byte-level BPE and SentencePiece."""

from __future__ import annotations

from typing import Any

import numpy as np

from noria.frontend.tokenizer import _GPT2_BYTES, Tokenizer
from noria.frontend.tokenizer_gguf import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
CHARS = {byte: character for character, byte in _GPT2_BYTES.items()}


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
