"""Tokenisers made from a GGUF's metadata, with the parts of the `tokenizers` library.

Owns what llama.cpp writes into `tokenizer.ggml.*`: three kinds of model (`gpt2`: byte-level BPE; `llama`: SentencePiece
BPE, whose merges are implied by scores; `t5`: SentencePiece unigram) and the types of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from noria.errors import TokenizerError
from noria.frontend.pretokenizers import named_pretokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # SentencePiece's word boundary
_PREFIX = "tokenizer.ggml."
_MAX_SCORED_LENGTH = 512  # characters; longer tokens are never made by merging


@dataclass(frozen=True, slots=True)
class RawTokenizer:
    """A `tokenizers` tokeniser and what it does not know itself.

    Attributes:
        bos_id: token that every prompt starts with, None if the model has none.
        names: texts of bos_token, eos_token … for chat templates.
        literal: ids whose text is not what they stand for → their bytes.
    """

    raw: Tokenizer
    bos_id: int | None
    end_ids: tuple[int, ...]
    special_ids: frozenset[int]
    names: dict[str, str]
    literal: dict[int, bytes] = field(default_factory=dict)


class _Vocabulary:
    """The token list with its types and scores, checked against each other."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        tokens = values.get(f"{_PREFIX}tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise TokenizerError(f"{_PREFIX}tokens: the list of tokens is missing")
        self.values = values
        self.types = self._column("token_type", NORMAL, np.int32, len(tokens))
        self.scores = self._column("scores", 0.0, np.float32, len(tokens))
        self.literal: dict[int, bytes] = {}
        self.tokens: list[str] = tokens
        self.ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(self.ids) < len(tokens):
            self._rename_repeated()

    def _column(self, key: str, default: float, dtype: Any, count: int) -> NDArray[Any]:
        column = self.values.get(_PREFIX + key)
        if column is None:
            return np.full(count, default, dtype)
        column = np.asarray(column)
        if column.shape != (count,) or column.dtype.kind not in "iuf":
            raise TokenizerError(f"{_PREFIX}{key}: must hold {count} numbers, one for each token")
        return column.astype(dtype)

    def _rename_repeated(self) -> None:
        """The first of several equal texts keeps it; the others must have one too, or ids would shift."""
        self.tokens = list(self.tokens)
        self.ids = {}
        for i, text in enumerate(self.tokens):
            if text in self.ids:
                self.literal[i] = text.encode()
                self.tokens[i] = text = f"{text}\0{i}"
            self.ids[text] = i

    def of_type(self, *types: int) -> list[int]:
        chosen: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return chosen

    def id_of(self, key: str, default: int | None = None) -> int | None:
        """A token id of the metadata; None if the key is absent (or -1)."""
        value = self.values.get(f"{_PREFIX}{key}", default)
        if value is None or value in (-1, 2**32 - 1):
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            if f"{_PREFIX}{key}" not in self.values:
                return None
            raise TokenizerError(f"{_PREFIX}{key}: {value!r} is no id of one of the {len(self.tokens)} tokens")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.values.get(f"{_PREFIX}{key}", default))


def build_tokenizer(values: Mapping[str, Any], end_ids: tuple[int, ...]) -> RawTokenizer:
    """Makes the tokeniser that a GGUF describes.

    Args:
        values: the file's metadata. end_ids: end tokens that the file names.

    Raises:
        TokenizerError: a key is missing or wrong, or the kind is not known; names the key.
    """
    kind = values.get(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama", "t5"):
        raise TokenizerError(f"{_PREFIX}model: {kind!r} is not supported; Noria knows gpt2, llama and t5")
    vocabulary = _Vocabulary(values)
    if kind == "gpt2":
        raw, add_bos, bos = _byte_level(vocabulary)
    elif kind == "llama":
        raw, add_bos, bos = _sentencepiece_bpe(vocabulary)
    else:
        raw, add_bos, bos = _sentencepiece_unigram(vocabulary)
    special = _add_tokens(raw, vocabulary, end_ids)
    bos_id = vocabulary.id_of("bos_token_id", bos)
    names = {
        f"{name}_token": vocabulary.tokens[token]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "seperator"))
        if (token := bos_id if name == "bos" else vocabulary.id_of(f"{key}_token_id")) is not None
    }
    used_bos = bos_id if vocabulary.flag("add_bos_token", add_bos) else None
    return RawTokenizer(raw, used_bos, end_ids, special, names, vocabulary.literal)


