"""Starts and stops an OpenAI-compatible server for a benchmark."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], url: str, log: Path, timeout: float = 300.0) -> Iterator[float]:
    """Runs a server until the block ends; yields the seconds it took until /health answered.

    Args:
        log: file that takes the server's output; its end is shown when the server does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(server, url, start + timeout, log)
            yield time.perf_counter() - start
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, deadline: float, log: Path) -> None:
    with httpx.Client(trust_env=False, timeout=1.0) as client:
        while time.perf_counter() < deadline:
            if server.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            time.sleep(0.02)
    sys.exit(f"the server did not come up:\n{log.read_text(encoding='utf-8')[-2000:]}")


@contextlib.contextmanager
def noria_server(model: str, *flags: str, log: Path = Path("build/bench/noria.log")) -> Iterator[str]:
    """`noria serve` on a free port; yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "noria.cli.main", "serve", model, "--port", str(port), *flags]
    with running(command, url, log):
        yield url
