"""What the served model writes beside plain text, and what it can be shown: found out once, when it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noria.frontend.inputs import TokenizerLike
from noria.frontend.template import ChatTemplate
from noria.server.tools.answer import AnswerReader
from noria.server.tools.formats import FORMATS, CallFormat, choose_format
from noria.server.tools.prompt import told
from noria.server.tools.request import ToolUse
from noria.server.tools.thinking import Thinking, choose_thinking

_LAST = 16  # tokens of a prompt in which the mark that opens the reasoning is looked for


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model calls functions and reasons.

    Attributes:
        form: how it writes calls. thinking: how it marks reasoning; None: it does not reason.
        takes_tools, takes_system: what its chat template shows to it.
        control: marks of these that are control tokens, with their ids. They have to be in the text that is read.
    """

    form: CallFormat = FORMATS["json"]
    thinking: Thinking | None = None
    takes_tools: bool = False
    takes_system: bool = True
    control: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, template: ChatTemplate | None, tokenizer: TokenizerLike, calls: str, reasoning: str) -> Dialect:
        """Of a model. `calls`, `reasoning`: names of a format each, or `auto`."""
        source = "" if template is None else template.source
        takes_tools = template is not None and template.takes_tools
        form = choose_format(calls, source, takes_tools)
        thinking = choose_thinking(reasoning, source)
        marks = form.marks + (() if thinking is None else (thinking.open, thinking.close))
        takes_system = template is not None and template.takes_system
        return cls(form, thinking, takes_tools, takes_system, _control(tokenizer, marks))

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse | None
    ) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the template takes them."""
        if self.takes_tools:
            return messages, None if use is None else use.described()
        return told(messages, use, self.form, self.takes_system), None

    def opened(self, prompt: Sequence[int], tokenizer: TokenizerLike, goes_on: str | None = None) -> bool:
        """Whether an answer to this prompt begins within the reasoning. `goes_on`: the message that it continues."""
        if self.thinking is None:
            return False
        if goes_on is not None and self.thinking.open in goes_on:
            return self.thinking.close not in goes_on
        return self.thinking.opened_by(tokenizer.decode(prompt[-_LAST:], False))

    def reader(self, use: ToolUse | None, opened: bool) -> AnswerReader:
        """For one choice."""
        return AnswerReader(use, self.form, self.thinking, opened)


def _control(tokenizer: TokenizerLike, marks: Collection[str]) -> dict[str, int]:
    names = {tokenizer.token_bytes(token): token for token in tokenizer.special_ids}
    return {mark: names[data] for mark in marks if (data := mark.encode()) in names}
