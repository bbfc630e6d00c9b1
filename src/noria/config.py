"""The resolved configuration: frozen once, handed out in parts, never passed around whole.

Owns defaults and ranges. Flags and files are read by `cli`; sizes that depend on the machine or the model
(number of blocks, context length) are resolved by the worker and reported back, not guessed here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from noria.errors import ConfigError

Dtype = Literal["auto", "f32", "bf16"]
Quantization = Literal["auto", "none", "int8", "int4"]
CacheDtype = Literal["auto", "f32", "bf16", "int8"]
Policy = Literal["fcfs", "priority", "fair"]
ReclaimStrategy = Literal["lru", "fifo", "random"]


def _in_range(flag: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"must be in {low}…{high}, got {value}", flag)


def _share(flag: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"must be above 0 and at most 1, got {value}", flag)


def _seconds(flag: str, value: float) -> None:
    if not 0.001 <= value <= 3600.0:
        raise ConfigError(f"must be in 0.001…3600 seconds, got {value}", flag)


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to load and how to hold it.

    Attributes:
        model: short name, repository id, directory or GGUF file, as the user wrote it.
        dtype: arithmetic of unquantised weights. f32 dequantises every file: the exact mode.
        quantization: scheme that weights are converted to on load; auto keeps what the file stores.
        max_model_len: most tokens of prompt and output together; None: what the model was made for.
        generation_config: take sampling defaults and end tokens from `generation_config.json`.
    """

    model: str
    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    max_model_len: int | None = None
    generation_config: bool = True

    def __post_init__(self) -> None:
        _in_range("--max-model-len", self.max_model_len, 1, 2**31 - 1)


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV cache.

    Attributes:
        dtype: auto is the smallest that costs under 0.5 % perplexity.
        block_size: tokens per block.
        num_blocks: None: as many as `memory_utilization` of the available memory allows, within what
            `max_num_seqs` requests of full length could use.
        memory_utilization: share of available memory for weights and cache, in (0, 1].
        layout: paged, or contiguous: one reserved region per running request (the reference; no sharing).
        prefix_cache_mb: MB of blocks that no request holds, beyond which they are reused before memory that was never
            used is touched; None: a 64th of the cache, at least 256.
        reclaim_strategy, reclaim_ratio: which cached blocks are given up, and what share of the pool at a time.
    """

    dtype: CacheDtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float = 0.9
    prefix_caching: bool = True
    prefix_cache_mb: int | None = None
    layout: Literal["paged", "contiguous"] = "paged"
    reclaim_strategy: ReclaimStrategy = "lru"
    reclaim_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(f"must be 8, 16, 32, 64 or 128, got {self.block_size}", "--block-size")
        # Positions in the cache are int32.
        _in_range("--num-blocks", self.num_blocks, 1, (2**31 - 1) // self.block_size)
        _share("--gpu-memory-utilization", self.memory_utilization)
        _in_range("--prefix-cache-mb", self.prefix_cache_mb, 0, 2**40)
        _share("--reclaim-ratio", self.reclaim_ratio)


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching.

    Attributes:
        max_num_seqs: most running requests.
        max_num_batched_tokens: token budget of one step.
        max_queued_requests: most waiting requests before 429.
        continuous: False: static batching, the baseline.
        static_timeout: seconds that an incomplete static batch waits for more requests.
        in_flight_depth: steps planned ahead of their results; 1 is synchronous. None: 2 where many requests run, so
            that planning takes no time of its own, else 1, so that planning does not disturb short steps.
        async_planning: False: no step is planned while another one is computed, as with `in_flight_depth` 1.
        max_preemptions: times that one request may be preempted before it is no longer chosen.
        build_interval: seconds that an idle engine gathers arrivals for before its first step.
        fusion: prefill chunks and decodes share a step; False: each step has one kind, in turns.
        prefetch: what admission needs of a request is prepared while it waits; False: when it is admitted.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 1024
    policy: Policy = "fcfs"
    continuous: bool = True
    static_timeout: float = 0.1
    in_flight_depth: int | None = None
    async_planning: bool = True
    max_preemptions: int = 8
    build_interval: float = 0.0
    fusion: bool = True
    prefetch: bool = True

    def __post_init__(self) -> None:
        _in_range("--max-num-seqs", self.max_num_seqs, 1, 1024)
        _in_range("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 65536)
        _in_range("--max-queued-requests", self.max_queued_requests, 1, 1_000_000)
        _in_range("in_flight_depth", self.in_flight_depth, 1, 2)
        if self.in_flight_depth == 2 and not self.async_planning:
            raise ConfigError("2 contradicts --no-enable-async-batch-building; leave one out", "in_flight_depth")
        if not 0.0 <= self.static_timeout <= 3600.0:
            raise ConfigError(f"must be in 0…3600 seconds, got {self.static_timeout}", "--static-batch-timeout")
        if not 0.0 <= self.build_interval <= 10.0:
            raise ConfigError(f"must be in 0…10 seconds, got {self.build_interval}", "--batch-build-interval")
        if self.policy == "fair" and not self.continuous:
            raise ConfigError(
                "fair needs requests that join at every step; leave --static-batching out", "--scheduling-policy"
            )


class RuleOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the predictor by rules.

    Attributes:
        growth: factor of the batch while requests wait and the device has room; above 1.
        shrink: factor of the batch while the device or its memory is beyond its threshold; in (0, 1).
        low_utilization: share of the device's limit below which it has room.
        long_queue: waiting requests per running one from which on the batch grows twice as fast.
        long_request: tokens, prompt and output, from which on a request counts as long: the batch is then smaller in
            proportion, by `long_request_shrink` at most.
    """

    growth: float = 1.25
    shrink: float = 0.8
    low_utilization: float = 0.5
    long_queue: float = 1.0
    long_request: int = 1024
    long_request_shrink: float = 0.5

    def __post_init__(self) -> None:
        if not 1.0 < self.growth <= 16.0:
            raise ConfigError(f"must be above 1 and at most 16, got {self.growth}", "rules.growth")
        if not 0.0 < self.shrink < 1.0:
            raise ConfigError(f"must be between 0 and 1, got {self.shrink}", "rules.shrink")
        _share("rules.low_utilization", self.low_utilization)
        if not 0.0 < self.long_queue <= 1e6:
            raise ConfigError(f"must be above 0, got {self.long_queue}", "rules.long_queue")
        _in_range("rules.long_request", self.long_request, 1, 2**31 - 1)
        _share("rules.long_request_shrink", self.long_request_shrink)


class PacerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pacer: what sets batch size and token budget while the engine runs. Most that it may set are
    `SchedulerOptions.max_num_seqs` and `max_num_batched_tokens`.

    Attributes:
        enabled: False: the most, always.
        predictor: who names the best sizes.
        min_batch_size: least running requests that it may set.
        adjustment_interval: seconds between two decisions.
        smoothing_factor: weight of the size at hand; the rest is the weight of the predicted one. 0: at once.
        monitoring: whether load is measured; off, the pacer is off too.
        monitoring_interval: seconds between two samples.
        device_threshold, memory_threshold: shares of the device's limit and of the memory beyond which the batch does
            not grow.
        slo_ttft_ms, slo_tpot_ms: objectives of a request; None: none.
        slo_percentile: share of requests that shall meet them, in percent.
        admission: slo: a request that cannot meet its objectives any more is refused.
        rules: of the predictor of that name.
    """

    enabled: bool = True
    predictor: Literal["learned", "rules"] = "learned"
    min_batch_size: int = 1
    adjustment_interval: float = 0.1
    smoothing_factor: float = 0.7
    monitoring: bool = True
    monitoring_interval: float = 0.1
    device_threshold: float = 0.8
    memory_threshold: float = 0.8
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_percentile: float = 90.0
    admission: Literal["all", "slo"] = "all"
    rules: RuleOptions = RuleOptions()

    def __post_init__(self) -> None:
        _in_range("--min-batch-size", self.min_batch_size, 1, 1024)
        _seconds("--adjustment-interval", self.adjustment_interval)
        _seconds("--monitoring-interval", self.monitoring_interval)
        if not 0.0 <= self.smoothing_factor < 1.0:
            raise ConfigError(f"must be at least 0 and below 1, got {self.smoothing_factor}", "--smoothing-factor")
        _share("--gpu-util-threshold", self.device_threshold)
        _share("--memory-util-threshold", self.memory_threshold)
        for flag, value in (("--slo-ttft-ms", self.slo_ttft_ms), ("--slo-tpot-ms", self.slo_tpot_ms)):
            if value is not None and not 0.0 < value <= 3.6e6:
                raise ConfigError(f"must be above 0 and at most an hour, got {value}", flag)
        if not 0.0 < self.slo_percentile < 100.0:
            raise ConfigError(f"must be between 0 and 100, got {self.slo_percentile}", "--slo-percentile")
        if self.admission == "slo" and self.slo_ttft_ms is None and self.slo_tpot_ms is None:
            raise ConfigError("slo needs an objective: --slo-ttft-ms, --slo-tpot-ms or both", "--admission")


class DeviceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the model runs. `threads` None: one per physical core within affinity and cgroup limits."""

    backend: Literal["cpu", "reference"] = "cpu"
    threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        _in_range("--threads", self.threads, 1, 1024)
        for flag, size in (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
        ):
            _in_range(flag, size, 1, 1024)
            if size > 1:
                raise ConfigError(f"{size} is not yet possible: Noria runs on one rank so far; leave it at 1", flag)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that an engine process is started with."""

    model: ModelOptions
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    pacer: PacerOptions = PacerOptions()
    device: DeviceOptions = DeviceOptions()

    def __post_init__(self) -> None:
        least, most = self.pacer.min_batch_size, self.scheduler.max_num_seqs
        if least > most:
            raise ConfigError(f"must be at most --max-num-seqs, which is {most}; got {least}", "--min-batch-size")


# Every setting of an engine by the name of its flag: part of EngineOptions and field in it.
ENGINE_SETTINGS: dict[str, tuple[str, str]] = {
    "dtype": ("model", "dtype"),
    "quantization": ("model", "quantization"),
    "max_model_len": ("model", "max_model_len"),
    "generation_config": ("model", "generation_config"),
    "kv_cache_dtype": ("cache", "dtype"),
    "block_size": ("cache", "block_size"),
    "num_blocks": ("cache", "num_blocks"),
    "gpu_memory_utilization": ("cache", "memory_utilization"),
    "enable_prefix_caching": ("cache", "prefix_caching"),
    "prefix_cache_mb": ("cache", "prefix_cache_mb"),
    "kv_cache_layout": ("cache", "layout"),
    "reclaim_strategy": ("cache", "reclaim_strategy"),
    "reclaim_ratio": ("cache", "reclaim_ratio"),
    "max_num_seqs": ("scheduler", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler", "max_num_batched_tokens"),
    "max_queued_requests": ("scheduler", "max_queued_requests"),
    "scheduling_policy": ("scheduler", "policy"),
    "static_batching": ("scheduler", "continuous"),  # inverted
    "static_batch_timeout": ("scheduler", "static_timeout"),
    "in_flight_depth": ("scheduler", "in_flight_depth"),
    "enable_async_batch_building": ("scheduler", "async_planning"),
    "batch_build_interval": ("scheduler", "build_interval"),
    "enable_batch_fusion": ("scheduler", "fusion"),
    "enable_prefetch": ("scheduler", "prefetch"),
    "adaptive_batch_size": ("pacer", "enabled"),
    "batch_size_predictor": ("pacer", "predictor"),
    "min_batch_size": ("pacer", "min_batch_size"),
    "adjustment_interval": ("pacer", "adjustment_interval"),
    "smoothing_factor": ("pacer", "smoothing_factor"),
    "load_monitoring": ("pacer", "monitoring"),
    "monitoring_interval": ("pacer", "monitoring_interval"),
    "gpu_util_threshold": ("pacer", "device_threshold"),
    "memory_util_threshold": ("pacer", "memory_threshold"),
    "slo_ttft_ms": ("pacer", "slo_ttft_ms"),
    "slo_tpot_ms": ("pacer", "slo_tpot_ms"),
    "slo_percentile": ("pacer", "slo_percentile"),
    "admission": ("pacer", "admission"),
    "rules": ("pacer", "rules"),
    "backend": ("device", "backend"),
    "threads": ("device", "threads"),
    "tensor_parallel_size": ("device", "tensor_parallel_size"),
    "pipeline_parallel_size": ("device", "pipeline_parallel_size"),
}


_PARTS: dict[str, type[msgspec.Struct]] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "pacer": PacerOptions,
    "device": DeviceOptions,
}


def engine_options(model: str, **settings: Any) -> EngineOptions:
    """EngineOptions from settings named as the flags are, with underscores.

    Raises:
        ConfigError: an unknown name (the nearest one is named), a wrong type or a value out of range.
    """
    parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    parts["model"]["model"] = model
    for name, value in settings.items():
        if name not in ENGINE_SETTINGS:
            raise ConfigError(f"there is no such setting{nearest(name, ENGINE_SETTINGS)}", name)
        part, field = ENGINE_SETTINGS[name]
        if name == "static_batching" and isinstance(value, bool):
            value = not value
        parts[part][field] = setting(_PARTS[part], field, value, "--" + name.replace("_", "-"))
    return EngineOptions(
        model=ModelOptions(**parts["model"]),
        cache=CacheOptions(**parts["cache"]),
        scheduler=SchedulerOptions(**parts["scheduler"]),
        pacer=PacerOptions(**parts["pacer"]),
        device=DeviceOptions(**parts["device"]),
    )


def setting(kind: type[msgspec.Struct], field: str, value: Any, flag: str, secret: bool = False) -> Any:
    """A value for a field of an options struct, checked for its type. Raises ConfigError that names the flag, and shows
    the value unless it is `secret`."""
    hint = next(known.type for known in msgspec.structs.fields(kind) if known.name == field)
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        allowed = [str(item) for item in get_args(hint) if isinstance(item, str)]
        message = f"must be one of {', '.join(allowed)}" if allowed else str(error)
        raise ConfigError(message if secret else f"{message}; got {value!r}", flag) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name nearest to a mistyped one; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


CallParser = Literal["auto", "hermes", "llama3_json", "mistral", "json"]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3", "mistral"]


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side. Sizes in bytes, times in seconds; no key at all: open to all. Parsers: `auto` goes by the chat
    template.

    Attributes:
        uds: path of a Unix socket to listen on instead of host and port; `uds_permissions`: of it, octal.
        api_keys: as clients send them, or `sha256:` and the digest.
        max_connections: at once. max_header_bytes: of a request's line and headers.
        client_timeout: for line and headers of a request, and for each further 16 KiB of its body.
        cors_allow_origins: web pages that may call from a browser; `*`: all.
        ssl_ca_certs: clients must show a certificate of one of these authorities.
        trust_request_chat_template: a request may bring its own template.
        metrics: requests are counted, and `/metrics` shows it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    uds_permissions: str = "600"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    cors_allow_origins: tuple[str, ...] = ()
    max_connections: int = 8192
    max_header_bytes: int = 64 * 1024
    client_timeout: float = 30.0
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: CallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    log_level: Literal["debug", "info", "warning", "error", "none"] = "info"
    log_format: Literal["text", "json"] = "text"
    drain_timeout: float = 30.0
    strict_fields: bool = False
    grammar_timeout: float = 10.0
    metrics: bool = True
