"""Logs in both forms, and the histogram that takes many observations at once."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from noria.messages import EngineStats, PacerStats
from noria.observe.logging import JsonFormatter, TextFormatter, get_logger, setup_logging
from noria.observe.metrics import Metrics, Tally


def record(level: int = logging.INFO, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("noria.test", level, __file__, 1, "wheel %s", ("turns",), None)
    made.__dict__.update(more)
    return made


def test_text() -> None:
    line = TextFormatter().format(record(fields={"tokens": 3, "seconds": 1.23456}))
    assert line.endswith("info    wheel turns  tokens=3 seconds=1.235")


def test_json() -> None:
    entry = json.loads(JsonFormatter().format(record(fields={"tokens": 3}, level=logging.WARNING)))
    assert entry["message"] == "wheel turns"
    assert (entry["level"], entry["logger"], entry["tokens"]) == ("warning", "noria.test", 3)
    assert isinstance(entry["time"], float)


def test_json_keeps_exceptions_and_odd_values() -> None:
    try:
        raise ValueError("dry")
    except ValueError as error:
        made = record(fields={"odd": {1}, "error": error})
        made.exc_info = (ValueError, error, error.__traceback__)
        entry = json.loads(JsonFormatter().format(made))
    assert "ValueError: dry" in entry["exception"]
    assert entry["error"] == "dry"


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("noria", "uvicorn")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    try:
        setup_logging("warning", "json")
        get_logger("noria.x").info("not shown")
        get_logger("noria.x").warning("shown")
        lines = capsys.readouterr().err.splitlines()
        assert [json.loads(line)["message"] for line in lines] == ["shown"]
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


def test_a_tally_is_the_histogram_of_its_observations() -> None:
    """The page shows the same lines as for a histogram of the library, bucket bounds included."""
    bounds, registry = (0.01, 0.5, 1, 20), CollectorRegistry()
    tally, plain = Tally(bounds), Histogram("gap_seconds", "Gaps.", ("model_name",), registry=registry, buckets=bounds)
    for value, times in ((0.01, 3), (0.02, 1), (0.7, 5), (20.5, 2)):
        tally.observe(value, times)
        for _ in range(times):
            plain.labels("m").observe(value)

    class Page(Collector):
        def collect(self) -> Iterator[Metric]:
            yield tally.family("gap_seconds", "Gaps.", "model_name", "m")

    other = CollectorRegistry()
    other.register(Page())
    lines, expected = (generate_latest(one).decode().splitlines() for one in (other, registry))
    sums = [line for line in lines if "_sum" in line]
    assert [line for line in lines if "_sum" not in line] == [line for line in expected if "_sum" not in line]
    assert float(sums[0].split()[-1]) == pytest.approx(3 * 0.01 + 0.02 + 5 * 0.7 + 2 * 20.5)


def figures(metrics: Metrics) -> dict[str, float]:
    """Of the page, without the label that all have."""
    lines = [line for line in metrics.render().decode().splitlines() if line and not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name.replace('model_name="m"', "").replace("{,", "{").replace("{}", ""): float(n) for name, n in pairs}


def test_the_pacer_shows() -> None:
    metrics = Metrics("m", clock=lambda: 0.0)
    assert figures(metrics)['noria_pacer_predictor{predictor="off"}'] == 1.0
    assert "noria_device_utilization" not in figures(metrics)
    pacer = PacerStats(
        batch=24,
        budget=200,
        device=0.5,
        cpu=0.9,
        memory=0.25,
        arrival_rate=6.0,
        step_seconds=0.02,
        model_error=0.07,
        trusted=True,
        predictor="learned",
        memory_reached=True,
        decisions=9,
    )
    metrics.step(1, {}, EngineStats(running=3, pacer=pacer, pacer_decisions_total=9))
    found = figures(metrics)
    assert found["noria_pacer_batch_size"] == 24
    assert found["noria_pacer_token_budget"] == 200
    assert found["noria_device_utilization"] == 0.5
    assert found["noria_engine_cpu_utilization"] == 0.9
    assert found["noria_memory_utilization"] == 0.25
    assert found["noria_request_arrival_rate"] == 6.0
    assert found["noria_pacer_predicted_step_seconds"] == 0.02
    assert found["noria_pacer_model_error"] == 0.07
    assert found["noria_pacer_trusted"] == 1.0
    assert found['noria_pacer_threshold_reached{threshold="memory"}'] == 1.0
    assert found['noria_pacer_threshold_reached{threshold="device"}'] == 0.0
    assert [found[f'noria_pacer_predictor{{predictor="{who}"}}'] for who in ("learned", "rules", "most", "off")] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert found["noria_pacer_decisions_total"] == 9


def test_decisions_are_counted_over_engines() -> None:
    metrics = Metrics("m")
    metrics.step(0, {}, EngineStats(pacer_decisions_total=5))
    metrics.ended()
    metrics.step(0, {}, EngineStats(pacer_decisions_total=2))
    assert figures(metrics)["noria_pacer_decisions_total"] == 7


def test_an_idle_engine_is_idle_though_it_says_nothing() -> None:
    now = 0.0
    metrics = Metrics("m", clock=lambda: now)
    pacer = PacerStats(device=0.5, cpu=0.9, memory=0.25, arrival_rate=6.0)
    metrics.step(0, {}, EngineStats(running=1, pacer=pacer))
    now = 100.0
    assert figures(metrics)["noria_request_arrival_rate"] == 6.0  # a long step
    metrics.step(0, {}, EngineStats(pacer=pacer))
    now = 103.0
    found = figures(metrics)
    assert found["noria_request_arrival_rate"] == pytest.approx(6.0 * math.exp(-1.0))
    assert (found["noria_device_utilization"], found["noria_engine_cpu_utilization"]) == (0.0, 0.0)
    assert found["noria_memory_utilization"] == 0.25
