"""`noria bench`: measures a server at a URL, or the engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from noria.cli.bench_machine import JsonPath, kernels, roofline
from noria.cli.common import engine_options
from noria.errors import ConfigError

if TYPE_CHECKING:
    from noria.bench.http import Record
    from noria.bench.profile import Profile
    from noria.bench.workloads import BenchRequest, Lengths, WorkloadSpec
    from noria.config import EngineOptions

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure a server at a URL, or the engine in this process."
)
app.command()(roofline)
app.command()(kernels)

Preset = Annotated[str | None, typer.Option("--preset", help="A preset workload, W1 … W5; other flags change it.")]
NumRequests = Annotated[int | None, typer.Option("--num-requests", help="How many requests.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", help="Callers of a closed loop, each with one request at a time.")
]
Rate = Annotated[float | None, typer.Option("--request-rate", help="Open loop: mean arrivals per second.")]
Burstiness = Annotated[
    float | None, typer.Option("--burstiness", help="Open loop: 1 is Poisson, below 1 arrives in bursts.")
]
InputLen = Annotated[str | None, typer.Option("--input-len", help="Prompt tokens: N, or LOW:HIGH (log-uniform).")]
OutputLen = Annotated[str | None, typer.Option("--output-len", help="Output tokens: N, or LOW:HIGH (log-uniform).")]
SharedLen = Annotated[int | None, typer.Option("--shared-len", help="Tokens that all prompts begin with.")]
Dataset = Annotated[
    str, typer.Option("--dataset", help="Where prompts come from: text (English), random (shuffled words), or a file.")
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed makes the same workload.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Runs; the table shows the median run by throughput.")]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft-ms", help="Goodput counts requests within this TTFT.")]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot-ms", help="Goodput counts requests within this TPOT.")]


def _lengths(text: str | None, flag: str) -> Lengths | None:
    if text is None:
        return None
    try:
        low, _, high = text.partition(":")
        return (int(low), int(high)) if high else int(low)
    except ValueError:
        raise ConfigError(f"must be N or LOW:HIGH, got {text!r}", flag) from None


def _spec(preset: str | None, changes: dict[str, Any]) -> WorkloadSpec:
    from noria.bench.workloads import WorkloadSpec, presets

    known = presets()
    if preset is None:
        base = WorkloadSpec(concurrency=None if changes.get("rate") else 32)
    elif preset.upper() in known:
        base = known[preset.upper()]
    else:
        raise ConfigError(f"there is no preset {preset!r}; there are {', '.join(known)}", "--preset")
    given = {name: value for name, value in changes.items() if value is not None}
    if "rate" in given and "concurrency" not in given:
        given["concurrency"] = None
    # replace() does not run __post_init__, so the ranges are checked by building anew.
    return WorkloadSpec(**(msgspec.structs.asdict(base) | given))


def _asked(
    preset: str | None,
    loop: tuple[int | None, int | None, float | None, float | None],
    lengths: tuple[str | None, str | None, int | None],
) -> WorkloadSpec:
    """The workload that the flags common to `serve` and `offline` ask for."""
    requests, concurrency, rate, burstiness = loop
    prompt, output, shared = lengths
    changes = {
        "requests": requests,
        "concurrency": concurrency,
        "rate": rate,
        "burstiness": burstiness,
        "input": _lengths(prompt, "--input-len"),
        "output": _lengths(output, "--output-len"),
        "shared": shared,
    }
    return _spec(preset, changes)


def _requests(spec: WorkloadSpec, tokenizer_of: str, dataset: str, seed: int) -> list[BenchRequest]:
    from noria.bench.workloads import make_requests
    from noria.files.resolve import resolve
    from noria.frontend.tokenizer import load_tokenizer

    path = None
    if dataset not in ("text", "random"):
        path = Path(dataset)
        if not path.is_file():
            raise ConfigError(f"must be text, random or a text file, got {dataset!r}", "--dataset")
    tokenizer = load_tokenizer(resolve(tokenizer_of))
    return make_requests(spec, tokenizer, seed, "random" if dataset == "random" else "text", path)


@contextmanager
def _progress(total: int, title: str) -> Iterator[Callable[[Record], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    tokens = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, rate="")

        def done(record: Record) -> None:
            nonlocal tokens
            tokens += record.output_tokens
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(task, advance=1, rate=f"{tokens / elapsed:,.0f} tok/s")

        yield done


def _report(
    title: str,
    runs: list[list[Record]],
    slo: tuple[float | None, float | None],
    path: Path | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    from noria.bench.report import machine, print_summary, summarise, write_json

    ttft, tpot = (value / 1e3 if value is not None else None for value in slo)
    summaries = sorted((summarise(run, ttft, tpot) for run in runs), key=lambda s: float(s["output_tokens_per_s"]))
    median = summaries[len(summaries) // 2]
    if str(path) != "-":
        print_summary(title, median)
    if path is not None:
        write_json(path, {"title": title, "machine": machine(), **extra, "median": median, "runs": summaries})
    return median


@app.command()
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
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
) -> None:
    """Drive a server over HTTP and report throughput and latencies."""
    from noria.bench.http import Target, ask
    from noria.bench.load import run_load, run_loop

    loop = (num_requests, concurrency, request_rate, burstiness)
    spec = _asked(preset, loop, (input_len, output_len, shared_len))
    target = Target(url, model or _served_model(url, api_key), api_key, chat)
    target.address()
    runs = []
    for turn in range(repeat):
        requests = _requests(spec, tokenizer, dataset, seed + turn)
        with _progress(len(requests), preset or "serve") as done:
            runs.append(run_loop(run_load(lambda item: ask(target, item), requests, spec.concurrency, done)))
    extra = {"url": url, "model": target.model, "workload": msgspec.to_builtins(spec), "seed": seed}
    median = _report(f"{preset or 'workload'} at {url}", runs, (slo_ttft_ms, slo_tpot_ms), json, extra)
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


@app.command()
def offline(
    model: Annotated[
        str, typer.Option("--model", help="Short name, repository id, directory or GGUF file.")
    ] = "smollm2",
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
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, f32 or bf16.")] = "auto",
    quantization: Annotated[str, typer.Option("--quantization", help="auto, none, int8 or int4.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="auto, f32, bf16 or int8.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Most requests running at once.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Most tokens computed in one step.")
    ] = 512,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Compute threads (default: one per physical core).")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="cpu, or reference (NumPy, slow).")] = "cpu",
    profile: Annotated[bool, typer.Option("--profile", help="Show where each millisecond of a step goes.")] = False,
) -> None:
    """Run a workload on an engine in this process: no HTTP, no sockets."""
    from noria.bench.profile import Profile, print_profile

    options = engine_options(
        model={"model": model, "dtype": dtype, "quantization": quantization},
        cache={"dtype": kv_cache_dtype},
        scheduler={"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
        device={"threads": threads, "backend": backend},
    )
    loop = (num_requests, concurrency, request_rate, burstiness)
    spec = _asked(preset, loop, (input_len, output_len, shared_len))
    found = Profile() if profile else None
    runs = [_run_in_process(options, spec, dataset, seed + turn, preset or "offline", found) for turn in range(repeat)]
    extra = {"options": msgspec.to_builtins(options), "workload": msgspec.to_builtins(spec), "seed": seed}
    if found is not None:
        extra["profile"] = found.as_json()
    _report(f"{preset or 'workload'} in process, {model}", runs, (slo_ttft_ms, slo_tpot_ms), json, extra)
    if found is not None and str(json) != "-":
        print_profile(found)


@app.command("continuous-batching")
def continuous_batching(
    model: Annotated[str, typer.Option("--model", help="Short name, repository id, directory or GGUF file.")],
    num_requests: Annotated[int, typer.Option("--num-requests", help="How many requests.")] = 1000,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Callers, each with one request at a time.")] = 100,
    input_len: Annotated[str, typer.Option("--input-len", help="Prompt tokens: N, or LOW:HIGH.")] = "128",
    output_len: Annotated[str, typer.Option("--output-len", help="Output tokens: N, or LOW:HIGH.")] = "128",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Most running requests.")] = 256,
    enable_continuous_batching: Annotated[
        str, typer.Option("--enable-continuous-batching", help="true, or false: static batching, the baseline.")
    ] = "true",
    enable_adaptive_batch_size: Annotated[
        str, typer.Option("--enable-adaptive-batch-size", help="false; true is not there yet.")
    ] = "false",
    quantization: Annotated[str, typer.Option("--quantization", help="auto, none, int8 or int4.")] = "auto",
    seed: Seed = 0,
    json: JsonPath = None,
) -> None:
    """Continuous or static batching at a fixed batch size, in process."""
    if _flag(enable_adaptive_batch_size, "--enable-adaptive-batch-size"):
        raise ConfigError("is not yet possible; leave it out or say false", "--enable-adaptive-batch-size")
    continuous = _flag(enable_continuous_batching, "--enable-continuous-batching")
    options = engine_options(
        model={"model": model, "quantization": quantization},
        scheduler={"max_num_seqs": batch_size, "continuous": continuous},
    )
    lengths = {"input": _lengths(input_len, "--input-len"), "output": _lengths(output_len, "--output-len")}
    spec = _spec(None, {"requests": num_requests, "concurrency": concurrency, **lengths})
    title = f"{'continuous' if continuous else 'static'} batching, at most {batch_size} running"
    run = _run_in_process(options, spec, "text", seed, "continuous" if continuous else "static")
    extra = {"options": msgspec.to_builtins(options), "workload": msgspec.to_builtins(spec), "seed": seed}
    _report(title, [run], (None, None), json, extra)


def _flag(text: str, flag: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"must be true or false, got {text!r}", flag)
    return text.lower() == "true"


def _run_in_process(
    options: EngineOptions, spec: WorkloadSpec, dataset: str, seed: int, title: str, profile: Profile | None = None
) -> list[Record]:
    from noria.bench.offline import run_offline
    from noria.bench.profile import open_engine

    requests = _requests(spec, options.model.model, dataset, seed)
    with open_engine(options, profile) as core, _progress(len(requests), title) as done:
        return run_offline(core, requests, spec.concurrency, done)
