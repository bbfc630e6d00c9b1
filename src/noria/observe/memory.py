"""Memory goes back to the system: large blocks as soon as they are free, the rest when a process has nothing to do.

The C library would keep most of what a flood of large requests made it take, in case there is another.
"""

from __future__ import annotations

import ctypes
import gc
import sys

# Parameters of glibc's `mallopt`, from its <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SLACK = 1 << 20  # bytes that may stay free at the end of the heap
_ARENAS = 2  # heaps for all threads together


def bound_memory(large: int) -> None:
    """To be called before there are threads. Does nothing where the C library is another.

    Args:
        large: bytes; blocks of that size are mapped, and unmapped, by themselves. Each costs page faults anew, so it
            should be more than what is taken again and again.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        for name, value in ((_MMAP_THRESHOLD, large), (_TRIM_THRESHOLD, _SLACK), (_ARENA_MAX, _ARENAS)):
            mallopt(name, value)


def give_memory_back() -> None:
    """Takes some milliseconds."""
    gc.collect()
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
