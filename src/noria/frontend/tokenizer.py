"""Text to tokens and back.

Owns the rules that hold whatever file a tokeniser came from: exactly one BOS, control tokens in users' text stay text,
bytes of a token. The work is done by the `tokenizers` library. A `Tokenizer` never changes: threads share it.

Control tokens in users' text: the library finds control tokens in raw text before it normalises. `protect` puts a mark
(a code point that Unicode keeps out of texts) behind the first character of all in a user's text that reads like a
control token; the library no longer sees one there, and its normaliser, which comes later, removes the mark again. So
templates and their trimming see the text as it is but for the mark, and its tokens are as if the mark was never there.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from noria.errors import InvalidRequestError, TokenizerError
from noria.files.generation import end_token_ids
from noria.files.gguf import open_gguf
from noria.files.resolve import ModelFiles
from noria.files.safetensors import read_json
from noria.frontend.tokenizer_gguf import RawTokenizer, build_tokenizer

MARK = "\ufdd1"
MAX_TOKENIZER_JSON = 256 << 20  # bytes


class Tokenizer:
    """A model's tokeniser.

    Attributes:
        raw: the library's tokeniser (it drops `MARK` from text).
        bos_id: the token that every prompt starts with; None if the model has none.
        end_ids: tokens that end an answer, as the tokeniser's own files name them.
        special_ids: control tokens, hidden from answers by `skip_special`.
        vocab_size: one more than the largest id.
        names: texts of `bos_token`, `eos_token` … for chat templates.
    """

    def __init__(self, parts: RawTokenizer) -> None:
        self.raw = parts.raw
        self.bos_id = parts.bos_id
        self.end_ids = parts.end_ids
        self.special_ids = parts.special_ids
        self.names = parts.names
        self._literal = parts.literal
        before = [] if self.raw.normalizer is None else [self.raw.normalizer]
        self.raw.normalizer = normalizers.Sequence([normalizers.Replace(MARK, ""), *before])
        added = self.raw.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.vocab_size = max(self.raw.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self._shield = _Shield(token.content for token in added.values() if token.special)
        self._bytes = _byte_style(self.raw)
        if isinstance(self.raw.model, models.Unigram):
            self._keep_apart()

    def _keep_apart(self) -> None:
        """Cuts text inside of what reads like a control token or a byte: a unigram vocabulary lists them as pieces."""
        tails: dict[str, list[str]] = {"<": ["0x[0-9A-Fa-f]{2}>"]}
        for text in sorted(self._shield.texts):
            tails.setdefault(text[0], []).append(re.escape(text[1:]))
        pattern = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in tails.items())
        cut = pre_tokenizers.Split(Regex(pattern), "merged_with_previous")
        before = [] if self.raw.pre_tokenizer is None else [self.raw.pre_tokenizer]
        self.raw.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])

    def protect(self, text: str) -> str:
        """A user's text so marked that `encode_rendered` will not take any of it for a control token."""
        return self._shield(text)

    def encode(self, text: str, add_bos: bool) -> list[int]:
        """Encodes a user's text; control tokens in it are text.

        Args:
            add_bos: start with the BOS if the model has one. A text that begins with it gets no second one.
        """
        bos = self.bos_id if add_bos else None
        if bos is not None:
            text = text.removeprefix(self._added.get(bos, ""))
        ids = self._ids(self._shield(text))
        return ids if bos is None else [bos, *ids]

    def _ids(self, text: str) -> list[int]:
        # A batch of one: the library holds Python's lock while it encodes a single text, and with it every stream of
        # the server, for a second on a long one. It gives the lock up for batches.
        try:
            ids: list[int] = self.raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:  # the library's word for it; JSON cannot bring such a text here, Python's strings can
            raise InvalidRequestError("the text holds half of a surrogate pair, which is no character") from None
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Encodes what a chat template made: the template's control tokens are tokens, protected ones are text.

        Exactly one BOS comes first if the model has one, whether or not the template wrote it.
        """
        ids = self._ids(text)
        if self.bos_id is None:
            return ids
        start = next((i for i, token in enumerate(ids) if token != self.bos_id), len(ids))
        return [self.bos_id, *ids[start:]]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary are left out."""
        if self._literal:
            return self._decode_bytes(ids, skip_special)
        text: str = self.raw.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]  # as in _ids
        return text

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, as UTF-8 (a part of a character for some). b"" outside the vocabulary.

        A SentencePiece word keeps its leading space, which `decode` drops at the start of a text.
        """
        if (literal := self._literal.get(token)) is not None:
            return literal
        if (added := self._added.get(token)) is not None:
            return added.encode()
        text = self.raw.id_to_token(token) if 0 <= token < self.vocab_size else None
        return b"" if text is None else self._bytes(text)

    def _decode_bytes(self, ids: Sequence[int], skip_special: bool) -> str:
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")


class _Shield:
    """Finds what reads like a control token, in time linear in the text, however many there are."""

    def __init__(self, texts: Iterable[str]) -> None:
        # A control token of one character cannot be broken and is not one that users are kept from typing.
        self.texts = frozenset(text for text in texts if len(text) > 1)
        lengths: dict[str, set[int]] = {}
        for text in self.texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self.lengths = {head: tuple(found) for head, found in lengths.items()}
        firsts = "".join(sorted({head[0] for head in lengths}))
        seconds = "".join(sorted({head[1] for head in lengths}))
        self.heads = re.compile(f"[{re.escape(firsts)}](?=[{re.escape(seconds)}])") if lengths else None

    def __call__(self, text: str) -> str:
        if self.heads is None:
            return text
        pieces, done = [], 0
        for match in self.heads.finditer(text):
            at = match.start()
            if any(text[at : at + n] in self.texts for n in self.lengths.get(text[at : at + 2], ())):
                pieces += [text[done : at + 1], MARK]
                done = at + 1
        return "".join([*pieces, text[done:]]) if pieces else text


# ------------------------------------------------------------------------------------------------ bytes of tokens


def _gpt2_bytes() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_GPT2_BYTES = _gpt2_bytes()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _ByteLevel:
    def __call__(self, text: str) -> bytes:
        try:
            return bytes([_GPT2_BYTES[character] for character in text])
        except KeyError:
            return text.encode()


class _Pieces:
    """SentencePiece and the like. `space`: the character that stands for one; `fallback`: <0x0A> is a byte."""

    def __init__(self, space: str | None, fallback: bool) -> None:
        self.space, self.fallback = space, fallback

    def __call__(self, text: str) -> bytes:
        if self.fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return (text.replace(self.space, " ") if self.space else text).encode()


def _byte_style(raw: Library) -> _ByteLevel | _Pieces:
    state = json.loads(raw.decoder.__getstate__()) if raw.decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    space = None
    for step in steps:
        if step.get("type") == "Metaspace":
            space = step.get("replacement")
        elif step.get("type") == "Replace" and step.get("content") == " ":
            space = step.get("pattern", {}).get("String")
    return _Pieces(space, "ByteFallback" in kinds)


# ------------------------------------------------------------------------------------------------ loading


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokeniser of a model: from `tokenizer.json` beside safetensors, from the metadata of a GGUF.

    Calls for the same files share one tokeniser.

    Raises:
        TokenizerError: it is missing, damaged or of an unknown kind; names file and key.
    """
    sources = [files.path] if files.kind == "gguf" else [files.folder / name for name in _JSON_FILES]
    stamp = tuple((path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None for path in sources)
    return _load(files, stamp)


_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")


@lru_cache(maxsize=4)
def _load(files: ModelFiles, stamp: object) -> Tokenizer:
    with _without_gc():
        try:
            if files.kind == "gguf":
                return Tokenizer(build_tokenizer(open_gguf(files.path).metadata, end_token_ids(files)))
            return Tokenizer(_from_json(files))
        except TokenizerError as error:
            raise TokenizerError(f"{files.path}: {error}") from error.__cause__


@contextmanager
def _without_gc() -> Iterator[None]:
    """Half a million tuples that all stay would make the collector walk the whole heap again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _from_json(files: ModelFiles) -> RawTokenizer:
    path = files.folder / "tokenizer.json"
    config = _optional(files.folder / "tokenizer_config.json")
    raw = _read_library(path)
    _complete_added(raw, config)
    raw.no_truncation()
    raw.no_padding()
    names = _names(config, files.folder)
    ends = [raw.token_to_id(names["eos_token"])] if "eos_token" in names else []
    ids = tuple(dict.fromkeys([*(i for i in ends if i is not None), *end_token_ids(files)]))
    special = frozenset(i for i, token in raw.get_added_tokens_decoder().items() if token.special)
    return RawTokenizer(raw, _bos_id(raw, config, names), ids, special, names)


def _read_library(path: Path) -> Library:
    if not path.is_file():
        raise TokenizerError("tokenizer.json is missing; save the model's fast tokeniser beside its weights")
    if path.stat().st_size > MAX_TOKENIZER_JSON:
        raise TokenizerError(f"tokenizer.json: longer than {MAX_TOKENIZER_JSON >> 20} MiB")
    try:
        return Library.from_file(str(path))
    except Exception as error:  # the library raises its own untyped exception
        raise TokenizerError(f"tokenizer.json: {error}") from error


def _complete_added(raw: Library, config: Mapping[str, Any]) -> None:
    """Adds what only `tokenizer_config.json` says of added tokens, and makes control tokens match raw text only.

    A control token that is matched in normalised text would also match where the mark has been removed.
    """
    known = raw.get_added_tokens_decoder()
    wanted: dict[int, AddedToken] = {i: t for i, t in known.items() if t.special and t.normalized}
    listed = config.get("added_tokens_decoder")
    for key, fields in listed.items() if isinstance(listed, Mapping) else ():
        if not isinstance(fields, Mapping) or not isinstance(fields.get("content"), str) or not str(key).isdigit():
            raise TokenizerError(f"tokenizer_config.json: added_tokens_decoder: {key}: is no token")
        if int(key) not in known or _differs(known[int(key)], fields):
            wanted[int(key)] = AddedToken(fields["content"], **{flag: bool(fields.get(flag, False)) for flag in _FLAGS})
    for i, token in sorted(wanted.items()):
        has = raw.token_to_id(token.content)
        if has != i and not (has is None and i == raw.get_vocab_size(with_added_tokens=True)):
            continue  # the library numbers new tokens itself: a wrong id would be worse than none
        flags = {flag: getattr(token, flag) for flag in _FLAGS}
        if token.special:
            raw.add_special_tokens([AddedToken(token.content, **(flags | {"normalized": False}))])
        else:
            raw.add_tokens([AddedToken(token.content, **flags)])


_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _differs(token: AddedToken, fields: Mapping[str, Any]) -> bool:
    return token.content == fields["content"] and any(
        bool(fields.get(flag, False)) != getattr(token, flag) for flag in _FLAGS if flag != "normalized"
    )


def _names(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """bos_token and the like: from `tokenizer_config.json`, else `special_tokens_map.json`."""
    names: dict[str, str] = {}
    for source in (_optional(folder / "special_tokens_map.json"), config):
        for key, value in source.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and not key.startswith("add_") and isinstance(text, str):
                names[key] = text
    return names


def _bos_id(raw: Library, config: Mapping[str, Any], names: Mapping[str, str]) -> int | None:
    named = raw.token_to_id(names["bos_token"]) if "bos_token" in names else None
    asked = config.get("add_bos_token")
    if isinstance(asked, bool):
        return named if asked else None
    # Otherwise the post-processor decides: does an empty text become a BOS?
    first = raw.encode("", add_special_tokens=True).ids[:1]
    special = {i for i, token in raw.get_added_tokens_decoder().items() if token.special}
    if named is not None:
        return named if first == [named] else None
    return first[0] if first and first[0] in special and len(raw.encode("").ids) == 1 else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
