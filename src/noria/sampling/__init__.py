"""Sampling above the kernels: seeds, and checks of parameters against a vocabulary.

`noria.sampling.random` gives out the random generator. The arithmetic of sampling lies in the backends, below.
"""

from noria.sampling.checks import check_token_ids
from noria.sampling.seeds import draw_seed

__all__ = ["check_token_ids", "draw_seed"]
