"""Requests whose grammars are being compiled: they have been accepted, and are not with the scheduler yet.

Their place in line is that of their arrival, whenever their grammar is ready. Compiling is the executor's business.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from noria.engine.request import Request
from noria.errors import NoriaError

_POLL_SECONDS = 0.002  # between two looks at whether a grammar is ready, while nothing runs


class Compiling:
    """Args: `compile` begins to compile a grammar; see `Executor.compile_grammar`."""

    def __init__(self, compile: Callable[[str], Future[Any]]) -> None:
        self._compile = compile
        self._waiting: dict[int, tuple[Request, Future[Any]]] = {}  # by id, in the order in which they came

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    @property
    def pause(self) -> float:
        """Seconds until it is worth a look; 0 if one is ready."""
        return 0.0 if any(future.done() for _, future in self._waiting.values()) else _POLL_SECONDS

    def add(self, request: Request) -> None:
        """A request with a grammar."""
        assert request.params.grammar is not None
        self._waiting[request.id] = request, self._compile(request.params.grammar)

    def remove(self, request_id: int) -> Request | None:
        """Forgets a request, if it is here, and returns it."""
        found = self._waiting.pop(request_id, None)
        return None if found is None else found[0]

    def take(self) -> list[tuple[Request, str | None]]:
        """Requests that are ready, the first to come first, and why some of them cannot run."""
        ready = [(request, future) for request, future in self._waiting.values() if future.done()]
        for request, _ in ready:
            del self._waiting[request.id]
        return [(request, _result(request, future)) for request, future in ready]


def _result(request: Request, future: Future[Any]) -> str | None:
    error = future.exception()
    if error is not None:
        return str(error) if isinstance(error, NoriaError) else f"the grammar could not be compiled: {error}"
    request.grammar = future.result()
    return None
