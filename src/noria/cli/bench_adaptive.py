"""`noria bench adaptive`: one trace against fixed batch sizes and against the pacer, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from noria.cli.bench_batching import batching_options
from noria.cli.bench_common import (
    CacheDtype,
    HtmlPath,
    JsonPath,
    Model,
    Quantization,
    Seed,
    Threads,
    progress,
    write_figures,
    write_html,
)
from noria.cli.common import positive_numbers
from noria.errors import ConfigError

if TYPE_CHECKING:
    from noria.bench.adaptive import Contestant, Turn
    from noria.bench.trace import Aims, Calibration, Row, Trace
    from noria.bench.workloads import BenchRequest
    from noria.config import EngineOptions


def adaptive(
    model: Model = "smollm2",
    sizes: Annotated[
        str, typer.Option("--sizes", help="Fixed batch sizes to compare with: N,N,…; 0: none.")
    ] = "8,16,32,64,128,256",
    pacer: Annotated[bool, typer.Option("--pacer/--no-pacer", help="Replay against the pacer, too.")] = True,
    max_batch_size: Annotated[int, typer.Option("--max-batch-size", help="Most that the pacer may set.")] = 256,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Replays of each, in turns; medians count.")] = 1,
    slo_ttft_ms: Annotated[
        float | None, typer.Option("--slo-ttft-ms", help="Objective (default: between what batch 8 and 256 give).")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option("--slo-tpot-ms", help="Objective (default: between what batch 8 and 256 give).")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="Take it from this report instead of measuring it again.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A trace of your own, in the form of the one that is built in.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="In virtual time: no model, step times of a small machine.")
    ] = False,
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    json: JsonPath = None,
    html: HtmlPath = None,
) -> None:
    """Replay a trace whose load changes: fixed batch sizes beside the pacer, goodput and latencies by phase."""
    from noria.bench.adaptive import PACER, compete
    from noria.bench.trace import aims, load_trace, read_calibration

    fixed = positive_numbers(sizes, "--sizes")
    if not fixed and not pacer:
        raise ConfigError("nothing is left to be replayed; name a size or leave --no-pacer out", "--sizes")
    what, digest = load_trace(trace)
    parts = {"model": "simulated" if simulate else model, "quantization": quantization}
    contest = _Contest(parts, kv_cache_dtype, threads, simulate, seed)
    options = {str(size): contest.options(size) for size in fixed}
    # So that what cannot be is said at once, not after the calibration.
    batching_options(max_batch_size, True, True, (slo_ttft_ms, slo_tpot_ms), parts, flag="--max-batch-size")
    found = read_calibration(calibration, contest.setup) if calibration else contest.calibrate(what)
    goals = aims(what, found, slo_ttft_ms, slo_tpot_ms)
    if pacer:
        options[PACER] = contest.options(max_batch_size, goals)
    requests = contest.requests(what.rows(), found.unit)
    everybody = compete(
        list(options), repeat, what, found.unit, goals, lambda who: contest.replay(options[who], requests, who)
    )
    _report(everybody, _Setting(what, digest, found, goals), (json, html))


class _Contest:
    """Engines of one model, one after the other, or simulated ones.

    Args:
        model: fields of ModelOptions. seed: of prompts.
    """

    def __init__(self, model: dict[str, Any], cache: str, threads: int | None, simulate: bool, seed: int) -> None:
        self._model, self._cache, self._threads = model, cache, threads
        self._simulate, self._seed = simulate, seed

    @property
    def setup(self) -> str:
        """What a calibration is good for."""
        if self._simulate:
            return str(self._model["model"])
        how = f"quantization {self._model['quantization']}, cache {self._cache}, threads {self._threads or 'auto'}"
        return f"{self._model['model']}, {how}"

    def options(self, size: int, goals: Aims | None = None) -> EngineOptions:
        """Of an engine with a fixed batch size, or with a pacer that is to reach the goals."""
        slo = (1e3 * goals.ttft, 1e3 * goals.tpot) if goals else (None, None)
        made = batching_options(size, True, goals is not None, slo, self._model, self._threads, "--sizes")
        return msgspec.structs.replace(made, cache=msgspec.structs.replace(made.cache, dtype=self._cache))

    def calibrate(self, trace: Trace) -> Calibration:
        """Runs the calibration's load with its two batch sizes."""
        from noria.bench.adaptive import calibrate

        load = trace.calibration
        requests = self.requests([(0.0, load.prompt, load.output)] * load.requests, 1.0)
        return calibrate(
            self.setup,
            trace,
            lambda size: self.replay(self.options(size), requests, f"calibration, {size}").records,
        )

    def requests(self, rows: Sequence[Row], unit: float) -> list[BenchRequest]:
        """With prompts of text, or of numbers where nothing computes them."""
        from noria.bench.workloads import place_requests
        from noria.files.resolve import resolve
        from noria.frontend.tokenizer import load_tokenizer

        if self._simulate:
            from noria.bench.simulate import numbered_requests

            return numbered_requests(rows, unit)
        return place_requests(rows, load_tokenizer(resolve(self._model["model"])), self._seed, unit)

    def replay(self, options: EngineOptions, requests: Sequence[BenchRequest], title: str) -> Turn:
        """On an engine that nobody has used."""
        from noria.bench.adaptive import replay
        from noria.bench.profile import open_engine
        from noria.bench.simulate import VirtualClock, simulated_engine

        with progress(len(requests), title) as done:
            if self._simulate:
                clock = VirtualClock()
                return replay(simulated_engine(options, clock), requests, done, clock)
            with open_engine(options) as core:
                return replay(core, requests, done)


@dataclass(frozen=True, slots=True)
class _Setting:
    """What was replayed, and by which measure. `digest`: of the trace."""

    trace: Trace
    digest: str
    calibration: Calibration
    goals: Aims


def _report(found: Sequence[Contestant], setting: _Setting, paths: tuple[Path | None, Path | None]) -> None:
    from noria.bench.adaptive import as_json, verdict
    from noria.bench.adaptive_page import adaptive_parts, print_adaptive
    from noria.bench.tables import make_console

    said = verdict(found)
    if str(paths[0]) != "-":
        print_adaptive(make_console(), found, setting.goals, said)
    if paths[1] is not None:
        parts = adaptive_parts(found, setting.trace, setting.calibration, setting.goals, said)
        write_html(paths[1], f"Adaptive batch size: {setting.calibration.setup}", parts)
    figures = {
        "trace": setting.digest,
        "calibration": msgspec.to_builtins(setting.calibration),
        "objectives_ms": {"ttft": 1e3 * setting.goals.ttft, "tpot": 1e3 * setting.goals.tpot},
        "verdict": said,
        "contestants": as_json(found),
    }
    write_figures(paths[0], figures)
