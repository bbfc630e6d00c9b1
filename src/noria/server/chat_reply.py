"""Replies to `POST /v1/chat/completions`, whole or in chunks, of models whose answers are text and nothing else."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from noria.frontend.stream import Increment, RequestStream
from noria.server.http import encode_text, event, text_template
from noria.server.logprobs import chat_logprobs, prompt_logprobs
from noria.server.protocol import ChatRequest
from noria.server.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    PromptLogprobs,
    Usage,
)
from noria.server.replying import Replying
from noria.server.state import ServerState, raise_error, total_tokens


class ChatReply:
    """Writes the answer to one request, whole or in chunks: the role, text as it comes, an empty delta with the finish
    reason, the usage."""

    def __init__(
        self, state: ServerState, wanted: ChatRequest, prompt: list[int], stream: RequestStream, arrived: float
    ) -> None:
        self._state = state
        self._wanted = wanted
        self._prompt = prompt
        self._choices = stream.choices
        self._replying = Replying("chat", wanted, stream, arrived)
        # Chunks hold text and nothing else.
        self._plain = not (wanted.logprobs or wanted.return_token_ids or wanted.continuous_usage)
        self._templates: dict[int, tuple[bytes, bytes]] = {}  # by choice, of a chunk with text
        self._first = Delta("assistant", "")

    def complete(self, increments: list[Increment]) -> ChatCompletion:
        """The whole answer."""
        self._replying.tokens = total_tokens(increments)
        choices = [self._choice(increment) for increment in increments]
        self._replying.done(streamed=False)
        return ChatCompletion(
            id=self._replying.id,
            created=self._replying.created,
            model=self._state.name,
            choices=choices,
            usage=self._replying.usage(self._reasoning_tokens()),
            prompt_token_ids=self._prompt if self._wanted.return_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(increments[0]),
        )

    def opening(self) -> bytes:
        """The role of each choice."""
        opening = []
        for index in range(self._choices):
            chunk = self._chunk([ChatChunkChoice(index=index, delta=self._first)], self._spent())
            if index == 0 and self._wanted.return_token_ids:
                chunk.prompt_token_ids = self._prompt
            opening.append(event(chunk))
        return b"".join(opening)

    def news(self, increments: list[Increment]) -> bytes:
        """What they add."""
        if len(increments) == 1:
            return self._events(increments[0])
        return b"".join(map(self._events, increments))

    def closing(self) -> bytes:
        """The usage, if asked for."""
        self._replying.done(streamed=True)
        if not self._wanted.include_usage:
            return b""
        return event(self._chunk([], self._replying.usage(self._reasoning_tokens())))

    def failure(self, error: Exception) -> bytes:
        """Why it does not go on."""
        return self._replying.failure(error)

    def _events(self, increment: Increment) -> bytes:
        raise_error(increment)
        self._replying.tokens += len(increment.token_ids)
        events = self._text_event(increment) if self._plain else self._full_events(increment)
        return events if increment.finish is None else events + self._last_event(increment)

    def _text_event(self, increment: Increment) -> bytes:
        if not increment.text:
            return b""
        template = self._templates.get(increment.choice)
        if template is None:
            empty = ChatChunkChoice(index=increment.choice, delta=Delta(content=""))
            chunk = self._chunk([empty], self._replying.quiet)
            template = self._templates[increment.choice] = text_template(chunk, "content")
        return template[0] + encode_text(increment.text) + template[1]

    def _full_events(self, increment: Increment) -> bytes:
        return self._delta_events(increment, [Delta(content=increment.text)] if increment.text else [])

    def _delta_events(self, increment: Increment, deltas: list[Delta]) -> bytes:
        """A chunk for each delta, the first with what else there is of the increment."""
        logprobs = self._logprobs(increment)
        ids = increment.token_ids if self._wanted.return_token_ids else UNSET
        if not deltas and (logprobs is not None or ids):
            deltas = [Delta(content="") if self._first.content is not None else Delta()]
        choices = [ChatChunkChoice(index=increment.choice, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].token_ids = logprobs, ids
        spent = self._spent() if choices else UNSET
        return b"".join(event(self._chunk([choice], spent)) for choice in choices)

    def _last_event(self, increment: Increment) -> bytes:
        finish = increment.finish
        assert finish is not None
        last = ChatChunkChoice(
            index=increment.choice,
            delta=Delta(),
            finish_reason=self._finish_reason(increment),
            stop_reason=finish.stop_reason,
        )
        return event(self._chunk([last], self._spent()))

    def _choice(self, increment: Increment) -> ChatChoice:
        return ChatChoice(
            index=increment.choice,
            message=self._message(increment),
            logprobs=self._logprobs(increment),
            finish_reason=self._finish_reason(increment),
            stop_reason=increment.finish.stop_reason if increment.finish else None,
            token_ids=increment.token_ids if self._wanted.return_token_ids else UNSET,
        )

    def _message(self, increment: Increment) -> AssistantMessage:
        return AssistantMessage(increment.text)

    def _finish_reason(self, increment: Increment) -> str | None:
        return increment.finish.reason if increment.finish else None

    def _reasoning_tokens(self) -> int | None:
        """Of all choices, so far; None: the model does not reason."""
        return None

    def _spent(self) -> Usage | UnsetType | None:
        """Usage in a chunk that is not the last."""
        return self._replying.spent(self._reasoning_tokens())

    def _logprobs(self, increment: Increment) -> ChatLogprobs | None:
        if not self._wanted.logprobs or increment.logprobs is None:
            return None
        as_ids = bool(self._wanted.return_tokens_as_token_ids)
        return chat_logprobs(increment.logprobs, self._state.pieces, self._wanted.top_logprobs or 0, as_ids)

    def _prompt_logprobs(self, first: Increment) -> PromptLogprobs | UnsetType:
        k = self._wanted.prompt_logprobs
        return UNSET if k is None else prompt_logprobs(first.prompt_logprobs, self._state.pieces, k)

    def _chunk(self, choices: list[ChatChunkChoice], spent: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._replying.id,
            created=self._replying.created,
            model=self._state.name,
            choices=choices,
            usage=spent,
        )
