"""Memory is given back while the server has nothing to do."""

from __future__ import annotations

import platform
import sys

import psutil

from noria.observe.memory import bound_memory, give_memory_back

glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
MB = 1 << 20


def test_what_is_free_goes_back_to_the_system() -> None:
    bound_memory(256 << 10)
    process = psutil.Process()
    before = process.memory_info().rss
    small = [bytearray(1000) for _ in range(200_000)]
    last = bytearray(1000)
    full = process.memory_info().rss
    assert full > before + 150 * MB
    del small
    give_memory_back()
    if glibc:  # others give back what they like
        assert process.memory_info().rss < before + (full - before) // 4
    assert len(last) == 1000
