"""Logs on standard error, as text for people or one JSON object a line for machines.

Fields beside the message are given as `extra={"fields": {...}}` and appear in both forms.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import msgspec

Level = Literal["debug", "info", "warning", "error", "none"]
Form = Literal["text", "json"]
_NOTHING = logging.CRITICAL + 1
_LEVEL, _FORM = "NORIA_LOG_LEVEL", "NORIA_LOG_FORMAT"


def setup_logging(level: Level = "info", form: Form = "text") -> None:
    """Sends the logs of Noria and of its HTTP server to standard error; none: nowhere. May be called again."""
    lowest = _NOTHING if level == "none" else getattr(logging, level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name, least in (("noria", logging.NOTSET), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(max(lowest, least))


def logging_environment(level: Level, form: Form) -> dict[str, str]:
    """Variables by which a process started with them logs in the same way."""
    return {_LEVEL: level, _FORM: form}


def setup_logging_from(environment: Mapping[str, str]) -> None:
    """As the process that started this one: see `logging_environment`. Without those variables: text, from info on."""
    level, form = environment.get(_LEVEL, "info").lower(), environment.get(_FORM, "text")
    setup_logging(
        cast("Level", level if level in get_args(Level) else "info"),
        cast("Form", form if form in get_args(Form) else "text"),
    )


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)


class TextFormatter(logging.Formatter):
    """`12:30:05 info  message  key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():<7} {record.getMessage()}"
        fields = _fields(record)
        if fields:
            line += "  " + " ".join(f"{key}={_plain(value)}" for key, value in fields.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """`{"time": …, "level": …, "logger": …, "message": …, …fields}`; time in seconds since 1970."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_fields(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _plain(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
