"""The worker: loads a model onto a backend, sizes the cache, and executes plans.

Sizes that depend on machine or model are resolved here and reported back as `WorkerInfo`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from noria.backends import get_backend
from noria.backends.base import Backend, CacheLayout, Limits
from noria.backends.work import step_work
from noria.config import EngineOptions
from noria.files.gguf import close_shared
from noria.files.resolve import resolve
from noria.models.loaders import open_checkpoint
from noria.models.registry import Model, build_model, resolve_max_model_len
from noria.observe.cgroup import available_memory
from noria.plan import StepPlan, StepResult, WorkerInfo
from noria.quantize.schemes import choose_cache_type
from noria.worker.grammar import Matchers
from noria.worker.memory import CachePlan, cache_tokens, plan_cache
from noria.worker.runner import Runner
from noria.worker.slots import Slots

_LOGITS_BYTES = 64 << 20  # most logits held at once
_MIN_LOGITS_ROWS = 16  # but a product over fewer rows would read the head's weight too often


class Worker:
    """A loaded model. All methods are called from one thread.

    Attributes:
        info: what was resolved.
        program: the compiled model, for whoever measures it.
        grammars: what outputs can be bound to; the only part that other threads may use.

    Raises:
        ConfigError, ModelError and its kin: as `resolve`, `open_checkpoint`, `build_model` and `plan_cache` say.
    """

    def __init__(self, options: EngineOptions) -> None:
        began = time.perf_counter()
        available = available_memory()  # before anything is loaded
        files = resolve(options.model.model)
        checkpoint = open_checkpoint(files)
        config = checkpoint.config
        max_model_len = resolve_max_model_len(config, options.model.max_model_len)
        backend = get_backend(options.device.backend, options.device.threads)
        layout = CacheLayout(
            config.layers,
            config.kv_heads,
            config.head_dim,
            options.cache.block_size,
            0,
            choose_cache_type(options.cache.dtype, options.model.dtype, config.head_dim),
        )
        limits = _limits(options, config.vocab)
        budget = int(available * options.cache.memory_utilization)
        most = cache_tokens(options.cache, layout, budget)
        model = build_model(checkpoint, backend, options.model, max_model_len, positions=most)
        del checkpoint  # all of it has been packed
        close_shared()
        taken = model.weight_bytes + _work_bytes(limits, model)
        fixed = options.model.max_model_len is not None
        plan = plan_cache(
            options.cache, layout, limits.max_seqs, max_model_len, fixed, budget - taken, available - taken
        )
        layout = replace(layout, num_blocks=plan.num_blocks)
        slots = Slots(limits.max_seqs, plan.max_model_len, layout.block_size, layout.num_blocks)
        self.program = backend.compile(model.graph, limits)
        self._backend = backend
        self._matchers = Matchers(limits.max_seqs, config.vocab, backend.threads)
        self.grammars = self._matchers.grammars
        self._runner = Runner(
            self.program,
            backend.new_cache(layout),
            backend.new_sampler(limits.max_seqs, config.vocab),
            self._matchers,
            slots,
            limits,
        )
        self.info = _info(backend, model, layout, limits, plan, time.perf_counter() - began)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carries out one step. Raises BackendError if the plan breaks its contract; the worker is then done for."""
        return self._runner.execute(plan)

    def close(self) -> None:
        """No step will follow."""
        self._matchers.close()

    def rest(self) -> None:
        """The next plan will take a while: processors are free until then."""
        self._backend.rest()


def _limits(options: EngineOptions, vocab: int) -> Limits:
    rows = max(_MIN_LOGITS_ROWS, _LOGITS_BYTES // (4 * vocab))
    max_seqs = options.scheduler.max_num_seqs
    # Also where few run at a time: a prompt's log-probabilities are a product over all its rows.
    rows = min(rows, max(max_seqs, _MIN_LOGITS_ROWS))
    return Limits(options.scheduler.max_num_batched_tokens, rows, max_seqs)


def _work_bytes(limits: Limits, model: Model) -> int:
    """Roughly what a program needs beside weights and cache: activations of a step, and logits."""
    config = model.config
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    per_token = 4 * (4 * config.hidden + 2 * config.intermediate + 2 * qkv)
    return limits.max_tokens * per_token + limits.max_outputs * config.vocab * 4


def _info(
    backend: Backend, model: Model, layout: CacheLayout, limits: Limits, plan: CachePlan, seconds: float
) -> WorkerInfo:
    config = model.config
    return WorkerInfo(
        vocab_size=config.vocab,
        max_model_len=plan.max_model_len,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        num_slots=limits.max_seqs,
        backend=backend.name,
        isa=backend.isa,
        threads=backend.threads,
        weights=model.schemes,
        cache_dtype=layout.dtype,
        weight_bytes=model.weight_bytes,
        cache_bytes=layout.num_blocks * layout.block_bytes,
        details={
            "architecture": config.architecture,
            "stored": config.stored_dtype,
            "layers": config.layers,
            "load_seconds": round(seconds, 3),
        },
        work=step_work(model.graph, layout),
    )
