"""What the replies to one request have in common, whole or in chunks, in chat and in completions."""

from __future__ import annotations

import time

from msgspec import UNSET, UnsetType

from noria.frontend.stream import RequestStream
from noria.server.errors import describe
from noria.server.http import event
from noria.server.protocol import GenerationRequest
from noria.server.replies import Usage
from noria.server.state import log, log_answer, usage


class Replying:
    """Id, time and usage of the replies to one request.

    Args:
        kind: what the log calls them.
        arrived: when the request came, `time.monotonic()`.

    Attributes:
        tokens: of all choices, so far.
        quiet: `usage` in a chunk that tells none: OpenAI has null there where a chunk of usage is to follow.
    """

    def __init__(self, kind: str, wanted: GenerationRequest, stream: RequestStream, arrived: float) -> None:
        self.id = stream.course.id
        self.created = int(time.time())
        self.tokens = 0
        self.quiet: UnsetType | None = None if wanted.include_usage else UNSET
        self._kind = kind
        self._continuous = wanted.continuous_usage
        self._stream = stream
        self._arrived = arrived

    def usage(self, reasoning_tokens: int | None = None) -> Usage:
        """So far."""
        return usage(self._stream, self.tokens, reasoning_tokens)

    def spent(self, reasoning_tokens: int | None = None) -> Usage | UnsetType | None:
        """Usage in a chunk that is not the last."""
        return self.usage(reasoning_tokens) if self._continuous else self.quiet

    def done(self, streamed: bool) -> None:
        """All was said: one line in the log."""
        kind = f"{self._kind} stream" if streamed else self._kind
        log_answer(kind, self.id, self._stream, self.tokens, time.monotonic() - self._arrived)

    def failure(self, error: Exception) -> bytes:
        """The event that ends a stream which cannot go on."""
        log.warning("%s %s failed: %s", self._kind, self.id, error)
        return event(describe(error)[1])
