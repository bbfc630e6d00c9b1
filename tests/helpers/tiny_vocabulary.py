"""What a tiny model's tokens stand for: the bytes, some longer pieces, control tokens, ids without a meaning."""

from __future__ import annotations

import numpy as np

from noria.messages import Vocabulary

PIECES = ('{"', '":', '"}', '",', "true", "false", "null", "aa", "ab", "abc", "ba", "name", '"name', "age", "12", "345")
TOKENS = [*(bytes([i]) for i in range(256)), *(piece.encode() for piece in PIECES), b"<s>", b"</s>", b"</turn>"]
START, END, TURN = len(TOKENS) - 3, len(TOKENS) - 2, len(TOKENS) - 1
ENDS = (END, TURN)


def vocabulary(end_ids: tuple[int, ...] = ENDS) -> Vocabulary:
    lengths = np.array(list(map(len, TOKENS)), "<i4").tobytes()
    return Vocabulary(tokens=b"".join(TOKENS), lengths=lengths, end_ids=end_ids, special_ids=(START, END))


def text_of(tokens: list[int]) -> str:
    """Without control tokens."""
    return b"".join(TOKENS[token] for token in tokens if token < START).decode()
