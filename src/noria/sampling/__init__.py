"""The arithmetic of sampling for the floors above the backends: the random generator, filters and log-probabilities.

The definitions lie in the reference backend, below, because every backend is tested against them.
"""

from noria.backends.reference.philox import philox4x32, uniform
from noria.backends.reference.sampling import distribution, log_probs, most_likely

__all__ = ["distribution", "log_probs", "most_likely", "philox4x32", "uniform"]
