"""What this machine can do at best: products per second, bytes read per second, and what the thread pool itself costs.

The loops are native (csrc/kernels/limits.cpp): products that never leave the registers, in the instructions that the
kernels of the machine's best level are made of, whatever level the kernels run at: a share is one of what the machine
can do. A limit is the best of several tries, since neighbours only ever slow one down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from noria import _native
from noria.backends.counts import Arithmetic

ARITHMETICS: tuple[Arithmetic, ...] = ("int8", "bf16", "f32")
_TURNS = 20_000  # of a product loop: some tenths of a millisecond per task
_TRIES = 6  # at least
_TRY = 0.002  # seconds
_SLICE = 8 << 20  # bytes of a shared stretch that are timed together
_PASSES = 4  # over a shared stretch, at least
_AHEADS = (0, 2048, 8192)  # bytes that a read asks for ahead; the best counts
_MEMORY_BYTES = 256 << 20  # least that stands for "memory"
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rate:
    """Per second: of one thread alone, and of all threads together."""

    one: float
    all: float


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """Reading a stretch again and again. `bytes`: its size; of L2, per thread."""

    level: str  # L2, L3, memory
    bytes: int
    rate: Rate


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Attributes:
    isa: the machine's best level, whose instructions are measured.
    products: operations per second by arithmetic, a multiply-add being two.
    instructions: what those are made of.
    pinned: whether each thread was held to a processor of its own.
    wake_asleep, wake_awake: seconds from the start of a run until all threads are in it.
    run: seconds of a run of empty tasks, the least that an op costs.
    """

    isa: str
    threads: int
    pinned: bool
    products: dict[Arithmetic, Rate]
    instructions: dict[Arithmetic, str]
    reads: tuple[ReadLimit, ...]
    wake_asleep: float
    wake_awake: float
    run: float

    def read(self, nbytes: float) -> ReadLimit:
        """The nearest level that holds so many bytes between steps: what activations of that size are read at."""
        return next((limit for limit in self.reads if self._holds(limit) >= nbytes), self.reads[-1])

    def _holds(self, limit: ReadLimit) -> float:
        if limit.level == "memory":
            return float("inf")
        # L2 was measured over half of each thread's own; the stretch that measured L3 surely fits into it.
        return 2.0 * limit.bytes * self.threads if limit.level == "L2" else float(limit.bytes)

    def as_json(self) -> dict[str, Any]:
        """Plain data for a report."""
        return asdict(self)


def measure_limits(threads: int, seconds: float = 0.15, most_bytes: int = _MOST_BYTES) -> MachineLimits:
    """Measures everything.

    Args:
        seconds: about how long each figure takes. most_bytes: most memory taken.
    """
    one, every = _native.Pool(1), _native.Pool(threads)
    levels = read_levels(_native.topology(), threads, most_bytes)
    memory = _native.LimitMemory(every, max(stretch.bytes_of_all for stretch in levels))
    with best_level(), pinned_threads(every) as pinned:
        return MachineLimits(
            isa=_native.isa(),
            threads=threads,
            pinned=pinned,
            products={
                kind: Rate(_product_rate(one, kind, seconds), _product_rate(every, kind, seconds))
                for kind in ARITHMETICS
            },
            instructions={kind: _native.limit_instruction(kind) for kind in ARITHMETICS},
            reads=tuple(_read_limit(memory, one, every, level, seconds) for level in levels),
            wake_asleep=min(_native.limit_wake(every, True, 20)),
            wake_awake=min(_native.limit_wake(every, False, 200)),
            run=min(_native.limit_run(every, 1000) for _ in range(_TRIES)),
        )


@contextmanager
def best_level() -> Iterator[None]:
    """The machine's best ISA level for the length of a block. Nothing may be packed or run in it that is kept."""
    used = _native.isa()
    _native.select_isa(_native.available_isas()[-1])
    try:
        yield
    finally:
        _native.select_isa(used)


