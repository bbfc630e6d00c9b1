"""Checks of sampling parameters that need to know the model."""

from __future__ import annotations

from collections.abc import Iterable

from noria.errors import InvalidRequestError
from noria.params import SamplingParams


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuses token ids outside the vocabulary, in `logit_bias` and `stop_token_ids`.

    Raises:
        InvalidRequestError: names the field and the id.
    """
    _within("logit_bias", params.logit_bias, vocab_size)
    _within("stop_token_ids", params.stop_token_ids, vocab_size)


def _within(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"{field}: token id {token} is not in the vocabulary (0…{vocab_size - 1})", field)
