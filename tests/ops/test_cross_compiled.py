"""The kernels for AArch64: cross-compiled, and run under an emulator at every level that it knows.

Skipped where there is no cross-compiler or emulator: apt-get install g++-aarch64-linux-gnu qemu-user-static
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LEVELS = ("neon", "neon_i8mm")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not all(map(shutil.which, (COMPILER, EMULATOR, "cmake"))), reason="no AArch64 cross-compiler, emulator or cmake"
)
def test_aarch64_kernels_compute_what_plain_loops_compute(tmp_path: Path) -> None:
    target = [
        "-DNORIA_PYTHON=OFF",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    ]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(tmp_path), *target], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path), "--parallel", "2"], check=True, capture_output=True)
    found = subprocess.run(
        [EMULATOR, "-cpu", "max", str(tmp_path / "check_kernels")], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines() == [f"{level}: good" for level in LEVELS]