@contextmanager
def pinned_threads(pool: Any | None) -> Iterator[bool]:
    """Holds each thread of a pool (None: of no pool), this one included, to a processor of its own; yields whether that
    was possible."""
    if pool is None:
        yield False
        return
    pinned = bool(_native.limit_pin(pool, True))
    try:
        yield pinned
    finally:
        _native.limit_pin(pool, False)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What is read to measure a level: `bytes` shared by all threads, or by each if it is private."""

    level: str
    bytes: int
    private: bool
    threads: int

    @property
    def bytes_of_all(self) -> int:
        return self.bytes * self.threads if self.private else self.bytes


def read_levels(topology: dict[str, Any], threads: int, most_bytes: int = _MOST_BYTES) -> list[Stretch]:
    """Stretches to read: half of each thread's L2, a part of L3 that no L2 holds, and more than all caches hold.

    A level that the machine does not report, or that is too small to be told from the one below, is left out.
    """
    l2, l3 = int(topology["l2_bytes"]), int(topology["l3_bytes"])
    levels = []
    if l2:
        levels.append(Stretch("L2", _whole(l2 // 2), True, threads))
    middle = min(l3 // 2, 8 * l2 * threads)
    if middle > 2 * l2 * threads:
        levels.append(Stretch("L3", _whole(middle), False, threads))
    room = int(topology["memory_available_bytes"]) // 4
    most = min(max(_MEMORY_BYTES, 2 * l3), most_bytes, room)
    levels.append(Stretch("memory", _whole(max(most, threads << 16)), False, threads))
    return levels


def read_rate(threads: int, nbytes: int, seconds: float = 0.6) -> float:
    """Bytes per second that all threads together read of a stretch of `nbytes` (of at most 1 GiB), over and over: the
    limit of whatever reads so much once per step, part of which a large cache may hold."""
    pool = _native.Pool(threads)
    size = _whole(min(max(nbytes, threads << 16), _MOST_BYTES))
    memory = _native.LimitMemory(pool, size)
    with pinned_threads(pool):
        return _best_read(memory, pool, size, True, seconds)


def best_rate(work: Callable[[int], int], seconds: float) -> float:
    """Most per second that `work(repeats)` reached; it returns how much it did.

    Tries are short, so that some fall between the time slices of a neighbour, and take about `seconds` in all.
    """
    repeats = 1
    while True:
        began = time.perf_counter()
        best = work(repeats) / max(time.perf_counter() - began, 1e-9)
        spent = time.perf_counter() - began
        if spent >= _TRY or spent >= seconds / _TRIES:
            break
        repeats = min(repeats * 16, int(repeats * _TRY / max(spent, 1e-7)) + 1)
    end, tries = time.perf_counter() + seconds, 1
    while tries < _TRIES or time.perf_counter() < end:
        began = time.perf_counter()
        done = work(repeats)
        best = max(best, done / max(time.perf_counter() - began, 1e-9))
        tries += 1
    return best


def _product_rate(pool: Any, kind: Arithmetic, seconds: float) -> float:
    return best_rate(lambda repeats: int(_native.limit_products(pool, kind, _TURNS, repeats * pool.threads)), seconds)


def _read_limit(memory: Any, one: Any, every: Any, level: Stretch, seconds: float) -> ReadLimit:
    alone = _best_read(memory, one, level.bytes, not level.private, seconds)
    together = _best_read(memory, every, level.bytes_of_all, not level.private, seconds)
    return ReadLimit(level.level, level.bytes, Rate(alone, together))


def _best_read(memory: Any, pool: Any, nbytes: int, shared: bool, seconds: float) -> float:
    share = seconds / len(_AHEADS)
    if shared:
        return max(_rate_of_slices(memory, pool, nbytes, ahead, share) for ahead in _AHEADS)

    def own(ahead: int) -> float:
        return best_rate(lambda repeats: int(memory.read(pool, nbytes, False, ahead, repeats)), share)

    return max(own(ahead) for ahead in _AHEADS)


def _rate_of_slices(memory: Any, pool: Any, nbytes: int, ahead: int, seconds: float) -> float:
    """Reads a stretch slice by slice, over and over; each slice counts with its shortest time. So a neighbour's time
    slices do not count, and yet no slice that a cache happens to hold stands for all."""
    starts = list(range(0, nbytes, _SLICE))
    shortest = [float("inf")] * len(starts)
    end, passes = time.perf_counter() + seconds, 0
    while passes < _PASSES or time.perf_counter() < end:
        for index, start in enumerate(starts):
            began = time.perf_counter()
            memory.read(pool, min(_SLICE, nbytes - start), True, ahead, 1, start)
            shortest[index] = min(shortest[index], time.perf_counter() - began)
        passes += 1
    return nbytes / sum(shortest)


def _whole(nbytes: int) -> int:
    return max(nbytes >> 16, 1) << 16
