"""`noria bench serve` and `offline`: a workload, over HTTP or in this process."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from noria.cli.bench_common import (
    AimTpot,
    AimTtft,
    Burstiness,
    CacheDtype,
    Concurrency,
    Dataset,
    Dtype,
    HtmlPath,
    InputLen,
    JsonPath,
    LoadRun,
    Model,
    NumRequests,
    OutputLen,
    Preset,
    Quantization,
    Rate,
    Repeat,
    Seed,
    SharedLen,
    SloTpot,
    SloTtft,
    Threads,
    asked,
    progress,
    report,
    run_in_process,
    workload,
)
from noria.cli.common import engine_options
from noria.errors import ConfigError


def serve(
    url: Annotated[
        str, typer.Option("--url", help="Base URL of any OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Name the server knows the model by; asked if absent.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="Local model whose tokeniser cuts the prompts to length.")
    ] = "smollm2",
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key to send to the server.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use chat completions instead of completions.")] = False,
    preset: Preset = None,
    num_requests: NumRequests = None,
    concurrency: Concurrency = None,
    request_rate: Rate = None,
    burstiness: Burstiness = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    shared_len: SharedLen = None,
    dataset: Dataset = "text",
    seed: Seed = 0,
    repeat: Repeat = 1,
    json: JsonPath = None,
    html: HtmlPath = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
) -> None:
    """Drive a server over HTTP and report throughput and latencies."""
    from noria.bench.http import Target, ask
    from noria.bench.load import run_load, run_loop

    loop = (num_requests, concurrency, request_rate, burstiness)
    spec = asked(preset, loop, (input_len, output_len, shared_len))
    target = Target(url, model or _served_model(url, api_key), api_key, chat)
    target.address()
    runs = []
    for turn in range(repeat):
        requests = workload(spec, tokenizer, dataset, seed + turn)
        with progress(len(requests), preset or "serve") as done:
            runs.append(LoadRun(run_loop(run_load(lambda item: ask(target, item), requests, spec.concurrency, done))))
    extra = {"url": url, "model": target.model, "workload": msgspec.to_builtins(spec), "seed": seed}
    median = report(f"{preset or 'workload'} at {url}", runs, (slo_ttft_ms, slo_tpot_ms), (json, html), extra)
    if median["completed"] < median["requests"]:
        raise typer.Exit(1)


def _served_model(url: str, api_key: str | None) -> str:
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{base}/v1/models", headers=headers, timeout=10, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"cannot ask {base}/v1/models for the model's name ({error}); start the server or give --model", "--url"
        ) from None


def offline(
    model: Model = "smollm2",
    preset: Preset = None,
    num_requests: NumRequests = None,
    concurrency: Concurrency = None,
    request_rate: Rate = None,
    burstiness: Burstiness = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    shared_len: SharedLen = None,
    dataset: Dataset = "text",
    seed: Seed = 0,
    repeat: Repeat = 1,
    json: JsonPath = None,
    html: HtmlPath = None,
    slo_ttft_ms: AimTtft = None,
    slo_tpot_ms: AimTpot = None,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Most requests running at once.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Most tokens computed in one step.")
    ] = 512,
    adaptive_batch_size: Annotated[
        bool, typer.Option(help="The pacer sets batch size and token budget; otherwise they stay at the most.")
    ] = True,
    threads: Threads = None,
    backend: Annotated[str, typer.Option("--backend", help="cpu, or reference (NumPy, slow).")] = "cpu",
    profile: Annotated[bool, typer.Option("--profile", help="Show where each millisecond of a step goes.")] = False,
) -> None:
    """Run a workload on an engine in this process: no HTTP, no sockets."""
    from noria.bench.profile import Profile, print_profile

    options = engine_options(
        model={"model": model, "dtype": dtype, "quantization": quantization},
        cache={"dtype": kv_cache_dtype},
        scheduler={"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
        pacer={"enabled": adaptive_batch_size, "slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms},
        device={"threads": threads, "backend": backend},
    )
    loop = (num_requests, concurrency, request_rate, burstiness)
    spec = asked(preset, loop, (input_len, output_len, shared_len))
    found = Profile() if profile else None
    runs = [run_in_process(options, spec, dataset, seed + turn, preset or "offline", found) for turn in range(repeat)]
    extra = {"options": msgspec.to_builtins(options), "workload": msgspec.to_builtins(spec), "seed": seed}
    if found is not None:
        extra["profile"] = found.as_json()
    title = f"{preset or 'workload'} in process, {model}"
    report(title, runs, (slo_ttft_ms, slo_tpot_ms), (json, html), extra)
    if found is not None and str(json) != "-":
        print_profile(found)
