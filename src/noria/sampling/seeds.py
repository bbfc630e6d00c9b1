"""Where a seed comes from when the caller gives none."""

from __future__ import annotations

import secrets

from noria.params import MAX_SEED


def draw_seed() -> int:
    """A seed in 0…2**64 - 1 from the system's entropy, so that two servers started together do not agree."""
    return secrets.randbelow(MAX_SEED + 1)
