"""Ops and their implementations: `base` is the protocol, `reference` the NumPy oracle, `cpu` the native kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noria.errors import ConfigError

if TYPE_CHECKING:
    from noria.backends.base import Backend

NAMES = ("cpu", "reference")


def get_backend(name: str, threads: int | None = None) -> Backend:
    """A backend by name; only the one asked for is imported.

    Args:
        name: cpu (native kernels) or reference (NumPy, slow, the oracle of the tests).
        threads: kernel threads; None: one per physical core within affinity mask and cgroup limits.

    Raises:
        ConfigError: no such backend, or the native extension is missing or cannot run on this processor.
    """
    if name == "cpu":
        try:
            from noria.backends.cpu import CpuBackend
        except ImportError as error:
            raise ConfigError(
                f"the native kernels cannot be loaded ({error}); install Noria with `pip install .`"
            ) from error
        return CpuBackend(threads)
    if name == "reference":
        from noria.backends.reference import ReferenceBackend

        return ReferenceBackend(threads or 1)
    raise ConfigError(f"there is no backend {name!r}; choose one of: {', '.join(NAMES)}", "backend")
