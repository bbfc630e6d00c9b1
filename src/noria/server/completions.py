"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidRequestError
from noria.frontend.inputs import DEFAULT_COMPLETION_TOKENS
from noria.frontend.stream import Increment, RequestStream
from noria.params import SamplingParams
from noria.server.http import EventStream, encode_text, event, large_response, noted, text_template
from noria.server.logprobs import CompletionLogprobsWriter, extend, prompt_logprobs
from noria.server.protocol import CompletionRequest
from noria.server.reading import prompts_of, sampling_params
from noria.server.replies import Completion, CompletionChoice, CompletionLogprobs, Usage
from noria.server.replying import Replying
from noria.server.state import ServerState, arrival_of, parts_of, raise_error, submit, whole
from noria.server.structured import form_of

_decoder = msgspec.json.Decoder(CompletionRequest)


async def create_completion(request: Request) -> Response:
    """Continues one or more prompts, `n` times each."""
    arrived = arrival_of(request)
    state: ServerState = request.app.state.noria
    state.check_capacity(request)
    wanted = await state.read(request, _decoder)
    state.check_model(wanted.model)
    wanted.check()
    params = _params(state, wanted)
    prompts = prompts_of(wanted.prompt)
    encoded: list[list[int]] = []
    echo: list[str] = []

    async def prepare() -> tuple[list[list[int]], list[SamplingParams]]:
        keep = state.inputs.kept(wanted.truncate_prompt_tokens, params.max_tokens)
        encoded.extend(await state.inputs.prompts(prompts, wanted.add_special_tokens, params.max_tokens, keep))
        if wanted.echo:
            echo.extend([await _said(state, wanted, *pair) for pair in zip(prompts, encoded, strict=True)])
        return encoded, [state.inputs.resolve(params, len(ids), "prompt", DEFAULT_COMPLETION_TOKENS) for ids in encoded]

    form = form_of(wanted)
    bind = None if form is None else partial(state.grammars.of, form.spec, form.field)
    stream = await submit(state, request, wanted, "completion", len(prompts) * params.n, prepare, arrived, bind)
    reply = _Reply(state, wanted, params, encoded, echo, stream, arrived)
    if wanted.stream:
        return EventStream(stream, reply)
    choices = await whole(request, stream)
    return noted(await large_response(partial(reply.complete, choices), parts_of(choices)), stream)


async def _said(state: ServerState, wanted: CompletionRequest, prompt: str | list[int], ids: list[int]) -> str:
    """The text of a prompt, as an echo."""
    if isinstance(prompt, str) and wanted.truncate_prompt_tokens is None:
        return prompt
    return await state.inputs.decode(ids, isinstance(prompt, str))


def _params(state: ServerState, wanted: CompletionRequest) -> SamplingParams:
    if wanted.best_of not in (None, wanted.n or 1):
        raise InvalidRequestError("best_of: not supported; it must equal n", "best_of")
    asked = [k for k in (wanted.prompt_logprobs, wanted.logprobs if wanted.echo else None) if k is not None]
    return sampling_params(wanted, state.defaults, wanted.max_tokens, wanted.logprobs, max(asked, default=None))


class _Choice:
    """What must be remembered of a choice between chunks. `template`: of a chunk with nothing but text."""

    __slots__ = ("begun", "template", "writer")

    def __init__(self, writer: CompletionLogprobsWriter) -> None:
        self.writer = writer
        self.begun = False
        self.template: tuple[bytes, bytes] | None = None


