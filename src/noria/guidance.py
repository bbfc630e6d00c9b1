"""What llguidance is told by all who compile grammars: those who try them before, and the engine that follows them.

It is imported when it is first needed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from noria.errors import GrammarError
from noria.messages import Vocabulary

_LONGEST_TOKEN = 1000  # bytes; llguidance has no room for longer ones


def vocabulary_of(tokens: Sequence[bytes], end_ids: Sequence[int], special_ids: Sequence[int]) -> Vocabulary:
    """A vocabulary of the bytes of each token."""
    lengths = struct.pack(f"<{len(tokens)}i", *map(len, tokens))
    return Vocabulary(tokens=b"".join(tokens), lengths=lengths, end_ids=tuple(end_ids), special_ids=tuple(special_ids))


# Tokens that are bytes: enough for most checks.
BYTES = vocabulary_of([*(bytes((value,)) for value in range(256)), b"<end>"], (256,), (256,))


def make_limits() -> Any:
    """`LLParserLimits`: what a grammar may cost, so that a hostile one ends its own requests and nothing else."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # of compiling: some 20 ms
        max_grammar_size=500_000,  # symbols
        step_lexer_fuel=200_000,  # of one mask: some 15 ms
        step_max_items=50_000,  # of one mask: some 10 ms, but ten times that in rows of a most ambiguous grammar
        max_items_in_row=2_000,  # enough for 500 optional properties
        max_lexer_states=20_000,  # of all that follow one grammar together: 40 MB at most
        verbose_errors=False,  # they would hold the whole grammar
    )


def make_tokenizer(vocabulary: Vocabulary, size: int | None = None) -> Any:
    """`LLTokenizer` of a vocabulary.

    Args:
        size: tokens of the model's head, if they may be more or fewer. Those beyond the vocabulary are never allowed.

    Raises:
        GrammarError: the model has no end token, so that no output could end.
    """
    import llguidance

    lengths = struct.unpack(f"<{len(vocabulary.lengths) // 4}i", vocabulary.lengths)
    size = len(lengths) if size is None else size
    tokens, start = [b""] * size, 0
    for token, length in enumerate(lengths[:size]):
        if length <= _LONGEST_TOKEN:
            tokens[token] = vocabulary.tokens[start : start + length]
        start += length
    end_ids = [token for token in vocabulary.end_ids if 0 <= token < size]
    if not end_ids:
        raise GrammarError("the model has no end token")
    special_ids = sorted({token for token in (*vocabulary.special_ids, *end_ids) if 0 <= token < size})
    source = _Tokens(tokens, end_ids[0], special_ids)
    source.made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(source), eos_token=end_ids)
    return source.made


class _Tokens:
    """What llguidance wants to know of a tokenizer. Text that a grammar forces is cut into the longest tokens."""

    def __init__(self, tokens: list[bytes], end_id: int, special_ids: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.special_token_ids = special_ids
        self.made: Any = None

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts only")  # asks llguidance for str
        ids: list[int] = self.made.greedy_tokenize(text)
        return ids
