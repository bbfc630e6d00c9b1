"""Memory is given back while the server has nothing to do."""

from __future__ import annotations

import platform
import subprocess
import sys

glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
MB = 1 << 20
# In a process of its own: one that has run other tests has free memory of theirs to take.
PROGRAM = """
import psutil
from noria.observe.memory import bound_memory, give_memory_back

bound_memory(256 << 10)
process = psutil.Process()
before = process.memory_info().rss
small = [bytearray(1000) for _ in range(200_000)]
last = bytearray(1000)  # lies behind them
full = process.memory_info().rss
del small
give_memory_back()
print(before, full, process.memory_info().rss, len(last))
"""


def test_what_is_free_goes_back_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    before, full, after, length = map(int, said.split())
    assert full > before + 150 * MB
    if glibc:  # others give back what they like
        assert after < before + (full - before) // 4
    assert length == 1000
