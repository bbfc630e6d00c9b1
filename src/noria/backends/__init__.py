"""Ops and their implementations: `base` is the protocol, `reference` the NumPy oracle, `cpu` the native kernels."""
