"""The flags as data: name, type, help. `serve`, `chat` and others are built from it, so that a flag means one thing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

SERVER, MODEL, BATCHING, PACER, CACHE, MACHINE = "Server", "Model", "Batching", "Pacer", "KV cache", "Machine"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag. Absent flags are None: defaults belong to the options structs, and a file may set them too."""

    name: str
    kind: Any
    panel: str
    help: str

    @property
    def parameter(self) -> inspect.Parameter:
        """As a parameter that typer reads."""
        dashed = self.name.replace("_", "-")
        names = f"--{dashed}/--no-{dashed}" if self.kind is bool else f"--{dashed}"
        option = typer.Option(names, help=self.help, rich_help_panel=self.panel, show_default=False)
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=None, annotation=Annotated[self.kind | None, option])


SERVER_FLAGS = (
    Flag("host", str, SERVER, "Address to listen on; 0.0.0.0 for all (default 127.0.0.1)."),
    Flag("port", int, SERVER, "Port to listen on; 0 picks a free one (default 8000)."),
    Flag("uds", str, SERVER, "Path of a Unix socket to listen on instead of host and port."),
    Flag("uds_permissions", str, SERVER, "Who may connect to it, octal (default 600: its owner)."),
    Flag("ssl_certfile", str, SERVER, "Certificate in PEM, with those between it and the authority: HTTPS."),
    Flag("ssl_keyfile", str, SERVER, "Its key in PEM (default: in the same file)."),
    Flag("ssl_keyfile_password", str, SERVER, "Password of an encrypted key."),
    Flag("ssl_ca_certs", str, SERVER, "Authorities in PEM, one of which must have signed each client's certificate."),
    Flag("cors_allow_origins", list[str], SERVER, "Origin whose web pages may call; once per origin, * for all."),
    Flag("max_connections", int, SERVER, "Most connections at once (default 8192)."),
    Flag("max_header_bytes", int, SERVER, "Largest line and headers of a request, in bytes (default 65536)."),
    Flag("client_timeout", float, SERVER, "Seconds for a request's headers, and per 16 KiB of its body (default 30)."),
    Flag("served_model_name", str, SERVER, "Name that clients use for the model (default: MODEL as given)."),
    Flag("api_key", list[str], SERVER, "Key that clients must send; once per key (default: open to all)."),
    Flag("api_key_file", str, SERVER, "YAML or JSON list of keys: name, key or sha256:…, limits and share of each."),
    Flag("max_body_bytes", int, SERVER, "Largest request accepted, in bytes (default 8388608)."),
    Flag("chat_template", str, SERVER, "Jinja chat template, or a file with one, instead of the model's own."),
    Flag("trust_request_chat_template", bool, SERVER, "Whether a request may bring its own template (default no)."),
    Flag("tool_call_parser", str, SERVER, "hermes, llama3_json, mistral or json (default: as the template tells)."),
    Flag("reasoning_parser", str, SERVER, "deepseek_r1, qwen3, mistral or none (default: as the template tells)."),
    Flag("log_level", str, SERVER, "debug, info, warning, error or none (default info)."),
    Flag("log_format", str, SERVER, "text, or json: one object per line (default text)."),
    Flag("drain_timeout", float, SERVER, "Seconds that running requests have to finish at the end (default 30)."),
    Flag("strict_fields", bool, SERVER, "Whether a field that is not known is refused (default no: it is ignored)."),
    Flag("grammar_timeout", float, SERVER, "Seconds that a schema or grammar may take to compile (default 10)."),
    Flag("enable_metrics", bool, SERVER, "Whether requests are counted and /metrics shows it (default yes)."),
)

