"""What the served model writes beside plain text, and what it can be shown: found out once, when it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noria.frontend.inputs import TokenizerLike
from noria.frontend.template import ChatTemplate
from noria.server.tools.answer import AnswerReader
from noria.server.tools.forcing import Style
from noria.server.tools.formats import FORMATS, choose_format
from noria.server.tools.prompt import told
from noria.server.tools.request import ToolUse
from noria.server.tools.thinking import choose_thinking

_LAST = 16  # tokens of a prompt in which the mark that opens the reasoning is looked for


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model calls functions and reasons.

    Attributes:
        style: how it writes calls and marks reasoning. Marks that are control tokens have to be in the text that is
            read.
        takes_tools, takes_system: what its chat template shows to it.
    """

    style: Style = field(default_factory=lambda: Style(FORMATS["json"]))
    takes_tools: bool = False
    takes_system: bool = True

    @classmethod
    def of(cls, template: ChatTemplate | None, tokenizer: TokenizerLike, calls: str, reasoning: str) -> Dialect:
        """Of a model. `calls`, `reasoning`: names of a format each, or `auto`."""
        source = "" if template is None else template.source
        takes_tools = template is not None and template.takes_tools
        form = choose_format(calls, source, takes_tools)
        thinking = choose_thinking(reasoning, source)
        marks = form.marks + (() if thinking is None else (thinking.open, thinking.close))
        takes_system = template is not None and template.takes_system
        return cls(Style(form, thinking, _control(tokenizer, marks)), takes_tools, takes_system)

    @property
    def thinks(self) -> bool:
        """Whether there may be reasoning."""
        return self.style.thinking is not None

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse | None
    ) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the template takes them."""
        if self.takes_tools:
            return messages, None if use is None else use.described()
        return told(messages, use, self.style.form, self.takes_system), None

    def opened(self, prompt: Sequence[int], tokenizer: TokenizerLike, goes_on: str | None = None) -> bool:
        """Whether an answer to this prompt begins within the reasoning. `goes_on`: the message that it continues."""
        thinking = self.style.thinking
        if thinking is None:
            return False
        if goes_on is not None and thinking.open in goes_on:
            return thinking.close not in goes_on
        return thinking.opened_by(tokenizer.decode(prompt[-_LAST:], False))

    def reader(self, use: ToolUse | None, opened: bool) -> AnswerReader:
        """For one choice."""
        return AnswerReader(use, self.style.form, self.style.thinking, opened)


def _control(tokenizer: TokenizerLike, marks: Collection[str]) -> dict[str, int]:
    names = {tokenizer.token_bytes(token): token for token in tokenizer.special_ids}
    return {mark: names[data] for mark in marks if (data := mark.encode()) in names}
