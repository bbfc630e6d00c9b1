"""Replies to `POST /v1/chat/completions` that are more than text: calls of functions, reasoning."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from noria.frontend.stream import Increment, RequestStream
from noria.server.chat_reply import ChatReply
from noria.server.protocol import ChatRequest
from noria.server.replies import (
    AssistantMessage,
    CalledFunction,
    Delta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from noria.server.state import ServerState
from noria.server.tools.answer import new_call_id
from noria.server.tools.reader import Part
from noria.server.tools.request import ToolUse


class PartsReply(ChatReply):
    """Takes each choice's answer apart.

    Args:
        use: what the model may call, if anything.
        opened: the prompt has the answer begin within reasoning.
    """

    def __init__(
        self,
        state: ServerState,
        wanted: ChatRequest,
        prompt: list[int],
        stream: RequestStream,
        arrived: float,
        use: ToolUse | None,
        opened: bool,
    ) -> None:
        super().__init__(state, wanted, prompt, stream, arrived)
        self._plain = False
        self._first = Delta("assistant", None)
        self._readers = [state.dialect.reader(use, opened) for _ in range(stream.choices)]
        self._hidden = wanted.include_reasoning is False
        self._begun: set[int] = set()  # choices of which anything was said

    def _parts(self, increment: Increment) -> list[Part]:
        """What an increment adds: neighbours of one kind are joined."""
        reader = self._readers[increment.choice]
        for token in increment.token_ids:
            if (counter := reader.counter) is None:
                break
            counter.push(self._state.pieces.bytes_of(token))
        parts = reader.push(increment.text)
        if increment.finish is not None:
            parts += reader.finish()
        shown = list(_joined(part for part in parts if not (self._hidden and part.kind == "reasoning")))
        if shown:
            self._begun.add(increment.choice)
        elif increment.finish is not None and increment.choice not in self._begun:
            return [Part("content", "")]  # an empty answer: clients take null for something else
        return shown

    def _full_events(self, increment: Increment) -> bytes:
        return self._delta_events(increment, [self._delta(part) for part in self._parts(increment)])

    def _delta(self, part: Part) -> Delta:
        if part.kind == "content":
            return Delta(content=part.text)
        if part.kind == "reasoning":
            return Delta(reasoning_content=part.text, reasoning=part.text)
        if part.kind == "arguments":
            return Delta(tool_calls=[ToolCallDelta(part.call, FunctionDelta(part.text))])
        call_id = new_call_id(self._state.dialect.style.form)
        return Delta(tool_calls=[ToolCallDelta(part.call, FunctionDelta("", part.text), call_id, "function")])

    def _message(self, increment: Increment) -> AssistantMessage:
        message = AssistantMessage(None)
        for part in self._parts(increment):
            if part.kind == "content":
                message.content = (message.content or "") + part.text
            elif part.kind == "reasoning":
                message.reasoning_content = message.reasoning = (message.reasoning or "") + part.text
            elif part.kind == "call":
                calls = [] if message.tool_calls is UNSET else message.tool_calls
                calls.append(ToolCall(new_call_id(self._state.dialect.style.form), CalledFunction(part.text, "")))
                message.tool_calls = calls
            elif message.tool_calls is not UNSET:
                message.tool_calls[part.call].function.arguments += part.text
        return message

    def _finish_reason(self, increment: Increment) -> str | None:
        reason = super()._finish_reason(increment)
        return "tool_calls" if reason == "stop" and self._readers[increment.choice].called else reason

    def _reasoning_tokens(self) -> int | None:
        if not self._state.dialect.thinks:
            return None
        return sum(reader.reasoning_tokens for reader in self._readers)


def _joined(parts: Iterable[Part]) -> Iterable[Part]:
    """Parts, neighbours of one kind in one."""
    last: Part | None = None
    for part in parts:
        if last is not None and part.kind != "call" and (part.kind, part.call) == (last.kind, last.call):
            last = last._replace(text=last.text + part.text)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
