"""Work that runs beside the steps, on threads that no exit has to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSE_SECONDS = 1.0


class Lane:
    """Runs jobs in the order in which they come, as many at a time as it has threads.

    The threads are daemons, and begin with the first job.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._running: list[threading.Thread] = []

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Returns at once; the future has what the job returns or raises."""
        while len(self._running) < self._threads:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._running.append(thread)
            thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Lets the threads end, and gives them a moment for what they are at: a process that exits must not find them
        within a library."""
        for _ in self._running:
            self._jobs.put(None)
        for thread in self._running:
            thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:  # a library's panic is no Exception
                future.set_exception(error)
            del entry, future, job  # nothing is kept alive while the thread waits
