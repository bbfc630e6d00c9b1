"""What a CPU can do at best, and the least that a step could take at that.

Measured once per machine, in an idle moment, and kept in a file; start-up never waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import msgspec

from noria import _native
from noria.files.replace import replace_file
from noria.files.resolve import home_dir
from noria.observe.cgroup import available_memory
from noria.pacer.base import StepShape
from noria.pacer.gauges import Least
from noria.plan import AttentionWork, StepWork

_log = logging.getLogger("noria.pacer")
_TURNS = 20_000  # of a product loop: some tenths of a millisecond per task
_TRIES = 10  # of each figure; the best counts, as neighbours only ever slow one down
_TRY = 0.002  # seconds that a try takes at least
_PIECE = 16 << 20  # bytes that are read at a time
_PIECES = 16  # together more than most caches hold
_PASSES = 4  # over all pieces
_AHEADS = (0, 2048)  # bytes that a read asks for ahead; the best counts
_TIMES = 3  # starts of an engine at which limits are measured
_MOST_KNOWN = 64  # machines in the file


class DeviceLimits(msgspec.Struct, frozen=True):
    """Per second, all threads together: products by arithmetic (a multiply-add is two), bytes read of memory.

    `times`: how often they were measured. The best counts: whoever else is at work only makes them look lower.
    """

    products: dict[str, float]
    read: float
    times: int = 1

    def sure(self, kinds: Iterable[str]) -> bool:
        """Whether all kinds of arithmetic are known, and no further measurement is needed."""
        return self.times >= _TIMES and set(kinds) <= self.products.keys()

    def better(self, other: DeviceLimits) -> DeviceLimits:
        """The best of both."""
        products = dict(self.products)
        for kind, rate in other.products.items():
            products[kind] = max(rate, products.get(kind, 0.0))
        return DeviceLimits(products, max(self.read, other.read), self.times + other.times)


def least_seconds(work: StepWork, limits: DeviceLimits) -> Least:
    """The least that steps of a model can take: products, weights and attention at the machine's limits.

    Of products and the weights that they read, the longer of the two counts; so it does for attention and the keys and
    values that it reads. Several steps that are about alike are counted as one shape, their sum.
    """
    per_token = sum(count / limits.products[kind] for kind, count in work.token.items())
    per_output = sum(count / limits.products[kind] for kind, count in work.output.items())
    weights, passing = work.weights / limits.read, work.passing / limits.read

    def least(shape: StepShape, steps: int = 1) -> float:
        outputs = shape.decode_rows + shape.prefill_rows
        products = max(per_token * shape.tokens + per_output * outputs, steps * weights + passing * shape.tokens)
        return products + sum(_attention(one, limits, shape) for one in work.attention)

    return least


def _attention(work: AttentionWork, limits: DeviceLimits, shape: StepShape) -> float:
    """A window bounds what the mean token sees: exact where all see about as much."""
    seen, held = 0.0, 0.0
    if shape.decode_rows:
        mean = shape.decode_context / shape.decode_rows
        seen = held = shape.decode_rows * _within(work.window, mean)
    if shape.prefill_tokens:
        mean = shape.prefill_context / shape.prefill_tokens
        half = 0.5 * (shape.prefill_tokens / shape.prefill_rows - 1.0)  # the last token of a row sees so many more
        seen += shape.prefill_tokens * _within(work.window, mean)
        held += shape.prefill_rows * _within(work.window + 2 * half if work.window else 0.0, mean + half)
    return max(work.operations * seen / limits.products[work.kind], work.bytes * held / limits.read)


def _within(window: float, positions: float) -> float:
    return min(window, positions) if window else positions


def arithmetic(work: StepWork) -> set[str]:
    """Kinds that a model needs."""
    return {*work.token, *work.output, *(one.kind for one in work.attention)}


# ---------------------------------------------------------------------------------------------------- measuring


class Measuring:
    """Measures limits piece by piece, each of a few milliseconds.

    Args:
        threads: of the engine. kinds: of arithmetic.
    """

    def __init__(self, threads: int, kinds: Iterable[str]) -> None:
        self._threads = threads
        self._kinds = sorted(kinds)
        self._pieces: Generator[None, None, DeviceLimits] | None = None

    def piece(self) -> DeviceLimits | None:
        """Does one; returns the limits after the last."""
        if self._pieces is None:
            self._pieces = self._all()
        try:
            next(self._pieces)
        except StopIteration as end:
            self._pieces = None
            found: DeviceLimits = end.value
            return found
        return None

    def give_up(self) -> None:
        """There are other things to do. It begins anew when there are none, and holds no memory until then."""
        self._pieces = None

    def _all(self) -> Generator[None, None, DeviceLimits]:
        pool = _native.Pool(self._threads)
        products = {}
        for kind in self._kinds:
            products[kind] = yield from _product_rate(pool, kind)
        read = yield from _read_rate(pool)
        return DeviceLimits(products, read)


def _product_rate(pool: Any, kind: str) -> Generator[None, None, float]:
    """The best of several tries, with a pause after each."""
    best, repeats, tries = 0.0, 1, 0
    while tries < _TRIES:
        began = time.perf_counter()
        done = int(_native.limit_products(pool, kind, _TURNS, repeats * pool.threads))
        seconds = max(time.perf_counter() - began, 1e-9)
        best = max(best, done / seconds)
        if seconds < _TRY:
            repeats *= 2
        else:
            tries += 1
        yield
    return best


def _read_rate(pool: Any) -> Generator[None, None, float]:
    """Each piece counts with its shortest time, so that a neighbour's time slices do not; all count, so that no piece
    that a cache happens to hold stands for all. A pause after each."""
    room = available_memory() // 8
    pieces = []
    for _ in range(max(1, min(_PIECES, room // _PIECE))):
        pieces.append(_native.LimitMemory(pool, _PIECE))
        yield
    best = 0.0
    for ahead in _AHEADS:
        shortest = [float("inf")] * len(pieces)
        for _ in range(_PASSES):
            for index, memory in enumerate(pieces):
                began = time.perf_counter()
                memory.read(pool, _PIECE, True, ahead, 1)
                shortest[index] = min(shortest[index], time.perf_counter() - began)
                yield
        best = max(best, len(pieces) * _PIECE / sum(shortest))
    return best


# ---------------------------------------------------------------------------------------------------- the file


class KnownLimits:
    """Limits of machines that were measured, in a file that whoever has none may do without.

    Args:
        path: of the file; None: in Noria's own folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """Of the file. Raises OSError if the user has no home."""
        return home_dir() / "limits.json" if self._path is None else self._path

    def find(self, machine: str, kinds: Iterable[str]) -> DeviceLimits | None:
        """What is known of a machine, if it is known for all kinds of arithmetic."""
        limits = self._read().get(machine)
        return limits if limits is not None and set(kinds) <= limits.products.keys() else None

    def keep(self, machine: str, limits: DeviceLimits) -> DeviceLimits:
        """Adds to what is known, and returns that; what cannot be written is measured again some day."""
        known = self._read()
        before = known.pop(machine, None)
        best = known[machine] = limits if before is None else before.better(limits)
        latest = dict(list(known.items())[-_MOST_KNOWN:])
        try:
            replace_file(self.path, msgspec.json.format(msgspec.json.encode(latest)))
        except OSError as error:
            _log.info("the machine's limits cannot be kept: %s", error)
        return best

    def _read(self) -> dict[str, DeviceLimits]:
        """Nothing, if there is no file that can be read; what makes no sense is left out."""
        try:
            known = msgspec.json.decode(self.path.read_bytes(), type=dict[str, DeviceLimits])
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return {}
        return {name: one for name, one in known.items() if all(0.0 < rate < 1e18 for rate in _rates(one))}


def _rates(limits: DeviceLimits) -> list[float]:
    return [limits.read, *limits.products.values()]


def processor_name() -> str:
    """The processor, as it calls itself."""
    return str(_native.topology()["cpu_model"])


def machine_name(isa: str, threads: int) -> str:
    """What limits depend on: processor, instruction set, threads."""
    return f"{processor_name()}, {isa}, {threads} threads"
