"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidRequestError
from noria.frontend.stream import Increment, RequestStream
from noria.params import SamplingParams
from noria.server.errors import describe
from noria.server.http import EventStream, encode_text, event, json_response, text_template
from noria.server.logprobs import chat_logprobs
from noria.server.protocol import ChatRequest, plain_messages, sampling_params
from noria.server.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Usage,
)
from noria.server.state import ServerState, log, log_answer, raise_error, submit, total_tokens, usage, whole

_decoder = msgspec.json.Decoder(ChatRequest)


async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, `n` times."""
    arrived = time.monotonic()
    state: ServerState = request.app.state.noria
    state.check_capacity()
    wanted = await state.read(request, _decoder)
    state.check_model(wanted.model)
    wanted.check()
    params = state.inputs.chat_params(_params(state, wanted))
    messages = plain_messages(wanted.messages)
    encoded: list[list[int]] = []

    async def prepare() -> tuple[list[list[int]], list[SamplingParams]]:
        continued = bool(wanted.continue_final_message)
        opens = not continued if wanted.add_generation_prompt is None else wanted.add_generation_prompt
        keep = state.inputs.kept(wanted.truncate_prompt_tokens, params.max_tokens)
        variables = wanted.chat_template_kwargs
        encoded.append(await state.inputs.chat(messages, None, opens, variables, continued, keep))
        return encoded, [state.inputs.resolve(params, len(encoded[0]), "messages")]

    stream = await submit(state, request, wanted, params.n, prepare, arrived)
    reply = _Reply(state, wanted, encoded[0], stream, arrived)
    if wanted.stream:
        return EventStream(stream, reply)
    return json_response(reply.complete(await whole(request, stream)))


def _params(state: ServerState, wanted: ChatRequest) -> SamplingParams:
    top = wanted.top_logprobs
    if top and not wanted.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    longest = wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens
    return sampling_params(wanted, state.defaults, longest, (top or 0) if wanted.logprobs else None)


class _Reply:
    """Writes the answer to one request, whole or in chunks: the role, text as it comes, an empty delta with the finish
    reason, the usage."""

    def __init__(
        self, state: ServerState, wanted: ChatRequest, prompt: list[int], stream: RequestStream, arrived: float
    ) -> None:
        self._state = state
        self._wanted = wanted
        self._prompt = prompt
        self._stream = stream
        self._arrived = arrived
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._tokens = 0
        self._quiet: UnsetType | None = None if wanted.include_usage else UNSET  # OpenAI: null until the usage chunk
        # Chunks hold text and nothing else.
        self._plain = not (wanted.logprobs or wanted.return_token_ids or wanted.continuous_usage)
        self._templates: dict[int, tuple[bytes, bytes]] = {}  # by choice, of a chunk with text

    def complete(self, increments: list[Increment]) -> ChatCompletion:
        """The whole answer."""
        self._tokens = total_tokens(increments)
        log_answer("chat", self._id, self._stream, self._tokens, time.monotonic() - self._arrived)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._state.name,
            choices=[self._choice(increment) for increment in increments],
            usage=usage(self._stream, self._tokens),
            prompt_token_ids=self._prompt if self._wanted.return_token_ids else UNSET,
        )

    def opening(self) -> bytes:
        opening = []
        for index in range(self._stream.choices):
            chunk = self._chunk([ChatChunkChoice(index=index, delta=Delta("assistant", ""))], self._spent())
            if index == 0 and self._wanted.return_token_ids:
                chunk.prompt_token_ids = self._prompt
            opening.append(event(chunk))
        return b"".join(opening)

    def news(self, increments: list[Increment]) -> bytes:
        if len(increments) == 1:
            return self._events(increments[0])
        return b"".join(map(self._events, increments))

    def closing(self) -> bytes:
        log_answer("chat stream", self._id, self._stream, self._tokens, time.monotonic() - self._arrived)
        return event(self._chunk([], usage(self._stream, self._tokens))) if self._wanted.include_usage else b""

    def failure(self, error: Exception) -> bytes:
        log.warning("chat %s failed: %s", self._id, error)
        return event(describe(error)[1])

    def _events(self, increment: Increment) -> bytes:
        raise_error(increment)
        self._tokens += len(increment.token_ids)
        events = self._text_event(increment) if self._plain else self._full_event(increment)
        if (finish := increment.finish) is not None:
            last = ChatChunkChoice(
                index=increment.choice, delta=Delta(), finish_reason=finish.reason, stop_reason=finish.stop_reason
            )
            events += event(self._chunk([last], self._spent()))
        return events

    def _text_event(self, increment: Increment) -> bytes:
        if not increment.text:
            return b""
        template = self._templates.get(increment.choice)
        if template is None:
            empty = ChatChunkChoice(index=increment.choice, delta=Delta(content=""))
            template = self._templates[increment.choice] = text_template(self._chunk([empty], self._quiet), "content")
        return template[0] + encode_text(increment.text) + template[1]

    def _full_event(self, increment: Increment) -> bytes:
        logprobs = self._logprobs(increment)
        ids = increment.token_ids if self._wanted.return_token_ids else UNSET
        if not (increment.text or logprobs is not None or ids):
            return b""
        delta = Delta(content=increment.text)
        choice = ChatChunkChoice(index=increment.choice, delta=delta, logprobs=logprobs, token_ids=ids)
        return event(self._chunk([choice], self._spent()))

    def _spent(self) -> Usage | UnsetType | None:
        """Usage in a chunk that is not the last."""
        return usage(self._stream, self._tokens) if self._wanted.continuous_usage else self._quiet

    def _choice(self, increment: Increment) -> ChatChoice:
        finish = increment.finish
        return ChatChoice(
            index=increment.choice,
            message=AssistantMessage(increment.text),
            logprobs=self._logprobs(increment),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            token_ids=increment.token_ids if self._wanted.return_token_ids else UNSET,
        )

    def _logprobs(self, increment: Increment) -> ChatLogprobs | None:
        if not self._wanted.logprobs or increment.logprobs is None:
            return None
        return chat_logprobs(increment.logprobs, self._state.pieces, self._wanted.top_logprobs or 0)

    def _chunk(self, choices: list[ChatChunkChoice], spent: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._state.name, choices=choices, usage=spent)
