"""Steps of a loaded model by themselves, without engine or scheduler: a decode of so many sequences at a context, a
prefill of so many tokens. Each is run again and again with the clocks of its ops on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from noria.backends import get_backend
from noria.backends.base import Batch, CacheLayout, Limits
from noria.backends.counts import Key
from noria.config import EngineOptions
from noria.errors import ConfigError
from noria.files.resolve import resolve
from noria.models.loaders import open_checkpoint
from noria.models.registry import build_model, resolve_max_model_len
from noria.observe.cgroup import available_memory
from noria.quantize.schemes import choose_cache_type

if TYPE_CHECKING:
    from noria.backends.cpu import CpuBackend

_LOGITS_BYTES = 64 << 20  # most logits held at once, as in the worker
_LEAST_STEPS = 5
_WARM_UP = 2
_COMPUTED = 1024  # tokens of a sequence whose keys and values are computed, the rest is copied


@dataclass(frozen=True, slots=True)
class Phase:
    """A step to be measured.

    Attributes:
        kind: decode: one new token of each of `seqs` sequences, which are `length` tokens long with it;
            prefill: `seqs` prompts of `length` tokens from their start.
        all_outputs: every token's logits are wanted, not only those of each sequence's last.
    """

    kind: str
    seqs: int
    length: int
    all_outputs: bool = False

    @property
    def tokens(self) -> int:
        return self.seqs if self.kind == "decode" else self.seqs * self.length

    @property
    def outputs(self) -> int:
        return self.tokens if self.all_outputs else self.seqs

    @property
    def title(self) -> str:
        if self.kind == "decode":
            return f"decode {self.seqs} × {self.length}"
        return f"prefill {self.seqs} × {self.length}" if self.seqs > 1 else f"prefill {self.length}"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of a step that no neighbour on the machine disturbs, in seconds: each part's lowest decile over all steps.

    Attributes:
        whole: the sum of the parts. ops: by entry of `CpuProgram.times()`; the head itself takes the tokens, greedily.
        rest: of a step, what belongs to no op.
        steps: how many were measured. median: of all of them, the whole step as it was.
    """

    whole: float
    ops: dict[Key, float]
    rest: float
    steps: int
    median: float