class _Reply:
    """Writes the answer to one request, whole or in chunks: text as it comes, an empty one with the finish reason, one
    with the usage."""

    def __init__(
        self,
        state: ServerState,
        wanted: CompletionRequest,
        params: SamplingParams,
        encoded: list[list[int]],
        echo: list[str],
        stream: RequestStream,
        arrived: float,
    ) -> None:
        self._state = state
        self._wanted = wanted
        self._params = params
        self._encoded = encoded
        self._replying = Replying("completion", wanted, stream, arrived)
        # Chunks hold text and nothing else.
        self._plain = params.logprobs is None and not (wanted.return_token_ids or wanted.continuous_usage)
        self._echo = echo
        skip = params.skip_special_tokens
        top, as_ids = params.logprobs or 0, bool(wanted.return_tokens_as_token_ids)
        writers = [CompletionLogprobsWriter(state.pieces, 0, skip, top, as_ids) for _ in range(stream.choices)]
        self._choices = list(map(_Choice, writers))

    def complete(self, increments: list[Increment]) -> Completion:
        """The whole answer."""
        choices = [self._choice(increment, last=True) for increment in increments]
        self._replying.done(streamed=False)
        return self._chunk(choices, self._replying.usage())

    def opening(self) -> bytes:
        return b""

    def news(self, increments: list[Increment]) -> bytes:
        if len(increments) == 1:
            return self._events(increments[0])
        return b"".join(map(self._events, increments))

    def closing(self) -> bytes:
        self._replying.done(streamed=True)
        return event(self._chunk([], self._replying.usage())) if self._wanted.include_usage else b""

    def failure(self, error: Exception) -> bytes:
        return self._replying.failure(error)

    def _events(self, increment: Increment) -> bytes:
        choice = self._choices[increment.choice]
        if choice.begun and self._plain and increment.finish is None:
            self._replying.tokens += len(increment.token_ids)
            if not increment.text:
                return b""
            if choice.template is None:
                empty = CompletionChoice(index=increment.choice, text="")
                choice.template = text_template(self._chunk([empty], self._replying.quiet), "text")
            before, after = choice.template
            return before + encode_text(increment.text) + after
        raise_error(increment)
        piece = self._choice(increment, last=False)
        events = b""
        if piece.text or piece.logprobs is not None or piece.token_ids or piece.prompt_token_ids:
            events = event(self._chunk([piece], self._replying.spent()))
        if increment.finish is not None:
            events += event(self._chunk([self._final(increment)], self._replying.spent()))
        return events

    def _final(self, increment: Increment) -> CompletionChoice:
        assert increment.finish is not None
        return CompletionChoice(
            index=increment.choice,
            text="",
            finish_reason=increment.finish.reason,
            stop_reason=increment.finish.stop_reason,
        )

    def _choice(self, increment: Increment, last: bool) -> CompletionChoice:
        """A choice, or what a chunk adds to it; `last`: with its finish reason."""
        choice, ids = self._choices[increment.choice], self._encoded[increment.choice // self._params.n]
        first, choice.begun = not choice.begun, True
        self._replying.tokens += len(increment.token_ids)
        made = CompletionChoice(index=increment.choice, text=increment.text)
        if first and self._wanted.echo:
            made.text = self._echo[increment.choice // self._params.n] + made.text
        if self._params.logprobs is not None:
            made.logprobs = self._logprobs(choice.writer, ids, increment, first)
        if self._wanted.return_token_ids:
            made.token_ids = increment.token_ids
            made.prompt_token_ids = ids if first else msgspec.UNSET
        if (k := self._wanted.prompt_logprobs) is not None:
            made.prompt_logprobs = prompt_logprobs(increment.prompt_logprobs, self._state.pieces, k)
        if last and increment.finish is not None:
            made.finish_reason, made.stop_reason = increment.finish.reason, increment.finish.stop_reason
        return made

    def _logprobs(
        self, writer: CompletionLogprobsWriter, ids: list[int], increment: Increment, first: bool
    ) -> CompletionLogprobs | None:
        made = writer.prompt(ids, increment.prompt_logprobs) if first and self._wanted.echo else None
        if increment.logprobs is not None:
            more = writer.write(increment.logprobs)
            if made is None:
                return more
            extend(made, more)
        return made

    def _chunk(self, choices: list[CompletionChoice], spent: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self._replying.id,
            created=self._replying.created,
            model=self._state.name,
            choices=choices,
            usage=spent,
        )
