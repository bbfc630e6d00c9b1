"""Tells an engine what tokens stand for, once it has a request that needs it.

Not before: most engines never do, and it takes both sides time and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from noria.frontend.detokenizer import Pieces
from noria.guidance import vocabulary_of
from noria.messages import Submit, ToEngine, Vocabulary
from noria.observe.logging import get_logger

log = get_logger(__name__)


class VocabularyTeller:
    """Passes messages on, and sees to it that an engine that gets a grammar gets the vocabulary too.

    It is made in a thread, and kept for engines to come. A request that needs it goes ahead, and waits in the engine.

    Args:
        end_ids: the model's own end tokens.
        send: to the engine at hand.
    """

    def __init__(self, pieces: Pieces, end_ids: Sequence[int], send: Callable[[ToEngine], None]) -> None:
        self._pieces = pieces
        self._end_ids = end_ids
        self._send = send
        self._vocabulary: Vocabulary | None = None
        self._making: asyncio.Task[None] | None = None
        self._told = False

    def forget(self) -> None:
        """There is another engine, which knows nothing."""
        self._told = False

    def send(self, message: ToEngine) -> None:
        """To the engine at hand."""
        if isinstance(message, Submit) and message.params.grammar is not None and not self._told:
            self._told = True
            self._tell()
        self._send(message)

    def _tell(self) -> None:
        if self._vocabulary is not None:
            self._send(self._vocabulary)
        elif self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._make(), name="noria-vocabulary")

    async def _make(self) -> None:
        try:
            self._vocabulary = told = await asyncio.to_thread(self._pieces.vocabulary, self._end_ids)
        except Exception:
            log.exception("what this model's tokens stand for could not be found out")
            told = vocabulary_of((), (), ())  # requests that wait for it end in error
        self._making = None
        if self._told:  # otherwise there is another engine by now, and no grammar yet
            self._send(told)
