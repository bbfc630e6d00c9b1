"""Log-probabilities in the two styles of the OpenAI API."""

from __future__ import annotations

from codecs import getincrementaldecoder

from noria.frontend.detokenizer import Pieces
from noria.frontend.stream import LogProbColumns
from noria.server.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LOWEST = -9999.0  # JSON has no infinity; OpenAI sends this
_Utf8 = getincrementaldecoder("utf-8")


def chat_logprobs(columns: LogProbColumns, pieces: Pieces, top: int, as_ids: bool = False) -> ChatLogprobs:
    """The style of chat: text, bytes and alternatives of each token. `as_ids`: `token_id:5` in place of the text."""
    name = id_string if as_ids else pieces.text_of
    content = []
    for token, chosen, ids, values in zip(columns.tokens, columns.chosen, columns.top_ids, columns.top, strict=True):
        alternatives = [
            TopLogprob(name(other), max(value, LOWEST), list(pieces.bytes_of(other)))
            for other, value in zip(ids[:top], values[:top], strict=True)
            if other >= 0
        ]
        data = list(pieces.bytes_of(token))
        content.append(ChatLogprob(name(token), max(chosen, LOWEST), data, alternatives))
    return ChatLogprobs(content)


def id_string(token: int) -> str:
    """A token's id in place of its text."""
    return f"token_id:{token}"


def prompt_logprobs(columns: LogProbColumns | None, pieces: Pieces, top: int) -> PromptLogprobs:
    """Of a prompt's tokens (the first has none): by token id, of the token itself and of the `top` most likely."""
    made: PromptLogprobs = [None]
    if columns is None:
        return made
    rows = zip(columns.tokens, columns.chosen, columns.ranks, columns.top_ids, columns.top, strict=True)
    for token, chosen, rank, ids, values in rows:
        place = {token: PromptLogprob(max(chosen, LOWEST), rank, pieces.text_of(token))}
        for at, (other, value) in enumerate(zip(ids[:top], values[:top], strict=True)):
            if other >= 0:
                place.setdefault(other, PromptLogprob(max(value, LOWEST), at + 1, pieces.text_of(other)))
        made.append(place)
    return made


def token_string(data: bytes) -> str:
    """A token as a string that tells it from others, although it may be a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobsWriter:
    """The integer style, for one choice over several chunks: it counts the characters that went before.

    Args:
        offset: characters before the first token.
        skip_special: control tokens are not in the text.
        top: alternatives that are wanted; there may be more.
        as_ids: `token_id:5` in place of the text.
    """

    def __init__(
        self, pieces: Pieces, offset: int = 0, skip_special: bool = True, top: int = 0, as_ids: bool = False
    ) -> None:
        self._pieces = pieces
        self._offset = offset
        self._table = pieces.visible if skip_special else pieces.plain
        self._utf8 = _Utf8("replace")
        self._top = top
        self._as_ids = as_ids

    def prompt(self, ids: list[int], columns: LogProbColumns | None) -> CompletionLogprobs:
        """Of an echoed prompt. Nothing is known of its first token."""
        first = LogProbColumns([ids[0]], [0.0], [0], [[]], [[]])
        made = self.write(first)
        made.token_logprobs = [None]
        made.top_logprobs = [None]
        if columns is not None:
            extend(made, self.write(columns))
        return made

    def write(self, columns: LogProbColumns) -> CompletionLogprobs:
        """Of the next tokens."""
        made = CompletionLogprobs([], [], [], [])
        for token, chosen, ids, values in zip(
            columns.tokens, columns.chosen, columns.top_ids, columns.top, strict=True
        ):
            name = self._name(token)
            top = {
                self._name(other): max(value, LOWEST)
                for other, value in zip(ids[: self._top], values[: self._top], strict=True)
                if other >= 0
            }
            top.setdefault(name, max(chosen, LOWEST))
            made.text_offset.append(self._offset)
            made.tokens.append(name)
            made.token_logprobs.append(max(chosen, LOWEST))
            made.top_logprobs.append(top)
            self._pieces.bytes_of(token)  # fills the table: of the prompt, and of an end, nobody has asked before
            self._offset += len(self._utf8.decode(self._table[token]))
        return made

    def _name(self, token: int) -> str:
        return id_string(token) if self._as_ids else token_string(self._pieces.bytes_of(token))


def extend(made: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Appends `more`."""
    made.text_offset += more.text_offset
    made.token_logprobs += more.token_logprobs
    made.tokens += more.tokens
    made.top_logprobs += more.top_logprobs
