"""Asks a server every 50 ms whether it is alive and ready, from a process of its own that few others can hold up.

python benchmarks/hostile_probe.py PORT: writes, once its standard input ends, JSON: path → [[when, seconds, status] …],
and under "late" how late this process itself was woken, which is the machine's doing and not the server's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import time

EVERY = 0.05  # seconds
FRESH = 4  # every so many probes come over a new connection
PRIORITY = -15


def probe(port: int, path: str, seen: list[tuple[float, float, int]], late: list[float], end: threading.Event) -> None:
    """Asks until `end` is set. A status of 0: no answer."""
    connection: http.client.HTTPConnection | None = None
    count = 0
    due = time.monotonic()
    while not end.is_set():
        due = max(due + EVERY, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        start = time.monotonic()
        late.append(start - due)
        count += 1
        if connection is None or count % FRESH == 0:
            if connection is not None:
                connection.close()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            start = time.monotonic()
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            reply.read()
            status = reply.status
        except (OSError, http.client.HTTPException):
            connection, status = None, 0
        seen.append((start, time.monotonic() - start, status))


def main() -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    port, end = int(sys.argv[1]), threading.Event()
    found: dict[str, list[tuple[float, float, int]]] = {"/health": [], "/ready": []}
    late: list[float] = []
    threads = [threading.Thread(target=probe, args=(port, path, seen, late, end)) for path, seen in found.items()]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    end.set()
    for thread in threads:
        thread.join()
    json.dump({**found, "late": late}, sys.stdout)


if __name__ == "__main__":
    main()
