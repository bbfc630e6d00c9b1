"""`noria bench continuous-batching`: kinds of batching beside each other, in this process."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from noria.cli.bench_common import (
    AimTpot,
    AimTtft,
    Dataset,
    HtmlPath,
    JsonPath,
    Quantization,
    Repeat,
    Seed,
    Threads,
    make_spec,
    parse_lengths,
    parse_switch,
    report,
    run_in_process,
)
from noria.cli.common import engine_options
from noria.config import EngineOptions
from noria.errors import ConfigError

_SIZE, _BUDGET = 256, 512  # as the engine's defaults are


def continuous_batching(
    model: Annotated[str, typer.Option("--model", help="Short name, repository id, directory or GGUF file.")],
    num_requests: Annotated[int, typer.Option("--num-requests", help="How many requests.")] = 1000,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Callers, each with one request at a time.")] = 100,
    input_len: Annotated[str, typer.Option("--input-len", help="Prompt tokens: N, or LOW:HIGH.")] = "128",
    output_len: Annotated[str, typer.Option("--output-len", help="Output tokens: N, or LOW:HIGH.")] = "128",
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Running requests: as many as there are, up to this number (default 256)."),
    ] = None,
    enable_continuous_batching: Annotated[
        str, typer.Option("--enable-continuous-batching", help="true, or false: static batching, the baseline.")
    ] = "true",
    enable_adaptive_batch_size: Annotated[
        str | None,
        typer.Option(
            "--enable-adaptive-batch-size",
            help="true: the pacer sets the batch size, up to --batch-size; false: it is fixed "
            "(default: true, but false with --batch-size and for static batching).",
        ),
    ] = None,
    enable_moe_optimization: Annotated[
        str, typer.Option("--enable-moe-optimization", help="false; mixture of experts is not there yet.")
    ] = "false",
    quantization: Quantization = "auto",
    threads: Threads = None,
    dataset: Dataset = "text",
    seed: Seed = 0,
    repeat: Repeat = 1,
    json: JsonPath = None,
    html: HtmlPath = None,
    slo_ttft_ms: AimTtft = None,
    slo_tpot_ms: AimTpot = None,
) -> None:
    """Continuous batching, paced or at a fixed batch size, or static batching, in process."""
    if parse_switch(enable_moe_optimization, "--enable-moe-optimization"):
        raise ConfigError(
            "is not yet possible: dispatch of tokens to experts and grouped products of them are missing, and so are "
            "the models that have experts; leave it out or say false",
            "--enable-moe-optimization",
        )
    continuous = parse_switch(enable_continuous_batching, "--enable-continuous-batching")
    adaptive = _adaptive(enable_adaptive_batch_size, continuous, batch_size)
    size = batch_size if batch_size is not None else _SIZE
    slo = slo_ttft_ms, slo_tpot_ms
    options = batching_options(
        size, continuous, adaptive, slo, model={"model": model, "quantization": quantization}, threads=threads
    )
    lengths = {"input": parse_lengths(input_len, "--input-len"), "output": parse_lengths(output_len, "--output-len")}
    spec = make_spec(None, {"requests": num_requests, "concurrency": concurrency, **lengths})
    kind = "paced" if adaptive else "continuous" if continuous else "static"
    runs = [run_in_process(options, spec, dataset, seed + turn, kind) for turn in range(repeat)]
    extra = {"options": msgspec.to_builtins(options), "workload": msgspec.to_builtins(spec), "seed": seed}
    title = (
        f"{'continuous' if continuous else 'static'} batching, {'paced, ' if adaptive else ''}at most {size} running"
    )
    report(title, runs, slo, (json, html), extra)


def _adaptive(text: str | None, continuous: bool, batch_size: int | None) -> bool:
    """Whether the pacer sets the sizes. Who names a batch size means it, unless they say otherwise."""
    if text is None:
        return continuous and batch_size is None
    adaptive = parse_switch(text, "--enable-adaptive-batch-size")
    if adaptive and not continuous:
        raise ConfigError(
            "a static batch has a fixed size; leave one of --enable-adaptive-batch-size and "
            "--enable-continuous-batching out",
            "--enable-adaptive-batch-size",
        )
    return adaptive


def batching_options(
    size: int,
    continuous: bool,
    adaptive: bool,
    slo: tuple[float | None, float | None],
    model: dict[str, Any],
    threads: int | None = None,
    flag: str = "--batch-size",
) -> EngineOptions:
    """An engine of a batch size, fixed or the most that its pacer may set.

    Args:
        slo: objectives in milliseconds, for the pacer.
        flag: that the size was given with.
    """
    if not 1 <= size <= 1024:
        raise ConfigError(f"must be in 1…1024, got {size}", flag)
    return engine_options(
        model=model,
        # The budget has a token for every running request.
        scheduler={"max_num_seqs": size, "max_num_batched_tokens": max(size, _BUDGET), "continuous": continuous},
        pacer={"enabled": adaptive, "slo_ttft_ms": slo[0], "slo_tpot_ms": slo[1]},
        device={"threads": threads},
    )
