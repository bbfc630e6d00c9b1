"""How much memory is there, and how many blocks are made of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from noria.backends.base import CacheLayout
from noria.config import CacheOptions
from noria.errors import ConfigError
from noria.observe.cgroup import available_memory
from noria.worker.memory import plan_cache

LAYOUT = CacheLayout(layers=2, kv_heads=2, head_dim=32, block_size=16, num_blocks=0, dtype="bf16")
MIB = 1 << 20


def test_block_bytes() -> None:
    assert LAYOUT.block_bytes == 2 * 2 * 2 * 16 * 64


def test_blocks_follow_the_budget_up_to_what_can_be_used() -> None:
    some = plan_cache(CacheOptions(), LAYOUT, 256, 4096, False, 10 * MIB)
    assert (some.num_blocks, some.max_model_len) == (10 * MIB // LAYOUT.block_bytes, 4096)
    most = plan_cache(CacheOptions(), LAYOUT, 2, 100, False, 1000 * MIB)
    assert most.num_blocks == 2 * 7


def test_blocks_as_asked_even_beyond_the_budget() -> None:
    assert plan_cache(CacheOptions(num_blocks=999), LAYOUT, 1, 64, True, 0).num_blocks == 999


def test_more_blocks_than_memory_are_refused() -> None:
    room = 100 * LAYOUT.block_bytes
    assert plan_cache(CacheOptions(num_blocks=100), LAYOUT, 1, 64, True, 0, room).num_blocks == 100
    with pytest.raises(ConfigError, match=r"--num-blocks: 1048576 blocks take 8,192 MiB, 1 MiB are left"):
        plan_cache(CacheOptions(num_blocks=2**20), LAYOUT, 1, 64, True, 0, room)


def test_positions_in_the_cache_stay_int32() -> None:
    assert plan_cache(CacheOptions(), LAYOUT, 1024, 2**31 - 1, False, 1 << 60).num_blocks == (2**31 - 1) // 16
    with pytest.raises(ConfigError, match=r"--num-blocks: must be in 1…134217727"):
        CacheOptions(num_blocks=2**27)


def test_longest_context_shrinks_unless_it_was_asked_for() -> None:
    budget = 100 * LAYOUT.block_bytes
    assert plan_cache(CacheOptions(), LAYOUT, 4, 4096, False, budget).max_model_len == 1600
    with pytest.raises(
        ConfigError, match=r"--max-model-len: the KV cache of one request of 4096 tokens takes 2 MiB, 1"
    ):
        plan_cache(CacheOptions(), LAYOUT, 4, 4096, True, budget)


def test_too_few_blocks_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"--num-blocks: 3 blocks of 16 tokens hold 48 tokens"):
        plan_cache(CacheOptions(num_blocks=3), LAYOUT, 4, 64, True, 0)
    assert plan_cache(CacheOptions(num_blocks=3), LAYOUT, 4, 64, False, 0).max_model_len == 48


def test_no_memory_at_all() -> None:
    with pytest.raises(ConfigError, match="0 MiB are left: lower"):
        plan_cache(CacheOptions(), LAYOUT, 4, 64, False, -5)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_cgroup_v2_limits_of_all_groups_above(tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("0::/outer/inner\n")
    root = tmp_path / "fs"
    group(root / "outer/inner", memory__max="max", memory__current="5")
    group(root / "outer", memory__max=str(100 * MIB), memory__current=str(60 * MIB))
    group(root / "outer", memory__stat=f"anon 1\ninactive_file {20 * MIB}\n")
    assert available_memory(root, member) == 60 * MIB


def test_cgroup_v1(tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("4:cpu,cpuacct:/x\n5:memory:/docker/abc\n")
    usage = {"memory__limit_in_bytes": str(50 * MIB), "memory__usage_in_bytes": str(20 * MIB)}
    group(tmp_path / "fs/memory", **usage)  # in a container the mount shows its own group
    assert available_memory(tmp_path / "fs", member) == 30 * MIB


def test_no_cgroups(tmp_path: Path) -> None:
    there = available_memory(tmp_path, tmp_path / "none")
    assert 0.5 < there / psutil.virtual_memory().available < 2
