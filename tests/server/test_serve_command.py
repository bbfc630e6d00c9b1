"""`noria serve` as a process, with a tiny random model: start, answers, engine's death, graceful stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import wait_until

from helpers.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_checkpoint("llama", folder)
    return folder


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    lines: list[dict[str, Any]]

    @property
    def engine(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": "water"} | body, timeout=30)

    def said(self, text: str) -> bool:
        return any(text in line["message"] for line in self.lines)


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "noria.cli.main", "serve", str(model), "--port", "0", "--log-format", "json"]
    command += ["--num-blocks", "200", "--max-num-seqs", "4", "--threads", "1", *flags]
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    server = Server(process, "", [])
    assert process.stderr is not None

    def read(stream: Any = process.stderr) -> None:
        for line in stream:
            server.lines.append(json.loads(line) if line.startswith("{") else {"message": line})

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        wait_until(lambda: server.said("ready") or process.poll() is not None, 60)
        assert process.poll() is None, server.lines
        server.url = next(line for line in server.lines if line["message"] == "ready")["url"].removesuffix("/v1")
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        reader.join(10)


def test_a_life(tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "noria.yaml"
    config.write_text("max-queued-requests: 2\nserved-model-name: from-file\nmax-num-batched-tokens: 64\n")
    flags = ("--config", str(config), "--served-model-name", "wheel", "--api-key", "k1", "--api-key", "k2")
    with serving(tiny, tmp_path, *flags) as server:
        key = {"Authorization": "Bearer k2"}
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        (model,) = httpx.get(f"{server.url}/v1/models", headers=key).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("wheel", 512)
        ready = next(line for line in server.lines if line["message"] == "ready")
        assert ready["cache_tokens"] == 200 * 16
        port = server.url.rsplit(":", 1)[1]
        again = subprocess.run(
            [sys.executable, "-m", "noria.cli.main", "serve", str(tiny), "--port", port],
            capture_output=True,
            text=True,
        )
        assert again.returncode == 2
        assert again.stderr == f"noria: --port: port {port} on 127.0.0.1 is in use; choose another\n"
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
    assert not list(tmp_path.glob("noria-*"))


def test_answers_and_a_graceful_stop(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path) as server:
        greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
        whole = server.ask(**greedy).json()["choices"][0]
        many = server.ask(prompt=["water", "the wheel turns", "water"], **greedy).json()["choices"]
        assert (many[0]["text"], many[0]["logprobs"]) == (whole["text"], whole["logprobs"])
        assert many[2]["logprobs"] == whole["logprobs"]
        events = [
            json.loads(line.removeprefix("data: "))
            for line in server.ask(stream=True, **greedy).text.splitlines()
            if line.startswith("data: {")
        ]
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
        cached = server.ask(prompt="a prompt that is longer than a block of sixteen tokens", max_tokens=1)
        cached = server.ask(prompt="a prompt that is longer than a block of sixteen tokens", max_tokens=1)
        assert cached.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16

        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(server.ask(max_tokens=450, ignore_eos=True)))
        asking.start()
        metrics = f"{server.url}/metrics"
        wait_until(lambda: 'noria_num_requests_running{model_name="' + str(tiny) + '"} 1.0' in httpx.get(metrics).text)
        server.process.send_signal(signal.SIGTERM)
        asking.join(30)
        assert replies[0].status_code == 200
        assert replies[0].json()["usage"]["completion_tokens"] == 450
        assert server.process.wait(10) == 0
        assert server.said("stopping: 1 running request has")


def test_a_killed_engine(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path) as server:
        engine = server.engine
        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(server.ask(max_tokens=500, ignore_eos=True)))
        asking.start()
        time.sleep(0.05)
        os.kill(engine, signal.SIGKILL)
        asking.join(10)
        assert replies[0].status_code == 503
        assert "killed by SIGKILL" in replies[0].json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_a_killed_server_takes_its_engine_along(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path) as server:
        engine = server.engine
        server.process.kill()
        server.process.wait(10)

        def gone() -> bool:
            try:
                return Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except FileNotFoundError:
                return True

        wait_until(gone, 5)


def test_a_model_that_cannot_be_loaded(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "noria.cli.main", "serve", str(tiny), "--port", port, "--max-model-len", "100000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--max-model-len" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
