"""What the control groups (Linux, versions 2 and 1) that this process is in leave it of processors and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 says "no limit" with a huge number


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group with a limit.

    Attributes:
        limit: bytes.
        usage, stat: files that say what it uses, and of what kind.
        cache: key in `stat` of what the kernel gives up under pressure.
    """

    limit: int
    usage: Path
    stat: Path
    cache: str

    @property
    def left(self) -> int | None:
        """Bytes until the limit is reached, page cache that can be dropped not counted; None: it cannot be read."""
        usage = _number(self.usage)
        return None if usage is None else max(0, self.limit - usage + _stat(self.stat, self.cache))


def memory_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[MemoryGroup]:
    """The groups that bound this process's memory."""
    found = []
    for version, folder in _groups(root, membership, "memory"):
        if version == 2:
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit = _number(folder / names[0])
        if limit is not None and limit < _UNLIMITED:
            found.append(MemoryGroup(limit, folder / names[1], folder / "memory.stat", names[2]))
    return found


def available_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Bytes that can be taken without swapping: the machine's, or what the control groups leave, if that is less."""
    import psutil  # which refuses to be loaded on systems that it does not know

    left = [group.left for group in memory_groups(root, membership)]
    return min([int(psutil.virtual_memory().available), *(found for found in left if found is not None)])


def processors(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """How many processors' worth of time this process may use: those that it may run on, within the groups' quotas."""
    try:
        allowed = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not on this system
        allowed = float(os.cpu_count() or 1)
    return min([allowed, *_quotas(root, membership)])


def _quotas(root: Path, membership: Path) -> Iterator[float]:
    for version, folder in _groups(root, membership, "cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:  # not "max", nor -1
            yield int(quota) / int(period)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group that this process is in, from its own up to the root of the hierarchy."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mount = 2, root
        elif controller in controllers.split(","):
            version, mount = 1, root / controller
        else:
            continue
        # Within a container the path may be that of the host while the mount shows the container's own group: look at
        # the path, at all above it, and at the mount itself.
        relative = Path(path.lstrip("/"))
        for group in (relative, *relative.parents):
            yield version, mount / group


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _stat(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
