"""The CPU backend: packs weights, compiles graphs and runs them with the native kernels of `noria._native`.

Python here runs once per weight, once per graph and a few calls per step; everything proportional to tokens is native.
"""

from noria.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
