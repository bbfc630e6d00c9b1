"""`noria bench roofline` and `kernels`: what the machine can do, and how much of it the kernels reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from noria.cli.bench_common import (
    CacheDtype,
    Dtype,
    HtmlPath,
    JsonPath,
    Model,
    Quantization,
    Threads,
    write_figures,
    write_html,
)
from noria.cli.common import engine_options, positive_numbers
from noria.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from noria.bench.limits import MachineLimits
    from noria.bench.page import Part
    from noria.bench.products import ProductTime
    from noria.bench.roofline import PhaseReport
    from noria.bench.steps import Phase, StepBench

Seconds = Annotated[float, typer.Option("--seconds", min=0.0, help="About how long each step is measured.")]
Pin = Annotated[
    bool,
    typer.Option("--pin/--no-pin", help="Hold each compute thread to a processor of its own while a step is measured."),
]
_BUDGET = 1024  # tokens of a prefill step, as the engine's default is
_MOST_SEQS = 256  # that decode at once, as the engine's default is


def roofline(
    model: Model = "smollm2",
    preset: Annotated[
        str | None, typer.Option("--preset", help="Take batch, context and prompts from a preset workload, W1 … W5.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Sequences that decode: N,N,…; 0: no decoding (default 1,100).")
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", help="Tokens of each decoding sequence: N,N,… (default 192).")
    ] = None,
    chunk: Annotated[
        str | None, typer.Option("--chunk", help="Tokens of a prompt that is prefilled: N,N,…; 0: none (default 1024).")
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    threads: Threads = None,
    seconds: Seconds = 3.0,
    pin: Pin = False,
    limits_only: Annotated[bool, typer.Option("--limits-only", help="Measure the machine and no model.")] = False,
    json: JsonPath = None,
    html: HtmlPath = None,
) -> None:
    """Measure the machine's limits and what share of them a model's steps reach, op by op."""
    from noria.bench.limits import measure_limits
    from noria.bench.tables import make_console, print_limits, print_phase

    phases = [] if limits_only else _phases(preset, batch, context, chunk)
    reports: list[PhaseReport] = []
    limits = measure_limits(_threads(threads))
    console = None if str(json) == "-" else make_console()
    if console:
        print_limits(console, limits)
    found: dict[str, Any] = {"limits": limits.as_json()}
    if phases:
        bench = _load(model, dtype, quantization, kv_cache_dtype, threads, phases)
        found["model"] = _describe(model, bench)
        if console:
            console.print(f"{model}: {bench.schemes}, {bench.cache_layout.dtype} cache", highlight=False)
        for phase in phases:
            reports.append(_measure(bench, phase, limits, seconds, pin))
            if console:
                print_phase(console, reports[-1])
        found["phases"] = [one.as_json() for one in reports]
    if html is not None:
        write_html(html, "Roofline", _machine_parts(limits, found.get("model"), reports))
    write_figures(json, found)


def kernels(
    model: Model = "smollm2",
    rows: Annotated[str, typer.Option("--rows", help="Rows of each op: N,N,…")] = "1,8,100,512",
    context: Annotated[
        int, typer.Option("--context", min=1, help="Tokens that each of up to 256 rows, decoding, attends to.")
    ] = 192,
    shapes: Annotated[
        str | None, typer.Option("--shapes", help="Only products of these shapes, outputs x inputs: 1536x576,…")
    ] = None,
    schemes: Annotated[
        str, typer.Option("--schemes", help="With --shapes: their schemes, as int8/64,int4/32,bf16,f32.")
    ] = "int8/64,int4/32,bf16,f32",
    isa: Annotated[str | None, typer.Option("--isa", help="Instruction set level (default: the best one).")] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    threads: Threads = None,
    seconds: Seconds = 0.5,
    pin: Pin = True,
    json: JsonPath = None,
    html: HtmlPath = None,
) -> None:
    """Measure every op at a model's shapes, and the products by themselves, beside oneDNN where PyTorch brings it."""
    from noria.bench.limits import measure_limits, pinned_threads
    from noria.bench.onednn import load_onednn
    from noria.bench.products import products_of, random_product, time_products
    from noria.bench.tables import make_console

    counts = positive_numbers(rows, "--rows")
    if not counts:
        raise ConfigError("must name at least one number of rows", "--rows")
    pool = _pool(isa, threads)
    limits = measure_limits(pool.threads)
    found: dict[str, Any] = {"limits": limits.as_json()}
    reports = []
    if shapes is None:
        phases = _rows_as_phases(counts, context)
        bench = _load(model, dtype, quantization, kv_cache_dtype, threads, phases)
        found["model"] = _describe(model, bench)
        reports = [_measure(bench, phase, limits, seconds, pin) for phase in phases]
        found["ops"] = [one.as_json() for one in reports]
        products = products_of(bench.graph)
    else:
        products = [random_product(scheme, shape) for scheme in schemes.split(",") for shape in shapes.split(",")]
    onednn = load_onednn(pool.threads)
    with pinned_threads(pool if pin else None):
        times = list(time_products(products, counts, pool, limits, onednn, seconds))
    found |= {"products": [one.as_json() for one in times], "onednn": onednn.version if onednn else None}
    if str(json) != "-":
        _print_kernels(make_console(), limits, reports, times, found["onednn"])
    if html is not None:
        from noria.bench.machine_page import products_parts

        parts = [*_machine_parts(limits, found.get("model"), reports), *products_parts(times, found["onednn"])]
        write_html(html, "Kernels", parts)
    write_figures(json, found)