def _add_tokens(raw: Tokenizer, vocabulary: _Vocabulary, end_ids: tuple[int, ...]) -> frozenset[int]:
    """Registers control and user-defined tokens; returns the control tokens (hidden from answers)."""
    control = {*vocabulary.of_type(CONTROL, UNKNOWN), *(i for i in end_ids if i < len(vocabulary.tokens))}
    name = str(vocabulary.values.get("general.name", "")).lower()
    # Phi-3's control tokens swallow the spaces and line ends behind them; no key of the format says so.
    swallow = "phi-3" in name or "phi3" in name
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    texts = vocabulary.tokens
    raw.add_special_tokens(
        [
            AddedToken(texts[i], normalized=False, special=True, rstrip=swallow and texts[i] not in kept)
            for i in sorted(control)
            if texts[i]
        ]
    )
    plain = [i for i in vocabulary.of_type(USER_DEFINED) if i not in control and texts[i]]
    raw.add_tokens([AddedToken(texts[i], normalized=False, special=False) for i in plain])
    return frozenset(control)


# ------------------------------------------------------------------------------------------------ byte-level BPE


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool, int | None]:
    merges = vocabulary.values.get(f"{_PREFIX}merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{_PREFIX}merges: the list of merges is missing")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise TokenizerError(f"{_PREFIX}merges: a merge is not two tokens with a space between them")
    pre = named_pretokenizer(str(vocabulary.values.get(f"{_PREFIX}pre", "default")))
    raw = Tokenizer(_bpe(vocabulary, pairs, ignore_merges=pre.ignore_merges))
    raw.pre_tokenizer = pre.build()
    raw.decoder = decoders.ByteLevel()
    if vocabulary.flag("add_space_prefix", False):
        raw.normalizer = normalizers.Prepend(" ")
    return raw, pre.add_bos, None


def _bpe(vocabulary: _Vocabulary, pairs: list[Any], **options: Any) -> Any:
    try:
        return models.BPE(vocabulary.ids, pairs, **options)
    except Exception as error:  # the library raises its own untyped exception
        raise TokenizerError(f"{_PREFIX}merges: {error}") from error


# ------------------------------------------------------------------------------------------------ SentencePiece


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool, int | None]:
    """Whole segments are merged, best score first, so that the text is one word to the library."""
    unknown = vocabulary.id_of("unknown_token_id", 0)
    options = {
        "byte_fallback": bool(vocabulary.of_type(BYTE)),
        "fuse_unk": True,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
    }
    mergeable = np.isin(vocabulary.types, (NORMAL, UNUSED))
    raw = Tokenizer(_bpe(vocabulary, merges_from_scores(vocabulary.tokens, vocabulary.scores, mergeable), **options))
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    raw.decoder = _sentencepiece_decoder(prefix)
    return raw, True, 1


