"""Log-probabilities in the two styles of the OpenAI API."""

from __future__ import annotations

from codecs import getincrementaldecoder

from noria.frontend.detokenizer import Pieces
from noria.frontend.stream import LogProbColumns
from noria.server.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

LOWEST = -9999.0  # JSON has no infinity; OpenAI sends this
_Utf8 = getincrementaldecoder("utf-8")


def chat_logprobs(columns: LogProbColumns, pieces: Pieces, top: int) -> ChatLogprobs:
    """The style of chat: text, bytes and alternatives of each token."""
    content = []
    for token, chosen, ids, values in zip(columns.tokens, columns.chosen, columns.top_ids, columns.top, strict=True):
        alternatives = [
            TopLogprob(pieces.text_of(other), max(value, LOWEST), list(pieces.bytes_of(other)))
            for other, value in zip(ids[:top], values[:top], strict=True)
            if other >= 0
        ]
        data = list(pieces.bytes_of(token))
        content.append(ChatLogprob(pieces.text_of(token), max(chosen, LOWEST), data, alternatives))
    return ChatLogprobs(content)


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
    """

    def __init__(self, pieces: Pieces, offset: int = 0, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._offset = offset
        self._table = pieces.visible if skip_special else pieces.plain
        self._utf8 = _Utf8("replace")

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
            name = token_string(self._pieces.bytes_of(token))
            top = {
                token_string(self._pieces.bytes_of(other)): max(value, LOWEST)
                for other, value in zip(ids, values, strict=True)
                if other >= 0
            }
            top.setdefault(name, max(chosen, LOWEST))
            made.text_offset.append(self._offset)
            made.tokens.append(name)
            made.token_logprobs.append(max(chosen, LOWEST))
            made.top_logprobs.append(top)
            self._offset += len(self._utf8.decode(self._table[token]))
        return made


def extend(made: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Appends `more`."""
    made.text_offset += more.text_offset
    made.token_logprobs += more.token_logprobs
    made.tokens += more.tokens
    made.top_logprobs += more.top_logprobs
