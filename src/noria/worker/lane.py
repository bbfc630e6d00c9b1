"""Work that runs beside the steps, on threads that no exit has to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """Runs jobs in the order in which they come, as many at a time as it has threads.

    The threads are daemons, and begin with the first job.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads = threads
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._begun = False

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Returns at once; the future has what the job returns or raises."""
        if not self._begun:
            self._begun = True
            for _ in range(self._threads):
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Ends the threads once they have done what they were given."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                result = job()
            except BaseException as error:  # a library's panic is no Exception
                future.set_exception(error)
            else:
                future.set_result(result)
            del entry, future, job  # nothing is kept alive while the thread waits
