"""Starts and stops an OpenAI-compatible server for a benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

STOP_SECONDS = 30.0  # a server gets this long to stop by itself


class StartError(SystemExit):
    """A server did not come up. Ends a script with its message unless it is caught."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers. `seconds`: how long that took; `pid`: of its first process."""

    seconds: float
    pid: int


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str], url: str, log: Path, timeout: float = 300.0, env: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """Runs a server until the block ends; it has answered /health before the block begins.

    Args:
        log: file that takes the server's output; its end is shown when the server does not come up.
        env: variables beside this process's own.

    Raises:
        StartError: it ended, or did not answer within `timeout` seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            _wait(server, url, start + timeout, log)
            yield Started(time.perf_counter() - start, server.pid)
        finally:
            stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session of its own, and everything that it started."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # nobody of its group is left
        os.killpg(server.pid, signal.SIGKILL)
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
    raise StartError(f"the server did not come up:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def noria_command(model: str, port: int, *flags: str) -> list[str]:
    """`noria serve` of this environment."""
    return [sys.executable, "-m", "noria.cli.main", "serve", model, "--port", str(port), *flags]


@contextlib.contextmanager
def noria_server(model: str, *flags: str, log: Path = Path("build/bench/noria.log")) -> Iterator[str]:
    """`noria serve` on a free port; yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(noria_command(model, port, *flags), url, log):
        yield url
