"""Prometheus metrics, under the field's names so that dashboards port (`vllm:x` is `noria_x` here).

Figures of the engine are read from its latest statistics when they are scraped; those of requests are counted by the
client as outputs pass.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from noria.messages import ARRIVALS_MEMORY, EngineInfo, EngineStats, FinishReason, PacerStats, Shed

disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of the page, and nobody graphs when a counter was made

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_COUNT = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished choice, for the metrics. Times in seconds; `first_token` and `last_token` since its start.
    `shed`: it was refused after it had been accepted."""

    reason: FinishReason
    prompt_tokens: int
    generation_tokens: int
    max_tokens: int
    queued: float
    first_token: float | None
    last_token: float | None
    total: float
    shed: bool = False


class Tally:
    """A histogram that takes many equal observations at the price of one. Used on one thread, read on any.

    Args:
        bounds: upper bounds of its buckets, ascending; one without a bound follows them.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        """`value` was seen `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, text: str, label: str, value: str) -> HistogramMetricFamily:
        """As it stands now, with one label."""
        family = HistogramMetricFamily(name, text, labels=(label,))
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        family.add_metric((value,), list(zip(names, map(float, accumulate(self._counts)), strict=True)), self._sum)
        return family


class Metrics:
    """All metrics of one server. `model` becomes the label `model_name`."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.stats = EngineStats()
        self._clock = clock
        self._heard = clock()  # when `stats` came
        self.info: EngineInfo | None = None
        self.restarts = 0
        self.before: dict[str, float] = {}  # what the engines before this one have counted, by field of EngineStats
        self.model = model
        self._histograms()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have begun to answer.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            "noria_request_success", "Choices that ended.", ("model_name", "finished_reason"), registry=self.registry
        )
        self._success = {
            reason: success.labels(model, reason) for reason in ("stop", "length", "abort", "error")
        }  # all present from the start: a rate of a series that appears late loses its first step
        self._accepted = self._counter("request_accepted", "Choices accepted: each ends with one finished_reason.")
        refused = Counter(
            "noria_request_refused",
            "Requests refused, by HTTP status.",
            ("model_name", "status"),
            registry=self.registry,
        )
        self._refused = refused
        shed = Counter(
            "noria_request_shed",
            "Requests refused because they would miss an objective: as they came, or while they waited.",
            ("model_name", "where"),
            registry=self.registry,
        )
        self._shed = {where: shed.labels(model, where) for where in get_args(Shed)}
        self.unknown_fields = self._counter("request_unknown_fields", "Fields that the server does not know.")
        self.registry.register(_EngineCollector(self))

    def _histograms(self) -> None:
        make = self._histogram
        self._ttft = make("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self.gaps = Tally(_TOKEN)
        self._tpot = make("time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN)
        self._request_tpot = make("request_time_per_output_token_seconds", "The same, under its other name.", _TOKEN)
        self._e2e = make("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST)
        self._queue = make("request_queue_time_seconds", "Time that a choice waited to be admitted.", _REQUEST)
        self._prefill = make("request_prefill_time_seconds", "From admission to the first token.", _REQUEST)
        self._decode = make("request_decode_time_seconds", "From the first token to the last.", _REQUEST)
        self._inference = make("request_inference_time_seconds", "From admission to the last token.", _REQUEST)
        self._prompt_sizes = make("request_prompt_tokens", "Prompt tokens per choice.", _COUNT)
        self._output_sizes = make("request_generation_tokens", "Generated tokens per choice.", _COUNT)
        self._max_tokens = make("request_params_max_tokens", "max_tokens per choice.", _COUNT)
        self._n = make("request_params_n", "n per request.", _CHOICES)
        self._iteration = make("iteration_tokens", "Tokens generated per engine step.", _ITERATION)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"noria_{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self.model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"noria_{name}", text, ("model_name",), registry=self.registry).labels(self.model)

    def ended(self) -> None:
        """The engine is gone, and with it what it ran and held; its counts stay."""
        self.before = {name: self.total(name) for name in EngineStats.__struct_fields__ if name.endswith("_total")}
        self.stats = EngineStats()

    def began(self, info: EngineInfo, restarts: int) -> None:
        """There is an engine."""
        self.info, self.restarts = info, restarts
        self.stats = EngineStats(total_blocks=info.num_blocks, free_blocks=info.num_blocks)

    def total(self, name: str) -> float:
        """A count over all engines so far, by field of EngineStats."""
        return self.before.get(name, 0) + float(getattr(self.stats, name))

    @property
    def pacer(self) -> PacerStats:
        """What the pacer measured last. An idle engine is not woken to say that nothing happens, so that is added
        here."""
        stats, age = self.stats, self._clock() - self._heard
        if stats.running or stats.waiting or age < 1.0:
            return stats.pacer
        return replace(
            stats.pacer,
            device=None if stats.pacer.device is None else 0.0,
            cpu=0.0,
            arrival_rate=stats.pacer.arrival_rate * math.exp(-age / ARRIVALS_MEMORY),
        )

    def submitted(self, n: int) -> None:
        """A user's request was accepted."""
        self._n.observe(n)

    def accepted(self) -> None:
        """A choice was: `finished` follows, once."""
        self._accepted.inc()

    def refused(self, status: int) -> None:
        """A user's request was refused."""
        self._refused.labels(self.model, str(status)).inc()

    def shed(self, where: Shed) -> None:
        """A user's request would have missed an objective."""
        self._shed[where].inc()

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """A choice's first token came. `prompt_tokens` is 0 for the further choices of a prompt."""
        self._ttft.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def step(self, tokens: int, gaps: Mapping[float, int], stats: EngineStats) -> None:
        """A step's outputs came.

        Args:
            tokens: how many of them became part of an answer (those behind a stop string do not).
            gaps: seconds since the outputs of a choice before these → of how many choices.
        """
        self.stats, self._heard = stats, self._clock()
        for gap, times in gaps.items():
            self.gaps.observe(gap, times)
        if tokens:
            self._generation_tokens.inc(tokens)
            self._iteration.observe(tokens)

    def finished(self, record: RequestRecord) -> None:
        """A choice ended."""
        self._success[record.reason].inc()
        if record.shed:  # how quickly it was refused says nothing of answers
            return
        self._e2e.observe(record.total)
        self._prompt_sizes.observe(record.prompt_tokens)
        self._output_sizes.observe(record.generation_tokens)
        self._max_tokens.observe(record.max_tokens)
        if record.first_token is None or record.last_token is None:
            return
        self._queue.observe(record.queued)
        self._prefill.observe(max(0.0, record.first_token - record.queued))
        self._inference.observe(max(0.0, record.last_token - record.queued))
        self._decode.observe(record.last_token - record.first_token)
        if record.generation_tokens > 1:
            mean = (record.last_token - record.first_token) / (record.generation_tokens - 1)
            self._tpot.observe(mean)
            self._request_tpot.observe(mean)

    def render(self) -> bytes:
        """The page that Prometheus scrapes."""
        return generate_latest(self.registry)


class Uncounted(Metrics):
    """Metrics of a server that is to count nothing: only what the engine said last is kept, which others need."""

    def submitted(self, n: int) -> None:
        pass

    def accepted(self) -> None:
        pass

    def refused(self, status: int) -> None:
        pass

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        pass

    def step(self, tokens: int, gaps: Mapping[float, int], stats: EngineStats) -> None:
        self.stats = stats

    def finished(self, record: RequestRecord) -> None:
        pass


def make_metrics(model: str, counted: bool) -> Metrics:
    """The metrics of a server that counts, or of one that does not."""
    return Metrics(model) if counted else Uncounted(model)


class _EngineCollector(Collector):
    """Reads the engine's latest statistics at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        labels = [self._metrics.model]
        gauges = (
            ("num_requests_running", "Choices in the running batch.", stats.running),
            ("num_requests_waiting", "Choices that wait to be admitted.", stats.waiting),
            ("kv_cache_usage_perc", "Share of KV cache blocks held by requests, 0 to 1.", _usage(stats)),
            ("kv_cache_free_blocks", "Blocks that hold nothing.", stats.free_blocks),
            ("kv_cache_cached_blocks", "Blocks that only the prefix cache keeps.", stats.cached_blocks),
            ("kv_cache_held_blocks", "Blocks that requests hold.", stats.held_blocks),
        )
        total = self._metrics.total
        counters = (
            ("num_preemptions", "Preemptions.", total("preemptions_total")),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", total("prefix_queries_total")),
            ("prefix_cache_hits", "Of those, tokens found.", total("prefix_hits_total")),
            ("engine_restarts", "Engines started because one died or made no progress.", self._metrics.restarts),
            ("engine_steps", "Steps of the engine.", total("steps_total")),
            ("engine_step_seconds", "Time within steps.", total("step_seconds_total")),
            ("engine_plan_seconds", "Of that, time spent planning.", total("plan_seconds_total")),
            ("pacer_decisions", "Decisions of the pacer.", total("pacer_decisions_total")),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"noria_{name}", text, labels=["model_name"])
            gauge.add_metric(labels, float(value))
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"noria_{name}", text, labels=["model_name"])
            counter.add_metric(labels, float(value))
            yield counter
        text = "Gap between consecutive outputs of a choice."
        yield self._metrics.gaps.family("noria_inter_token_latency_seconds", text, "model_name", self._metrics.model)
        yield from self._pacer(self._metrics.pacer)
        yield from self._config()

    def _pacer(self, pacer: PacerStats) -> Iterator[Metric]:
        """What is not known yet is left out."""
        gauges: tuple[tuple[str, str, float | None], ...] = (
            ("pacer_batch_size", "Most choices that may run at once now.", pacer.batch),
            ("pacer_token_budget", "Most tokens of a step now.", pacer.budget),
            ("pacer_predicted_step_seconds", "Predicted duration of a step of the sizes aimed at.", pacer.step_seconds),
            ("pacer_model_error", "Median relative error of predicted step times of late.", pacer.model_error),
            ("pacer_trusted", "Whether the learned predictor is trusted.", pacer.trusted),
            ("request_arrival_rate", "Choices that arrive per second, of late.", pacer.arrival_rate),
            ("device_utilization", "Achieved share of the device's measured limit, 0 to 1.", pacer.device),
            ("engine_cpu_utilization", "Share of the processors it may use that the engine uses, 0 to 1.", pacer.cpu),
            ("memory_utilization", "Share of the memory that the engine may use that is taken, 0 to 1.", pacer.memory),
        )
        for name, text, value in gauges:
            if value is not None:
                gauge = GaugeMetricFamily(f"noria_{name}", text, labels=["model_name"])
                gauge.add_metric([self._metrics.model], float(value))
                yield gauge
        reached = {"device": pacer.device_reached, "memory": pacer.memory_reached}
        text = "Whether the load is beyond a threshold, so that the batch does not grow."
        yield self._states("pacer_threshold_reached", text, "threshold", reached)
        who = {name: name == pacer.predictor for name in ("learned", "rules", "most", "off")}
        yield self._states("pacer_predictor", "Whose word sets the sizes: 1 for one of these.", "predictor", who)

    def _states(self, name: str, text: str, label: str, states: Mapping[str, bool]) -> Metric:
        gauge = GaugeMetricFamily(f"noria_{name}", text, labels=["model_name", label])
        for state, on in states.items():
            gauge.add_metric([self._metrics.model, state], float(on))
        return gauge

    def _config(self) -> Iterator[Metric]:
        info = self._metrics.info
        if info is None:
            return
        facts = {
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
            "cache_dtype": info.cache_dtype,
            "weights": info.weights,
            "backend": info.backend,
            "isa": info.isa,
            "threads": info.threads,
            "max_model_len": info.max_model_len,
        }
        gauge = GaugeMetricFamily("noria_config_info", "What the engine runs with.", labels=["model_name", *facts])
        gauge.add_metric([self._metrics.model, *(str(fact) for fact in facts.values())], 1.0)
        yield gauge


def _usage(stats: EngineStats) -> float:
    return stats.held_blocks / stats.total_blocks if stats.total_blocks else 0.0
