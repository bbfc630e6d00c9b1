"""What must not break under load, against a running `noria serve`: clients that vanish, and a queue that is full.

python benchmarks/robustness.py --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter

import httpx
from serving import noria_server


def gauges(url: str) -> dict[str, float]:
    """The metrics without labels' values: name → sum over labels."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def vanish(url: str, model: str, clients: int) -> None:
    """Streams to `clients` callers, cuts them all off after a few tokens, and watches what is left behind."""

    async def one(index: int, reached: asyncio.Event) -> None:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {
                "model": model,
                "prompt": f"Client {index} tells a very long story:",
                "max_tokens": 1500,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        try:
            for _ in range(8):
                await reader.readuntil(b"\n\n")
            reached.set()
            await asyncio.sleep(3600)
        finally:
            writer.transport.abort()  # a cancelled task alone leaves its connection open

    events = [asyncio.Event() for _ in range(clients)]
    tasks = [asyncio.create_task(one(index, event)) for index, event in enumerate(events)]
    await asyncio.gather(*(event.wait() for event in events))
    before = gauges(url)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    start = time.perf_counter()
    while time.perf_counter() - start < 10:
        after = gauges(url)
        if after["noria_num_requests_running"] == 0 and after["noria_kv_cache_held_blocks"] == 0:
            break
        await asyncio.sleep(0.02)
    print(
        f"{clients} clients cut off: running {before['noria_num_requests_running']:.0f} → "
        f"{after['noria_num_requests_running']:.0f}, held blocks {before['noria_kv_cache_held_blocks']:.0f} → "
        f"{after['noria_kv_cache_held_blocks']:.0f} within {time.perf_counter() - start:.2f} s"
    )


async def overflow(url: str, model: str, requests: int) -> None:
    """Sends many requests at once and reports the answers and how soon the refusals came."""
    # Plain connections: the connection pools of HTTP clients need longer for a thousand than the server does.
    body = json.dumps({"model": model, "prompt": "Count: one two three", "max_tokens": 16}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = url.removeprefix("http://").split(":")

    async def one() -> tuple[int, float, bool]:
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1]), time.perf_counter() - start, b"\r\nretry-after: " in answer.lower()

    answers = await asyncio.gather(*(one() for _ in range(requests)))
    statuses = Counter(status for status, _, _ in answers)
    refused = sorted(seconds for status, seconds, _ in answers if status == 429)
    with_header = sum(1 for status, _, retry in answers if status == 429 and retry)
    print(f"{requests} requests at once: {dict(statuses)}; {with_header} refusals carry Retry-After")
    if refused:
        print(f"refused within {refused[len(refused) // 2]:.2f} s (median), {refused[-1]:.2f} s (last)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    with noria_server(args.model) as url:
        asyncio.run(vanish(url, args.model, 50))
    with noria_server(args.model, "--max-queued-requests", "50", "--max-num-seqs", "50") as url:
        asyncio.run(overflow(url, args.model, 1000))


if __name__ == "__main__":
    main()
