"""Logs in both forms."""

from __future__ import annotations

import json
import logging

import pytest

from noria.observe.logging import JsonFormatter, TextFormatter, get_logger, setup_logging


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
