"""Logs in both forms, and the histogram that takes many observations at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from noria.observe.logging import JsonFormatter, TextFormatter, get_logger, setup_logging
from noria.observe.metrics import Tally


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
