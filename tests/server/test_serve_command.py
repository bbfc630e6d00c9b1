"""`noria serve` as a process, with a tiny random model: start, answers, engine's death, graceful stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
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
        """Process id; 0 while there is none."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": "water"} | body, timeout=120)

    def gauge(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"noria_{name}{{")).rpartition(" ")[2])

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

        def ask_long() -> None:
            replies.append(server.ask(n=4, max_tokens=450, ignore_eos=True))

        asking = [threading.Thread(target=ask_long) for _ in range(8)]
        for thread in asking:
            thread.start()
        wait_until(lambda: server.gauge("num_requests_waiting") >= 16, 30)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.said("running requests have"))
        refused = server.ask()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        for thread in asking:
            thread.join(60)
        # What was accepted before the signal is finished, what came after it is refused.
        accepted = [reply.json() for reply in replies if reply.status_code != 503]
        assert [answer["usage"]["completion_tokens"] for answer in accepted] == [4 * 450] * len(accepted)
        assert len(accepted) >= 5
        assert server.process.wait(10) == 0


def test_answers_go_on_over_the_death_of_the_engine(tiny: Path, tmp_path: Path) -> None:
    asked = (
        {"temperature": 0, "logprobs": 1},
        {"temperature": 1.2, "seed": 7, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0.8, "seed": 8, "n": 2, "top_p": 0.9, "min_tokens": 200},
    )
    bodies = [{"prompt": f"water {i}", "max_tokens": 400, "ignore_eos": True} | asked[i % 3] for i in range(12)]
    with serving(tiny, tmp_path) as server:
        undisturbed = [server.ask(**body).json()["choices"] for body in bodies]
        replies: dict[int, httpx.Response] = {}

        def ask(index: int) -> None:
            replies[index] = server.ask(**bodies[index])

        asking = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
        for thread in asking:
            thread.start()
        for _ in range(3):
            wait_until(lambda: server.gauge("num_requests_running") == 4, 60)
            engine = server.engine
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda engine=engine: server.engine not in (0, engine), 60)
            assert httpx.get(f"{server.url}/health").status_code == 200
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
        assert len(replies) < len(bodies)
        for thread in asking:
            thread.join(60)
        assert [replies[index].json()["choices"] for index in range(len(bodies))] == undisturbed
        assert server.gauge("engine_restarts_total") == 3
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
    assert not list(tmp_path.glob("noria-*"))


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