def _sentencepiece_unigram(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool, int | None]:
    unknown = vocabulary.id_of("unknown_token_id", 2)
    pieces = list(zip(vocabulary.tokens, vocabulary.scores.tolist(), strict=True))
    try:
        raw = Tokenizer(models.Unigram(pieces, unknown, bool(vocabulary.of_type(BYTE))))
    except Exception as error:  # the library raises its own untyped exception
        raise TokenizerError(f"{_PREFIX}tokens: {error}") from error
    steps: list[Any] = []
    charsmap = vocabulary.values.get(f"{_PREFIX}precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        steps.append(_precompiled(charsmap))
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = vocabulary.flag("add_space_prefix", True)
    steps += [normalizers.Prepend(SPACE)] * prefix + [normalizers.Replace(" ", SPACE)]
    raw.normalizer = normalizers.Sequence(steps)
    raw.decoder = _sentencepiece_decoder(prefix)
    return raw, False, None


def _precompiled(charsmap: NDArray[Any]) -> Any:
    try:
        return normalizers.Precompiled(np.asarray(charsmap).astype(np.uint8).tobytes())
    except BaseException as error:  # a Rust panic on a damaged table is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise TokenizerError(f"{_PREFIX}precompiled_charsmap: damaged: {error}") from error


def _sentencepiece_decoder(prefix: bool) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def merges_from_scores(
    tokens: list[str], scores: NDArray[np.float32], mergeable: NDArray[np.bool_]
) -> list[tuple[str, str]]:
    """The merges that scores imply: every way to cut a token into two tokens, best score of the result first.

    SentencePiece joins the neighbours whose joint text has the best score. Written as a list of merges, that is each
    cut of each token. A vocabulary of 262,144 has half a million, found by hashing all heads and tails of all tokens
    at once: h(text) = Σ character · B^position mod 2^64, positions from 1, so that the hash of a tail follows from
    those of whole and head.

    Args:
        scores: [tokens]. mergeable: [tokens] tokens that text can be merged to (no control tokens, no bytes).
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    chosen = np.flatnonzero(mergeable & (lengths > 0) & (lengths <= _MAX_SCORED_LENGTH))
    if not len(chosen):
        return []
    lengths = lengths[chosen]
    names = [tokens[i] for i in chosen.tolist()]
    heads, owners, cuts = _prefix_hashes("".join(names), lengths)
    whole = heads[np.cumsum(lengths) - 1]
    inner = cuts < lengths[owners]  # a head that is the whole token is no cut
    heads, owners, cuts = heads[inner], owners[inner], cuts[inner]
    index = _HashIndex(whole)
    left = index.find(heads)
    found = left >= 0
    left, heads, owners, cuts = left[found], heads[found], owners[found], cuts[found]
    right = index.find((whole[owners] - heads) * _powers(_INVERSE, int(lengths.max()))[cuts])
    found = right >= 0
    left, right, owners = left[found], right[found], owners[found]
    order = np.argsort(-scores[chosen][owners], kind="stable")
    pick = names.__getitem__
    return list(zip(map(pick, left[order].tolist()), map(pick, right[order].tolist()), strict=True))


_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """base^0 … base^count, modulo 2^64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _prefix_hashes(
    joined: str, lengths: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.int32]]:
    """Of every head of every token: hash, index of the token, length of the head; all [characters]."""
    sums = np.frombuffer(joined.encode("utf-32-le"), np.uint32).astype(np.uint64)
    starts = np.cumsum(lengths) - lengths
    owners = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    cuts = np.arange(1, len(sums) + 1, dtype=np.int32)
    cuts -= starts.astype(np.int32)[owners]
    sums += np.uint64(1)  # a character 0 must count too
    sums *= _powers(_BASE, int(lengths.max()))[cuts]
    np.cumsum(sums, out=sums)
    before = np.zeros(len(lengths), np.uint64)
    before[1:] = sums[starts[1:] - 1]
    sums -= before[owners]
    return sums, owners, cuts


class _HashIndex:
    """Finds 64-bit hashes: tables addressed by their upper bits, each for what collided in the one before."""

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self.hashes = hashes
        self.levels: list[tuple[np.uint64, np.uint64, NDArray[np.int32]]] = []
        rest = np.arange(len(hashes), dtype=np.int32)
        salt = _INVERSE
        while len(rest) and len(self.levels) < 16:
            bits = max(8, len(rest).bit_length() + 2)
            shift, factor = np.uint64(64 - bits), np.uint64(salt)
            table = np.full(1 << bits, -1, np.int32)
            slots = hashes[rest] * factor >> shift
            table[slots] = rest
            self.levels.append((factor, shift, table))
            rest = rest[table[slots] != rest]
            salt = salt * 6364136223846793005 % (1 << 64) | 1

    def find(self, wanted: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Index of each hash, -1 where there is none."""
        out = np.full(len(wanted), -1, np.int32)
        open_ = np.arange(len(wanted))
        for factor, shift, table in self.levels:
            candidates = table[wanted[open_] * factor >> shift]
            # An empty slot at any level ends the search: whatever hashed there would have filled it.
            open_, candidates = open_[candidates >= 0], candidates[candidates >= 0]
            hit = self.hashes[candidates] == wanted[open_]
            out[open_[hit]] = candidates[hit]
            open_ = open_[~hit]
        return out
