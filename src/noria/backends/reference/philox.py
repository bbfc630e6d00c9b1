"""Philox4x32-10, a counter-based random generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011). No state: the number of a token depends on nothing but its key and counter."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio and sqrt(3) - 1, added to the key each round
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

UInt64 = NDArray[np.uint64]


def philox4x32(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[ArrayLike, ArrayLike]) -> UInt64:
    """Four random words for each counter under its key.

    Args:
        counter: four words, key: two words; each a number or an array of numbers below 2**32, broadcast together.

    Returns:
        uint64 [4, …], each below 2**32.
    """
    words = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in (*counter, *key)))
    c0, c1, c2, c3, k0, k1 = words
    for _ in range(ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> _SHIFT) ^ c1 ^ k0, second & _LOW, (first >> _SHIFT) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniform(seeds: ArrayLike, choices: ArrayLike, output_positions: ArrayLike) -> NDArray[np.float64]:
    """The number in [0, 1) that draws the token at an output position of a choice: 24 bits of the first word.

    Args:
        seeds: below 2**64; choices, output_positions: below 2**32. Broadcast together.
    """
    seed = np.asarray(seeds, np.uint64)
    words = philox4x32((output_positions, choices, 0, 0), (seed & _LOW, seed >> _SHIFT))
    numbers: NDArray[np.float64] = (words[0] >> np.uint64(8)).astype(np.float64) * 2.0**-24
    return numbers
