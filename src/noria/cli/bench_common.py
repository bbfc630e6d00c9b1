"""What the commands of `noria bench` have in common: flags, workloads, progress, reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from noria.errors import ConfigError

if TYPE_CHECKING:
    from noria.bench.http import Record
    from noria.bench.offline import Sample
    from noria.bench.page import Part
    from noria.bench.profile import Profile
    from noria.bench.workloads import BenchRequest, Lengths, WorkloadSpec
    from noria.config import EngineOptions

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
AimTtft = Annotated[
    float | None, typer.Option("--slo-ttft-ms", help="Objective: the pacer aims at it, goodput counts what keeps it.")
]
AimTpot = Annotated[
    float | None, typer.Option("--slo-tpot-ms", help="Objective: the pacer aims at it, goodput counts what keeps it.")
]
Model = Annotated[str, typer.Option("--model", help="Short name, repository id, directory or GGUF file.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, f32 or bf16.")]
Quantization = Annotated[str, typer.Option("--quantization", help="auto, none, int8 or int4.")]
CacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto, f32, bf16 or int8.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Compute threads (default: one per physical core).")]
JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write the figures to this file (- for standard output).")
]
HtmlPath = Annotated[
    Path | None, typer.Option("--html", help="Write figures and curves to this file, one page that needs no other.")
]


@dataclass(slots=True)
class LoadRun:
    """A run of a workload: its records, what the engine's state was meanwhile, and the summary of both."""

    records: list[Record]
    samples: list[Sample] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def parse_lengths(text: str | None, flag: str) -> Lengths | None:
    """ "128" or "16:512". Raises ConfigError that names the flag."""
    if text is None:
        return None
    try:
        low, _, high = text.partition(":")
        return (int(low), int(high)) if high else int(low)
    except ValueError:
        raise ConfigError(f"must be N or LOW:HIGH, got {text!r}", flag) from None


def parse_switch(text: str, flag: str) -> bool:
    """ "true" or "false", as the recipes of other servers write it."""
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"must be true or false, got {text!r}", flag)
    return text.lower() == "true"


def make_spec(preset: str | None, changes: dict[str, Any]) -> WorkloadSpec:
    """A preset, or the default workload, with changes; those that are None are none."""
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


def asked(
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
        "input": parse_lengths(prompt, "--input-len"),
        "output": parse_lengths(output, "--output-len"),
        "shared": shared,
    }
    return make_spec(preset, changes)


def workload(spec: WorkloadSpec, tokenizer_of: str, dataset: str, seed: int) -> list[BenchRequest]:
    """The requests of a workload, cut by a model's tokeniser."""
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
def progress(total: int, title: str) -> Iterator[Callable[[Record], None]]:
    """A bar on standard error; what it yields is told of each request that has ended."""
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


def run_in_process(
    options: EngineOptions, spec: WorkloadSpec, dataset: str, seed: int, title: str, profile: Profile | None = None
) -> LoadRun:
    """One run on an engine of its own."""
    from noria.bench.offline import Sampler, run_offline
    from noria.bench.profile import open_engine

    requests = workload(spec, options.model.model, dataset, seed)
    with open_engine(options, profile) as core, progress(len(requests), title) as done:
        sampler = Sampler()
        return LoadRun(run_offline(core, requests, spec.concurrency, done, sampler), sampler.samples)


def report(
    title: str,
    runs: Sequence[LoadRun],
    slo: tuple[float | None, float | None],
    paths: tuple[Path | None, Path | None],
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Prints the median run by throughput and writes what was asked for; returns its summary.

    Args:
        slo: objectives of TTFT and TPOT in milliseconds. paths: of JSON and HTML.
    """
    from noria.bench.offline import sizes
    from noria.bench.report import print_summary, summarise

    ttft, tpot = (value / 1e3 if value is not None else None for value in slo)
    for run in runs:
        run.summary = summarise(run.records, ttft, tpot)
        if run.samples:
            run.summary["sizes"] = sizes(run.samples)
    ordered = sorted(runs, key=lambda run: float(run.summary["output_tokens_per_s"]))
    median, summaries = ordered[len(ordered) // 2], [run.summary for run in ordered]
    if str(paths[0]) != "-":
        print_summary(title, median.summary)
    if paths[1] is not None:
        from noria.bench.load_page import load_parts

        write_html(paths[1], title, load_parts(median.records, median.summary, summaries, median.samples))
    write_figures(paths[0], {"title": title, **extra, "median": median.summary, "runs": summaries})
    return median.summary


def write_figures(path: Path | None, found: dict[str, Any]) -> None:
    """JSON, with what is known of the machine, if asked for."""
    if path is not None:
        from noria.bench.report import machine, write_json

        write_json(path, {"machine": machine(), **found})


def write_html(path: Path, title: str, parts: Sequence[Part]) -> None:
    """A page, headed by where, when and how its figures were measured."""
    from noria.bench.page import about, command_line, page, write_page
    from noria.bench.report import machine

    write_page(path, page(title, about(machine(), command_line(sys.argv[1:])), parts))