class StepBench:
    """A model on the CPU backend, with a cache for the largest of the phases.

    Raises:
        ConfigError: another backend than cpu, a context that the model does not cover, or too little memory; besides
            what loading a model raises.
    """

    def __init__(self, options: EngineOptions, phases: Sequence[Phase]) -> None:
        if options.device.backend != "cpu":
            raise ConfigError("only the cpu backend has clocks for its ops", "--backend")
        self.phases = tuple(phases)
        checkpoint = open_checkpoint(resolve(options.model.model))
        config = checkpoint.config
        longest = max(phase.length for phase in phases)
        max_model_len = resolve_max_model_len(config, options.model.max_model_len)
        if longest > max_model_len:
            raise ConfigError(f"{longest} tokens exceed the model's context of {max_model_len}", "--context")
        self.backend = cast("CpuBackend", get_backend("cpu", options.device.threads))
        self.cache_layout = CacheLayout(
            config.layers,
            config.kv_heads,
            config.head_dim,
            options.cache.block_size,
            max(phase.seqs * self._blocks(phase.length, options.cache.block_size) for phase in phases),
            choose_cache_type(options.cache.dtype, options.model.dtype, config.head_dim),
        )
        model = build_model(checkpoint, self.backend, options.model, max_model_len, positions=longest)
        self._check_room(model.weight_bytes)
        self.vocab = config.vocab
        self.graph = model.graph
        self.schemes = model.schemes
        self.weight_bytes = model.weight_bytes
        self.limits = self._limits(options.scheduler.max_num_batched_tokens)
        self.program = self.backend.compile(model.graph, self.limits)
        self._cache = self.backend.new_cache(self.cache_layout)
        self._rng = np.random.default_rng(0)
        self._filled = (0, 0)  # length of the sequences that the cache holds, and how many

    def batch(self, phase: Phase) -> Batch:
        """The arrays of a phase's step. Each sequence's blocks are its own."""
        starts = [phase.length - 1 if phase.kind == "decode" else 0] * phase.seqs
        return self._batch(starts, [phase.length] * phase.seqs, phase.all_outputs)

    def prepare(self, phase: Phase) -> None:
        """Fills the cache with what the phase's sequences have computed before.

        The first thousand tokens of one sequence are computed, and copied for the rest of it and for all others: a
        step's time does not depend on the values. What the phase before this one left there for sequences of the same
        length is not made again.
        """
        if phase.kind != "decode" or phase.length == 1:
            self._filled = (0, 0)
            return
        length, filled = self._filled
        if length != phase.length:
            self._fill_first(phase.length)
            filled = 1
        self._filled = (phase.length, max(filled, phase.seqs))
        blocks = self._blocks(phase.length, self.cache_layout.block_size)
        for seq in range(filled, phase.seqs):
            self._copy(np.arange(blocks), np.arange(blocks) + seq * blocks)

    def _fill_first(self, length: int) -> None:
        """Of the first sequence, all but its last token."""
        size = self.cache_layout.block_size
        computed = min(length - 1, -(-_COMPUTED // size) * size)
        for start in range(0, computed, self.limits.max_tokens):
            self.program.run(self._batch([start], [min(start + self.limits.max_tokens, computed)], False), self._cache)
        if computed < length - 1:
            source = computed // size
            rest = np.arange(source, self._blocks(length, size))
            self._copy(rest % source, rest)

    def _copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._cache.copy_blocks(np.stack((sources, targets), axis=1).astype(np.int32))

    def measure(self, phase: Phase, seconds: float) -> StepTimes:
        """Runs the phase's step for about so long and returns its times."""
        self.prepare(phase)
        batch = self.batch(phase)
        for _ in range(_WARM_UP):
            self._step(batch)
        walls: list[float] = []
        ops: list[dict[Key, float]] = []
        end = time.perf_counter() + seconds
        while len(walls) < _LEAST_STEPS or time.perf_counter() < end:
            self.program.profile(True)
            wall = self._step(batch)
            ops.append({(str(entry["name"]), entry["op"]): float(entry["seconds"]) for entry in self.program.times()})
            walls.append(wall)
        self.program.profile(False)
        rests = np.array(walls) - np.array([sum(one.values()) for one in ops])
        parts = {key: _undisturbed([one[key] for one in ops]) for key in ops[0]}
        rest = _undisturbed(rests)
        whole = sum(parts.values()) + rest
        return StepTimes(whole, parts, rest, len(walls), float(np.median(walls)))

    def _step(self, batch: Batch) -> float:
        """Seconds of the step."""
        began = time.perf_counter()
        self.program.largest(0, self.program.run(batch, self._cache))
        return time.perf_counter() - began

    def _batch(self, starts: Sequence[int], ends: Sequence[int], all_outputs: bool) -> Batch:
        """Sequence i computes positions starts[i] … ends[i] - 1."""
        counts = np.array(ends) - np.array(starts)
        positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)]).astype(np.int32)
        size = self.cache_layout.block_size
        per_seq = self._blocks(max(ends), size)
        tables = np.arange(len(starts) * per_seq, dtype=np.int32).reshape(len(starts), per_seq)
        owner = np.repeat(np.arange(len(starts)), counts)
        query_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        tokens = int(query_starts[-1])
        outputs = np.arange(tokens, dtype=np.int32) if all_outputs else query_starts[1:] - np.int32(1)
        return Batch(
            input_ids=self._rng.integers(0, self.vocab, tokens, dtype=np.int32),
            positions=positions,
            kv_positions=(tables[owner, positions // size] * size + positions % size).astype(np.int32),
            query_starts=query_starts,
            kv_lengths=np.array(ends, np.int32),
            slots=np.arange(len(starts), dtype=np.int32),
            block_tables=tables,
            output_rows=outputs,
        )

    def _limits(self, budget: int) -> Limits:
        tokens = max(phase.tokens for phase in self.phases)
        outputs = max(phase.outputs for phase in self.phases)
        rows = min(outputs, max(16, _LOGITS_BYTES // (4 * self.vocab)))
        return Limits(max(tokens, budget), rows, max(max(phase.seqs for phase in self.phases), rows))

    def _check_room(self, weight_bytes: int) -> None:
        need, room = self.cache_layout.num_blocks * self.cache_layout.block_bytes, available_memory()
        if need > room:
            raise ConfigError(f"the cache would take {need >> 20} MiB, {room >> 20} are left", "--batch")

    @staticmethod
    def _blocks(length: int, size: int) -> int:
        return -(-length // size)


def _undisturbed(seconds: Sequence[float] | NDArray[np.float64]) -> float:
    return float(np.quantile(seconds, 0.1))
