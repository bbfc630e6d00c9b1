"""Processors and memory that a process may use, read from made-up kernel files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from noria import _native

MOUNTS_V2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
MOUNTS_V1 = (
    "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def hyperthreads(cores: int) -> dict[str, str]:
    """Cores of two hardware threads: i and i + cores."""
    base = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    return {base.format(cpu): f"{cpu % cores},{cpu % cores + cores}\n" for cpu in range(2 * cores)}


def read(root: str, cpus: range | list[int]) -> dict[str, Any]:
    return dict(_native.topology(root, list(cpus)))


def test_one_thread_per_physical_core(tmp_path: Path) -> None:
    found = read(write(tmp_path, hyperthreads(4)), range(8))
    assert (found["physical_cores"], found["usable_cpus"], found["threads"]) == (4, 8, 4)
    assert found["cgroup_cpus"] is None


def test_the_affinity_mask_counts_cores_not_hardware_threads(tmp_path: Path) -> None:
    root = write(tmp_path, hyperthreads(4))
    assert read(root, [0, 4])["threads"] == 1
    assert read(root, [0, 1, 5])["threads"] == 2


@pytest.mark.parametrize(
    ("quota", "threads"), [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 4)]
)
def test_cgroup_v2_limits_threads(tmp_path: Path, quota: str, threads: int) -> None:
    files = hyperthreads(4) | {
        "/proc/self/cgroup": "0::/a/b\n",
        "/proc/self/mountinfo": MOUNTS_V2,
        "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/a/cpu.max": quota + "\n",
    }
    assert read(write(tmp_path, files), range(8))["threads"] == threads


def test_cgroup_v1_limits_threads_and_memory(tmp_path: Path) -> None:
    files = hyperthreads(4) | {
        "/proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
        "/proc/self/mountinfo": MOUNTS_V1,
        "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
        "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(8 << 30),
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 << 30),
        "/sys/fs/cgroup/memory/job/memory.stat": f"cache 5\ntotal_inactive_file {1 << 30}\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(30 << 30),
        "/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n",
    }
    found = read(write(tmp_path, files), range(8))
    assert (found["threads"], found["cgroup_cpus"]) == (3, 3.0)
    assert found["memory_limit_bytes"] == 8 << 30
    assert found["memory_available_bytes"] == 6 << 30


def test_the_tightest_memory_limit_counts_and_the_machine_has_the_last_word(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/proc/self/mountinfo": MOUNTS_V2,
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.current": "5\n",
        "/sys/fs/cgroup/a/memory.max": str(4 << 30),
        "/sys/fs/cgroup/a/memory.current": str(1 << 30),
        "/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {2 << 20} kB\n",
    }
    found = read(write(tmp_path, files), [0])
    assert found["memory_limit_bytes"] == 4 << 30
    assert found["memory_available_bytes"] == 2 << 30


def test_a_container_that_mounts_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/docker/abc\n",
        "/proc/self/mountinfo": "30 25 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "/sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    found = read(write(tmp_path, files), [0, 1, 2, 3])
    assert found["threads"] == 1


def test_caches_and_nodes(tmp_path: Path) -> None:
    cache = "/sys/devices/system/cpu/cpu2/cache/index{}/{}"
    node = "/sys/devices/system/node/node1/{}"
    files = {
        cache.format(0, "level"): "1\n",
        cache.format(0, "type"): "Data\n",
        cache.format(0, "size"): "48K\n",
        cache.format(1, "level"): "1\n",
        cache.format(1, "type"): "Instruction\n",
        cache.format(1, "size"): "64K\n",
        cache.format(2, "level"): "2\n",
        cache.format(2, "type"): "Unified\n",
        cache.format(2, "size"): "2M\n",
        cache.format(3, "level"): "3\n",
        cache.format(3, "type"): "Unified\n",
        cache.format(3, "size"): "32768K\n",
        cache.format(3, "shared_cpu_list"): "0-7\n",
        "/sys/devices/system/node/online": "1\n",
        node.format("cpulist"): "0-3,8\n",
        node.format("meminfo"): "Node 1 MemTotal: 1024 kB\nNode 1 MemFree: 512 kB\n",
    }
    found = read(write(tmp_path, files), [2, 3, 9])
    assert (found["l1d_bytes"], found["l2_bytes"], found["l3_bytes"]) == (48 << 10, 2 << 20, 32 << 20)
    assert found["l3_shared_by"] == 8
    assert found["nodes"] == [{"id": 1, "cpus": [2, 3], "memory_bytes": 1 << 20, "free_bytes": 512 << 10}]


def test_unreadable_files_are_no_limit(tmp_path: Path) -> None:
    found = read(
        write(tmp_path, {"/proc/self/cgroup": "nonsense\n0::/../..\n", "/proc/self/mountinfo": "x - \n"}), [0, 1]
    )
    assert (found["threads"], found["cgroup_cpus"], found["memory_limit_bytes"]) == (2, None, None)


def test_this_machine() -> None:
    found = _native.topology()
    assert 1 <= found["threads"] <= len(found["cpus"])
    assert 0 < found["memory_available_bytes"] <= found["memory_bytes"]
