"""The counter-based random generator, given out for the floors above the backends."""

from noria.backends.reference.philox import philox4x32, uniform

__all__ = ["philox4x32", "uniform"]
