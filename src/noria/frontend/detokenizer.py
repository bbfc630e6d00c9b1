"""Tokens to text, a few at a time.

Works on the bytes of tokens, so that a character split over tokens is held until it is whole, and the text is the same
however the tokens arrive. Stop strings are looked for in the text, over token boundaries; text that may still become a
stop string is withheld. Knows nothing of engines or requests. The per-token work is a list look-up and a UTF-8 decode.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from noria.guidance import vocabulary_of
from noria.messages import Vocabulary


class TokenBytes(Protocol):
    """What the detokeniser needs of a tokeniser."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Pieces:
    """The bytes of each token, asked from the tokeniser once per token and then kept. Shared by all requests.

    Args:
        marks: control tokens that tell the parts of an answer from each other.
    """

    __slots__ = ("_marks", "_special", "_tokenizer", "marked", "plain", "visible")

    def __init__(self, tokenizer: TokenBytes, marks: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._marks = frozenset(marks)
        self.plain: dict[int, bytes] = {}  # token → bytes
        self.visible: dict[int, bytes] = {}  # the same; control tokens are empty
        self.marked: dict[int, bytes] = {}  # the same; control tokens but the marks are empty

    def load(self, token: int) -> None:
        """Fills both tables for a token. Ids that a padded head has and the tokeniser lacks are empty."""
        known = 0 <= token < self._tokenizer.vocab_size
        data = self._tokenizer.token_bytes(token) if known else b""
        self.plain[token] = data
        self.visible[token] = b"" if token in self._special else data
        self.marked[token] = data if token in self._marks else self.visible[token]

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token, control tokens included."""
        if token not in self.plain:
            self.load(token)
        return self.plain[token]

    def vocabulary(self, end_ids: Sequence[int]) -> Vocabulary:
        """What all tokens stand for. Takes some tenths of a second; another thread may do it."""
        tokens = [self._tokenizer.token_bytes(token) for token in range(self._tokenizer.vocab_size)]
        return vocabulary_of(tokens, end_ids, sorted(self._special))

    def text_of(self, token: int) -> str:
        """Text of a single token; U+FFFD where it is not whole characters."""
        return self.bytes_of(token).decode("utf-8", "replace")


class StopFinder:
    """Finds the first stop string to be completed in a growing text.

    "First" is the one that ends earliest (of several that end there, the longest), so that the result does not depend
    on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include  # the stop string belongs to the output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes more text; returns the text that is certain to be output, and the stop string if one is complete."""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self._held = ""
            return text[: best[0] if self._include else best[1]], best[2]
        kept = len(text) - self._tail(text)
        self._held = text[kept:]
        return text[:kept], None

    def flush(self) -> str:
        """What was withheld: nothing more will come."""
        text, self._held = self._held, ""
        return text

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest


class Pushed(NamedTuple):
    """Result of a push: new text, how many of the tokens belong to the output, the stop string that ended it."""

    text: str
    used: int
    stop: str | None


class Detokenizer:
    """Text of one output.

    Args:
        pieces: bytes of tokens.
        stop: stop strings; they and all after them are cut from the text.
        min_tokens: stop strings are only looked for in the text that follows so many tokens.
        skip_special: leave control tokens out.
        include_stop: only what follows a stop string is cut.
        marks: keep the control tokens that tell the parts of an answer from each other.
    """

    __slots__ = ("_buffer", "_count", "_finder", "_min_tokens", "_pieces", "_table")

    def __init__(
        self,
        pieces: Pieces,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
        include_stop: bool = False,
        marks: bool = False,
    ) -> None:
        self._pieces = pieces
        self._table = (pieces.marked if marks else pieces.visible) if skip_special else pieces.plain
        self._finder = StopFinder(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._count = 0
        self._buffer = b""  # the beginning of a character, at most three bytes

    @property
    def stops(self) -> bool:
        """Whether there are stop strings to look for; if not, `text` is all that is needed."""
        return self._finder is not None

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Takes the next tokens of the output."""
        if self._finder is None:
            return Pushed(self.text(tokens), len(tokens), None)
        out: list[str] = []
        for used, token in enumerate(tokens, 1):
            self._count += 1
            text = self.text((token,))
            if self._count <= self._min_tokens:
                out.append(text)
            elif text:
                sure, stop = self._finder.push(text)
                out.append(sure)
                if stop is not None:
                    return Pushed("".join(out), used, stop)
        return Pushed("".join(out), len(tokens), None)

    def finish(self) -> Pushed:
        """The rest: withheld text, and U+FFFD for a character that was never completed."""
        text = self._buffer.decode("utf-8", "replace")
        self._buffer = b""
        if self._finder is None:
            return Pushed(text, 0, None)
        sure, stop = self._finder.push(text) if self._count > self._min_tokens else (text, None)
        return Pushed(sure if stop is not None else sure + self._finder.flush(), 0, stop)

    def text(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens of an output without stop strings; returns their text as far as it is whole."""
        table = self._table
        data = self._buffer
        for token in tokens:
            try:
                data += table[token]
            except KeyError:
                self._pieces.load(token)
                data += table[token]
        text, used = utf_8_decode(data, "replace", False)
        self._buffer = data[used:]
        return text
