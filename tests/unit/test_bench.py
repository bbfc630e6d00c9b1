"""The load generator: workloads are exact and repeatable, loops keep their rule, streams are read right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from noria.bench.http import Record, Target, ask
from noria.bench.load import run_load, run_loop
from noria.bench.report import print_summary, summarise
from noria.bench.workloads import BenchRequest, WorkloadSpec, make_requests, presets
from noria.errors import ConfigError


class WordEncoder:
    """One token per word; enough to check lengths."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.index: dict[str, int] = {}

    def encode(self, text: str, add_bos: bool) -> list[int]:
        ids = []
        for word in text.split():
            if word not in self.index:
                self.index[word] = len(self.words)
                self.words.append(word)
            ids.append(self.index[word])
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return " ".join(self.words[i] for i in ids)


def test_presets_are_the_anchors() -> None:
    found = presets()
    assert set(found) == {"W1", "W2", "W3", "W4", "W5"}
    assert (found["W1"].requests, found["W1"].concurrency, found["W1"].input, found["W1"].output) == (
        200,
        100,
        128,
        128,
    )
    assert found["W5"].input == (16, 512)


@pytest.mark.parametrize("source", ["text", "random"])
def test_prompts_have_exact_lengths_and_differ(source: str) -> None:
    spec = WorkloadSpec(requests=50, input=(5, 60), output=(2, 9))
    made = make_requests(spec, WordEncoder(), seed=3, source=source)
    again = make_requests(spec, WordEncoder(), seed=3, source=source)
    assert made == again
    assert len({request.prompt for request in made}) == 50
    assert all(5 <= len(request.prompt_ids) <= 60 and 2 <= request.output_tokens <= 9 for request in made)
    assert sorted(len(r.prompt_ids) for r in made)[25] < 30  # heavy at the short end


def test_shared_prefix_is_shared() -> None:
    made = make_requests(WorkloadSpec(requests=8, shared=40, input=10), WordEncoder())
    assert len({request.prompt_ids[:40] for request in made}) == 1
    assert len({request.prompt_ids[40:] for request in made}) == 8


def test_open_loop_arrivals_follow_the_rate() -> None:
    made = make_requests(WorkloadSpec(requests=2000, rate=100.0, input=3), WordEncoder())
    assert made[-1].at == pytest.approx(20.0, rel=0.15)


@pytest.mark.parametrize("bad", [{"requests": 0}, {"rate": 0.0}, {"input": (5, 2)}, {"burstiness": 0.0}])
def test_bad_workloads_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        WorkloadSpec(**bad)


def test_too_little_text_for_different_prompts_is_said(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("three short words")
    with pytest.raises(ConfigError, match="too few pieces of 2 tokens for 50 different prompts"):
        make_requests(WorkloadSpec(requests=50, input=2), WordEncoder(), text_path=text)
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="as UTF-8 text"):
        make_requests(WorkloadSpec(requests=1, input=2), WordEncoder(), text_path=text)


def test_closed_loop_keeps_its_concurrency() -> None:
    live = peak = 0

    async def fake(request: BenchRequest) -> Record:
        nonlocal live, peak
        live += 1
        peak = max(peak, live)
        await asyncio.sleep(0.001)
        live -= 1
        return Record(start=0.0, end=1.0, output_tokens=request.output_tokens)

    requests = [BenchRequest("p", (1,), index + 1) for index in range(40)]
    records = asyncio.run(run_load(fake, requests, concurrency=7))
    assert [record.output_tokens for record in records] == list(range(1, 41))
    assert peak == 7


def _serve(body: bytes, status: str = "200 OK", cut: int | None = None) -> Record:
    """Answers one request with `body`, chunked at awkward places, and returns what the client recorded."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(body), 7):
            piece = body[start : start + 7]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        if cut is None:
            writer.write(b"0\r\n\r\n")
        writer.close()

    async def main() -> Record:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        record = await ask(Target(f"http://127.0.0.1:{port}/v1", "m"), BenchRequest("hello", (1,), 3))
        server.close()
        return record

    return asyncio.run(main())


def _events(*chunks: object) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def test_stream_is_read() -> None:
    text = [{"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}, {"choices": [{"delta": {"content": "b"}}]}]
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
    record = _serve(_events(*text, usage))
    assert record.error is None
    assert (len(record.chunks), record.prompt_tokens, record.output_tokens) == (2, 5, 3)
    assert record.tpot == pytest.approx((record.chunks[1] - record.chunks[0]) / 2)


@pytest.mark.parametrize("tail", [(5,), (1, 4), (2, 3), (3, 2), (4, 1), (1, 1, 1, 1, 1)])
def test_the_end_is_noticed_however_it_is_cut(tail: tuple[int, ...]) -> None:
    """What streams in is only read at the end, so the end must be seen although the server keeps the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = _events({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]})
        for event in body.split(b"\n\n")[:-1]:
            writer.write(f"{len(event) + 2:x}\r\n".encode() + event + b"\n\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)
        end = b"0\r\n\r\n"
        for length in tail:
            writer.write(end[:length])
            end = end[length:]
            await writer.drain()
            await asyncio.sleep(0.002)
        await asyncio.sleep(5)

    async def main() -> Record:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}", "m", timeout=2)
        return await ask(target, BenchRequest("hello", (1,), 2))

    record = run_loop(main())
    assert record.error is None
    assert len(record.chunks) == 2
    assert record.chunks[1] - record.chunks[0] > 0.01  # when they came, not when they were read
    assert record.end - record.chunks[1] > 0.01


def test_errors_are_recorded_not_raised() -> None:
    assert "HTTP 429" in (_serve(b'{"error": {"message": "full"}}', "429 Too Many Requests").error or "")
    assert "closed early" in (_serve(_events({"choices": [{"text": "a"}]}), cut=1).error or "")
    refused = asyncio.run(ask(Target("http://127.0.0.1:9", "m"), BenchRequest("hello", (1,), 3)))
    assert "cannot connect" in (refused.error or "")


def test_a_table_of_nothing_and_the_errors_as_they_came(capsys: pytest.CaptureFixture[str]) -> None:
    figures = summarise([Record(start=0.0, end=1.0, error="no [/] place [bold]")])
    assert figures["goodput_requests_per_s"] is None
    print_summary("at http://[::1]:80 [/x]", figures)
    out = capsys.readouterr().out
    assert "1 × no [/] place [bold]" in out
    assert "goodput" not in out
    assert "TTFT" not in out
    print_summary("[/x]", summarise([Record(start=0.0, end=2.0, chunks=[1.0], output_tokens=1)], slo_ttft=3.0))
    out = capsys.readouterr().out
    assert "goodput 0.50 requests/s" in out
    assert "[/x]" in out


def test_summary_counts_goodput_and_errors() -> None:
    good = Record(start=0.0, end=2.0, chunks=[0.5, 1.0, 1.5], prompt_tokens=4, output_tokens=3)
    late = Record(start=0.0, end=4.0, chunks=[3.0, 3.5], prompt_tokens=4, output_tokens=2)
    failed = Record(start=0.0, end=1.0, error="boom")
    figures = summarise([good, late, failed], slo_ttft=1.0)
    assert figures["completed"] == 2
    assert figures["errors"] == {"boom": 1}
    assert figures["output_tokens_per_s"] == pytest.approx(5 / 4)
    assert figures["goodput_requests_per_s"] == pytest.approx(1 / 4)
    assert figures["ttft_ms"]["p50"] == pytest.approx(1750)