ENGINE_FLAGS = (
    Flag("dtype", str, MODEL, "f32 or bf16: arithmetic of unquantised weights; f32 dequantises every file."),
    Flag("quantization", str, MODEL, "none, int8 or int4: converts weights on load (default: as the file has them)."),
    Flag("max_model_len", int, MODEL, "Most tokens of prompt and answer together (default: the model's)."),
    Flag("generation_config", bool, MODEL, "Whether the model's own sampling defaults are used (default yes)."),
    Flag("max_num_seqs", int, BATCHING, "Most requests running at once (default 256)."),
    Flag("max_num_batched_tokens", int, BATCHING, "Most tokens computed in one step (default 512)."),
    Flag("max_queued_requests", int, BATCHING, "Most requests waiting; more are refused with 429 (default 1024)."),
    Flag(
        "scheduling_policy",
        str,
        BATCHING,
        "fcfs; priority: smaller `priority` first; fair: keys served least first (default fcfs).",
    ),
    Flag("static_batching", bool, BATCHING, "The baseline: a batch runs until its last request ends."),
    Flag("static_batch_timeout", float, BATCHING, "Seconds that an incomplete static batch waits (default 0.1)."),
    Flag("batch_build_interval", float, BATCHING, "Seconds that an idle engine gathers arrivals (default 0)."),
    Flag("enable_async_batch_building", bool, BATCHING, "Plan a step while another is computed (default yes)."),
    Flag("enable_prefetch", bool, BATCHING, "Prepare requests for admission while they wait (default yes)."),
    Flag("enable_batch_fusion", bool, BATCHING, "Prefill and decode in one step; else in turns (default yes)."),
    Flag("adaptive_batch_size", bool, PACER, "Whether batch size and token budget follow the load (default yes)."),
    Flag("batch_size_predictor", str, PACER, "learned: from this machine's own steps; or rules (default learned)."),
    Flag("slo_ttft_ms", float, PACER, "Objective: milliseconds to the first token (default: none)."),
    Flag("slo_tpot_ms", float, PACER, "Objective: mean milliseconds per further token (default: none)."),
    Flag("slo_percentile", float, PACER, "Percentage of requests that shall meet the objectives (default 90)."),
    Flag("admission", str, PACER, "slo: what cannot meet its objective any more is refused with 429 (default all)."),
    Flag("min_batch_size", int, PACER, "Least running requests that the pacer may set (default 1)."),
    Flag("adjustment_interval", float, PACER, "Seconds between two decisions (default 0.1)."),
    Flag("smoothing_factor", float, PACER, "Weight of the size at hand beside the predicted one (default 0.7)."),
    Flag("load_monitoring", bool, PACER, "Whether load is measured; the pacer needs it (default yes)."),
    Flag("monitoring_interval", float, PACER, "Seconds between two samples (default 0.1)."),
    Flag("gpu_util_threshold", float, PACER, "Share of the device's limit beyond which it is full (default 0.8)."),
    Flag("memory_util_threshold", float, PACER, "Share of memory beyond which the batch does not grow (default 0.8)."),
    Flag("kv_cache_dtype", str, CACHE, "f32, bf16 or int8 (default: the smallest that keeps the quality)."),
    Flag("block_size", int, CACHE, "Tokens per block: 8, 16, 32, 64 or 128 (default 16)."),
    Flag("num_blocks", int, CACHE, "Blocks in the cache (default: what memory allows)."),
    Flag("gpu_memory_utilization", float, CACHE, "Share of available memory to use; of RAM on a CPU (default 0.9)."),
    Flag("enable_prefix_caching", bool, CACHE, "Whether a beginning that prompts share is kept (default yes)."),
    Flag(
        "prefix_cache_mb",
        int,
        CACHE,
        "Memory for beginnings not in use (default 1/64 of the cache, at least 256).",
    ),
    Flag("kv_cache_layout", str, CACHE, "paged or contiguous (default paged)."),
    Flag("reclaim_strategy", str, CACHE, "lru, fifo or random: which kept blocks go first (default lru)."),
    Flag("reclaim_ratio", float, CACHE, "Share of the blocks reclaimed at a time (default 0.1)."),
    Flag("threads", int, MACHINE, "Compute threads (default: one per physical core)."),
    Flag("backend", str, MACHINE, "cpu, or reference: slow and plain, for checking (default cpu)."),
    Flag("tensor_parallel_size", int, MACHINE, "Ranks that share each layer; only 1 so far."),
    Flag("pipeline_parallel_size", int, MACHINE, "Ranks that share the layers; only 1 so far."),
)


def with_flags(flags: Iterable[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command whose last parameter is `**flags` these flags. It is called with those that were given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        added = [flag.parameter for flag in flags]

        def call(**values: Any) -> None:
            names = {parameter.name for parameter in own}
            given = {name: value for name, value in values.items() if name in names or value not in (None, [])}
            command(**given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [*(parameter.replace(kind=keyword) for parameter in own), *added]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__doc__, call.__name__ = command.__doc__, command.__name__
        return call

    return decorate
