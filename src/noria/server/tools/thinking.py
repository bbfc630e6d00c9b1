"""Reasoning that a model writes before its answer, `<think>…</think>`, and how it is told from the answer."""

from __future__ import annotations

from dataclasses import dataclass

from noria.server.tools.reader import BLANK, overlap


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning. `always`: an answer begins with it even if nothing opens it."""

    open: str = "<think>"
    close: str = "</think>"
    always: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether the end of a prompt (as the template made it) has the answer begin within the reasoning."""
        return prompt.rstrip(BLANK).endswith(self.open)


THINK = Thinking()
_PARSERS = {
    "qwen3": THINK,
    "deepseek_r1": Thinking(always=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
}


def choose_thinking(wanted: str, template: str) -> Thinking | None:
    """What `--reasoning-parser` names; for `auto` what a chat template's text tells of; None: no reasoning."""
    if wanted != "auto":
        return _PARSERS.get(wanted)
    for thinking in (THINK, _PARSERS["mistral"]):
        if thinking.open in template or thinking.close in template:
            return thinking
    return None


class ThinkingSplitter:
    """Splits an answer that comes in pieces. White space around the marks belongs to neither part.

    Args:
        opened: the prompt opened the reasoning.

    Attributes:
        begun: there is, or was, reasoning. over: what comes is the answer.
    """

    __slots__ = ("_blank", "_fresh", "_held", "_marks", "_sure", "begun", "over")

    def __init__(self, marks: Thinking, opened: bool) -> None:
        self.begun = opened or marks.always
        self.over = False
        self._marks = marks
        self._held = ""  # may become a mark
        self._blank = ""  # white space that was read before it; any amount, so that it is looked at once
        self._sure = False  # whether there is reasoning
        self._fresh = True  # nothing but white space came of the part at hand

    def push(self, text: str) -> tuple[str, str]:
        """Takes more of it; returns what is certain of reasoning and of answer."""
        if self.over and not self._fresh:
            return "", text
        self._held += text
        if not self._sure:
            self._open()
        reasoning = self._reasoning() if self._sure and not self.over else ""
        return reasoning, self._answer() if self.over else ""

    def finish(self) -> tuple[str, str]:
        """The rest."""
        held, self._held = self._held, ""
        if self.begun and not self.over:
            return self._blank + held if held and not self._fresh else held, ""
        return "", held if self._sure else self._blank + held

    def _open(self) -> None:
        """Is there a mark that opens? If the reasoning is open already, one more is nothing new."""
        text = self._held.lstrip(BLANK)
        self._blank += self._held[: len(self._held) - len(text)]
        self._held = text
        if text.startswith(self._marks.open):
            self.begun = self._sure = True
            self._held = text[len(self._marks.open) :]
        elif not self._marks.open.startswith(text):
            self._sure, self.over = True, not self.begun
            self._fresh = self.begun
            self._held = text if self.begun else self._blank + text
        if self._sure:
            self._blank = ""

    def _reasoning(self) -> str:
        place = self._held.find(self._marks.close)
        end = place if place >= 0 else len(self._held) - overlap(self._held, self._marks.close)
        text, self._held = self._held[:end], self._held[end:]
        if self._fresh:
            text = text.lstrip(BLANK)
        kept = text.rstrip(BLANK)
        if kept:
            said, self._blank, self._fresh = self._blank + kept, text[len(kept) :], False
        else:
            said, self._blank = "", self._blank + text
        if place >= 0:
            self._held = self._held[len(self._marks.close) :]
            self.over = self._fresh = True
        return said

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if self._fresh:
            text = text.lstrip(BLANK)
            self._fresh = not text
        return text


class ThinkingCounter:
    """Counts the tokens up to the mark that ends the reasoning, however they come."""

    __slots__ = ("_close", "_tail", "count", "over")

    def __init__(self, marks: Thinking) -> None:
        self._close = marks.close.encode()
        self._tail = b""
        self.count = 0
        self.over = False

    def push(self, token: bytes) -> None:
        """Takes the bytes of the next token."""
        if not self.over:
            self.count += 1
            text = self._tail + token
            self.over = self._close in text
            self._tail = text[-len(self._close) + 1 :]