def _machine_parts(limits: MachineLimits, model: dict[str, Any] | None, reports: list[PhaseReport]) -> list[Part]:
    """What a page shows of the limits, and of a model's steps beside them if there is one."""
    from noria.bench.machine_page import limits_parts, phases_parts

    if model is None:
        return list(limits_parts(limits))
    about = f"{model['model']}: {model['weights']}, {model['cache']} cache, ISA level {model['isa']}"
    return [*limits_parts(limits), *phases_parts(about, reports)]


def _print_kernels(
    console: Console,
    limits: MachineLimits,
    reports: list[PhaseReport],
    times: list[ProductTime],
    onednn: str | None,
) -> None:
    from noria.bench.matrix import print_ops, print_products
    from noria.bench.tables import print_limits

    print_limits(console, limits)
    if reports:
        print_ops(console, reports)
    print_products(console, times, onednn)


def _pool(isa: str | None, threads: int | None) -> Any:
    """Chooses the level and makes a pool."""
    from noria import _native

    if isa is not None:
        try:
            _native.select_isa(isa)
        except ValueError as error:
            raise ConfigError(str(error), "--isa") from None
    return _native.Pool(_threads(threads))


def _rows_as_phases(counts: list[int], context: int) -> list[Phase]:
    """As many sequences as rows, up to what a server runs at once by default; beyond, the rows of one prompt."""
    from noria.bench.steps import Phase

    return [
        Phase("decode", count, context) if count <= _MOST_SEQS else Phase("prefill", 1, count, all_outputs=True)
        for count in counts
    ]


def _phases(preset: str | None, batch: str | None, context: str | None, chunk: str | None) -> list[Phase]:
    """Phases to measure: what the flags say, else what the preset says, else the defaults."""
    from noria.bench.steps import Phase

    batches, contexts = positive_numbers(batch or "1,100", "--batch"), positive_numbers(context or "192", "--context")
    prompts = [(1, tokens) for tokens in positive_numbers(chunk or "1024", "--chunk")]
    if preset is not None:
        preset_batch, preset_context, prompt, decodes = _preset(preset)
        batches = batches if batch else [preset_batch] if decodes else []
        contexts = contexts if context else [preset_context]
        length = min(prompt, _BUDGET)
        prompts = prompts if chunk else [(max(1, min(preset_batch, _BUDGET // length)), length)]
    decode = [Phase("decode", seqs, length) for seqs in batches for length in contexts]
    found = decode + [Phase("prefill", seqs, length) for seqs, length in prompts]
    if not found:
        raise ConfigError("nothing is left to be measured; say --limits-only if that is meant", "--batch")
    return found


def _preset(name: str) -> tuple[int, int, int, bool]:
    """Of a preset: requests at a time, mean tokens of a decoding one, mean prompt, and whether it decodes at all."""
    from noria.bench.workloads import presets

    known = presets()
    if name.upper() not in known:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(known)}", "--preset")
    spec = known[name.upper()]
    own, output = _mean(spec.input), _mean(spec.output)
    return spec.concurrency or 1, spec.shared + own + output // 2, spec.shared + own, output > 1


def _mean(lengths: int | tuple[int, int]) -> int:
    """Of lengths drawn log-uniformly."""
    import math

    if isinstance(lengths, int):
        return lengths
    low, high = lengths
    return low if low == high else round((high - low) / math.log(high / low))


def _threads(asked: int | None) -> int:
    from noria import _native

    return asked or int(_native.topology()["threads"])


def _load(model: str, dtype: str, quantization: str, cache: str, threads: int | None, phases: list[Phase]) -> StepBench:
    from noria.bench.steps import StepBench

    options = engine_options(
        model={"model": model, "dtype": dtype, "quantization": quantization},
        cache={"dtype": cache},
        device={"threads": threads},
    )
    return StepBench(options, phases)


def _describe(model: str, bench: StepBench) -> dict[str, Any]:
    return {
        "model": model,
        "weights": bench.schemes,
        "weight_bytes": bench.weight_bytes,
        "cache": bench.cache_layout.dtype,
        "threads": bench.backend.threads,
        "isa": bench.backend.isa,
    }


def _measure(bench: StepBench, phase: Phase, limits: MachineLimits, seconds: float, pin: bool) -> PhaseReport:
    from noria.backends.counts import count_step
    from noria.bench.limits import pinned_threads, read_rate
    from noria.bench.roofline import report, working_set

    works = count_step(bench.graph, bench.batch(phase), bench.cache_layout)
    stored_rate = read_rate(bench.backend.threads, working_set(works.values()))
    with pinned_threads(bench.backend.pool if pin else None):
        return report(phase, works, bench.measure(phase, seconds), limits, stored_rate)
