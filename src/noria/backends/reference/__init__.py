"""The NumPy backend: every op written to be read. It is the oracle that the other backends are tested against.

It simulates the schemes and cache types exactly as `noria.backends.base` specifies them: each product sees the rounded
or quantised operands, and sums them in float64. So its results are the specified value to within one rounding of
float32, and the order in which a BLAS sums vanishes in that rounding (all but surely: not a proof, unlike the CPU
backend's fixed order).
"""

from noria.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
