"""Seconds from starting `noria serve` to the first token of the first answer, several times over.

python benchmarks/startup.py --model smollm2 --runs 5
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time

from serving import free_port

REQUEST = (
    b'{"model": "MODEL", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "stream": true}'
)


def first_token(model: str, flags: list[str]) -> tuple[float, float]:
    """Seconds until the port accepts, and until the first piece of text is there."""
    port = free_port()
    command = [sys.executable, "-m", "noria.cli.main", "serve", model, "--port", str(port), *flags]
    body = REQUEST.replace(b"MODEL", model.encode())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            connection = _answer(port, f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            if connection is not None:
                return connection[0] - start, connection[1] - start
            if server.poll() is not None:
                sys.exit("the server ended before it answered")
            time.sleep(0.005)
    finally:
        server.terminate()
        server.wait()


def _answer(port: int, request: bytes) -> tuple[float, float] | None:
    """When the connection stood and when text came; None while the server does not answer or is not ready (503)."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            accepted = time.perf_counter()
            connection.sendall(request)
            received = b""
            while b'"content":"' not in received.replace(b'"content":""', b""):
                piece = connection.recv(65536)
                if not piece or received.startswith(b"HTTP/1.1 503"):
                    return None
                received += piece
            return accepted, time.perf_counter()
    except OSError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    args, flags = parser.parse_known_args()
    runs = [first_token(args.model, flags) for _ in range(args.runs)]
    for name, values in zip(("accepting", "first token"), zip(*runs, strict=True), strict=True):
        listed = ", ".join(f"{value:.2f}" for value in values)
        print(f"{name}: median {statistics.median(values):.2f} s of {listed}")


if __name__ == "__main__":
    main()
