"""One choice's answer, taken apart while it grows: reasoning, content, calls."""

from __future__ import annotations

import secrets
import string
import uuid

from noria.server.tools.formats import CallFormat
from noria.server.tools.reader import Part, Reading
from noria.server.tools.request import ToolUse
from noria.server.tools.thinking import Thinking, ThinkingCounter, ThinkingSplitter

_LETTERS = string.ascii_letters + string.digits


def new_call_id(form: CallFormat) -> str:
    """An id that no other call has."""
    if form.short_ids:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"


class AnswerReader:
    """Reads an answer. The parts are the same, joined, however its text comes.

    Args:
        use: what the model may call; None: nothing, and what looks like a call is content.
        form: how it writes calls.
        thinking: how it marks reasoning; None: there is none.
        opened: the prompt opened the reasoning.
    """

    __slots__ = ("_counter", "_reading", "_splitter")

    def __init__(self, use: ToolUse | None, form: CallFormat, thinking: Thinking | None, opened: bool) -> None:
        self._splitter = None if thinking is None else ThinkingSplitter(thinking, opened)
        self._counter = None if thinking is None else ThinkingCounter(thinking)
        self._reading = None if use is None else _reading(use, form)

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._reading is not None and self._reading.calls > 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning and of its marks, so far."""
        if self._splitter is None or self._counter is None or not self._splitter.begun:
            return 0
        return self._counter.count

    @property
    def counter(self) -> ThinkingCounter | None:
        """To be given each token's bytes; None: nothing is counted."""
        return None if self._counter is None or self._counter.over else self._counter

    def push(self, text: str) -> list[Part]:
        """Takes more of the answer's text."""
        if self._splitter is None:
            return self._read(text)
        reasoning, answer = self._splitter.push(text)
        parts = [Part("reasoning", reasoning)] if reasoning else []
        return parts + self._read(answer) if answer else parts

    def finish(self) -> list[Part]:
        """The rest: nothing more will come."""
        reasoning, answer = ("", "") if self._splitter is None else self._splitter.finish()
        parts = [Part("reasoning", reasoning)] if reasoning else []
        parts += self._read(answer)
        return parts if self._reading is None else parts + self._reading.finish()

    def _read(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Part("content", text)] if self._reading is None else self._reading.push(text)


def _reading(use: ToolUse, form: CallFormat) -> Reading:
    names = use.names
    return Reading(lambda scanner: form.read(scanner, names), use.limit)
