"""Starts `noria serve` for a client's tests. Knows nothing of Noria but its command: it is installed elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent.parent
# The interpreter that has Noria. These tests run in another environment, as users' clients do.
NORIA_PYTHON = os.environ.get("NORIA_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
KEY = "a-key-of-the-tests"
MODEL = "smollm2"


@dataclass
class Served:
    """A running server. `url`: without /v1. `lines`: of its log, each a JSON object."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[dict[str, object]] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"}

    def gauge(self, name: str) -> float:
        """The present value of a metric without labels beside the model's name."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers).text
        return float(next(line for line in text.splitlines() if line.startswith(f"noria_{name}{{")).rpartition(" ")[2])


def wait_until(condition: object, seconds: float = 30.0) -> None:
    """Fails if `condition()` does not become true in time."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


@contextmanager
def serving(*flags: str, model: str = MODEL) -> Iterator[Served]:
    """`noria serve MODEL` on a free port, with the key KEY, until the end of the block."""
    command = [NORIA_PYTHON, "-m", "noria.cli.main", "serve", model, "--port", "0", "--log-format", "json"]
    process = subprocess.Popen([*command, "--api-key", KEY, *flags], stderr=subprocess.PIPE, text=True)
    server = Served(process)

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.lines.append(json.loads(line) if line.startswith("{") else {"message": line})

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        # The first start on a machine pulls the model.
        wait_until(lambda: process.poll() is not None or any("url" in line for line in server.lines), 240)
        assert process.poll() is None, server.lines
        server.url = str(next(line["url"] for line in server.lines if "url" in line)).removesuffix("/v1")
        yield server
    finally:
        process.kill()
        process.wait(10)
        reader.join(10)
