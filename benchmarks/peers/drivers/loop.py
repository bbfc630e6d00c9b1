"""The runner's end of a driver: requests come as files named on standard input, records go back as files.

Runs in the environment of an engine: standard library only. A record has the fields of `noria.bench.http.Record`;
times are seconds on `time.perf_counter`'s clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MARK = "@@ "


class Callers:
    """A closed loop: so many callers, each asks again as soon as it has its answer.

    Attributes:
        records: one per request, in order; those of requests not asked yet are None.
    """

    def __init__(self, requests: list[dict[str, Any]], concurrency: int | None) -> None:
        self.requests = requests
        self.records: list[dict[str, Any] | None] = [None] * len(requests)
        self._waiting = deque(range(len(requests)))
        self._live = 0
        self._concurrency = concurrency or len(requests)

    @property
    def finished(self) -> bool:
        return not self._waiting and self._live == 0

    def due(self) -> list[int]:
        """Requests that callers send now, by index; their clocks start."""
        sent = []
        now = time.perf_counter()
        while self._waiting and self._live < self._concurrency:
            index = self._waiting.popleft()
            prompt_tokens = len(self.requests[index]["prompt_ids"])
            self.records[index] = {"start": now, "prompt_tokens": prompt_tokens, "chunks": [], "output_tokens": 0}
            self._live += 1
            sent.append(index)
        return sent

    def token(self, index: int, count: int, now: float) -> None:
        """`count` new tokens of an answer at `now`."""
        record = self.records[index]
        assert record is not None
        record["chunks"].append(now)
        record["output_tokens"] += count

    def end(self, index: int, now: float, error: str | None = None) -> None:
        """The answer is complete, or ended for the reason `error`."""
        record = self.records[index]
        assert record is not None
        record["end"] = now
        record["error"] = error
        self._live -= 1


Windows = list[list[int]]


def serve(run: Callable[[Callers], None], score: Callable[[Windows], list[list[float]]]) -> None:
    """Does what the runner asks for, until it closes the input.

    Args:
        run: puts on a load.
        score: log-probabilities of the tokens of windows, of all but each one's first.
    """
    say("ready")
    for line in sys.stdin:
        asked, answered = json.loads(line)
        with open(asked, encoding="utf-8") as file:
            load = json.load(file)
        try:
            answer = score(load["windows"]) if "windows" in load else _records(run, load)
        except Exception as error:  # whatever a library raises is the outcome of this load
            say(f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
            continue
        with open(answered + ".part", "w", encoding="utf-8") as file:
            json.dump(answer, file)
        os.replace(answered + ".part", answered)
        say("done")


def _records(run: Callable[[Callers], None], load: dict[str, Any]) -> list[dict[str, Any] | None]:
    callers = Callers(load["requests"], load["concurrency"])
    run(callers)
    return callers.records


def say(word: str) -> None:
    """A line for the runner, on a line of its own whatever a library left there."""
    sys.stdout.write(f"\n{MARK}{word}\n")
    sys.stdout.flush()
