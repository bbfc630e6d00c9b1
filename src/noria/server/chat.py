"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidRequestError
from noria.frontend.stream import RequestStream
from noria.params import SamplingParams
from noria.server.chat_parts import PartsReply
from noria.server.chat_reply import ChatReply
from noria.server.http import EventStream, large_response, noted
from noria.server.protocol import ChatRequest
from noria.server.reading import read_messages, sampling_params
from noria.server.state import ServerState, arrival_of, parts_of, submit, whole
from noria.server.structured import check_beside, form_of
from noria.server.tools.binding import grammar_of, readable
from noria.server.tools.request import tool_use

_decoder = msgspec.json.Decoder(ChatRequest)


async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, `n` times."""
    arrived = arrival_of(request)
    state: ServerState = request.app.state.noria
    state.check_capacity(request)
    wanted = await state.read(request, _decoder)
    state.check_model(wanted.model)
    wanted.check()
    talk = _Conversation(state, wanted)
    stream = await submit(
        state, request, wanted, "chat", talk.params.n, talk.prepare, arrived, talk.bind, talk.in_parts
    )
    reply = talk.reply(stream, arrived)
    if wanted.stream:
        return EventStream(stream, reply)
    choices = await whole(request, stream)
    return noted(await large_response(partial(reply.complete, choices), parts_of(choices)), stream)


class _Conversation:
    """A request on its way to the engine. Making one checks what needs no template.

    Attributes:
        in_parts: the answer may be more than text: it has to be taken apart.
    """

    def __init__(self, state: ServerState, wanted: ChatRequest) -> None:
        self._state = state
        self._wanted = wanted
        self._use = tool_use(wanted.tools, wanted.tool_choice, wanted.parallel_tool_calls)
        self._form = form_of(wanted)
        if self._use is not None and self._use.binds:
            check_beside(wanted, "tool_choice")
        self.params = state.inputs.chat_params(_params(state, wanted))
        self.in_parts = self._use is not None or state.dialect.thinks
        self._prompt: list[int] = []
        self._opened = False

    async def prepare(self) -> tuple[list[list[int]], list[SamplingParams]]:
        """The prompt, and the parameters that it leaves room for."""
        wanted, inputs = self._wanted, self._state.inputs
        continued = bool(wanted.continue_final_message)
        opens = not continued if wanted.add_generation_prompt is None else wanted.add_generation_prompt
        keep = inputs.kept(wanted.truncate_prompt_tokens, self.params.max_tokens)
        given = await read_messages(wanted.messages)
        messages, tools = self._state.dialect.conversation(given, self._use)
        self._prompt = await inputs.chat(
            messages, tools, opens, wanted.variables, continued, keep, wanted.chat_template
        )
        goes_on: Any = given[-1]["content"] if continued else None
        self._opened = self._state.dialect.opened(self._prompt, inputs.tokenizer, goes_on)
        return [self._prompt], [inputs.resolve(self.params, len(self._prompt), "messages")]

    async def bind(self) -> str | None:
        """The grammar of the answer, after `prepare`; None: it is free."""
        style = self._state.dialect.style
        return await grammar_of(self._state.grammars, self._use, self._form, style, self._opened)

    def reply(self, stream: RequestStream, arrived: float) -> ChatReply:
        """What writes the answer."""
        if not self.in_parts:
            return ChatReply(self._state, self._wanted, self._prompt, stream, arrived)
        use = readable(self._use, self._form, self._state.dialect.style)
        return PartsReply(self._state, self._wanted, self._prompt, stream, arrived, use, self._opened)


def _params(state: ServerState, wanted: ChatRequest) -> SamplingParams:
    top = wanted.top_logprobs
    if top and not wanted.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    longest = wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens
    return sampling_params(
        wanted, state.defaults, longest, (top or 0) if wanted.logprobs else None, wanted.prompt_logprobs
    )
