"""The small endpoints: models, tokens, health, metrics, version."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import noria
from noria.errors import NotFoundError
from noria.observe.metrics import CONTENT_TYPE
from noria.server.http import json_response
from noria.server.openapi import document
from noria.server.protocol import DetokenizeRequest, TokenizeRequest
from noria.server.reading import read_messages
from noria.server.replies import Condition, Detokenized, Model, Models, Tokenized, TokenizerInfo, Version
from noria.server.state import ServerState
from noria.server.tools.request import tool_use

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def _model(state: ServerState) -> Model:
    return Model(id=state.name, created=state.started, max_model_len=state.inputs.max_model_len)


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    return json_response(Models(data=[_model(request.app.state.noria)]))


async def get_model(request: Request) -> Response:
    """`GET /v1/models/ID`."""
    state: ServerState = request.app.state.noria
    state.check_model(request.path_params["model"])
    return json_response(_model(state))


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: token ids of a prompt, or of messages under the chat template."""
    state: ServerState = request.app.state.noria
    wanted = await state.read(request, _tokenize)
    state.check_model(wanted.model)
    wanted.check()
    if wanted.messages is not None:
        use = tool_use(wanted.tools, None, None)
        messages, tools = state.dialect.conversation(await read_messages(wanted.messages), use)
        continued = bool(wanted.continue_final_message)
        opens = not continued if wanted.add_generation_prompt is None else wanted.add_generation_prompt
        variables, own = wanted.chat_template_kwargs, wanted.chat_template
        ids = await state.inputs.chat(messages, tools, opens, variables, continued, own=own)
    else:
        ids = await state.inputs.encode(wanted.prompt or "", wanted.add_special_tokens)
    reply = Tokenized(count=len(ids), max_model_len=state.inputs.max_model_len, tokens=ids)
    if wanted.return_token_strs:
        reply.token_strs = await asyncio.to_thread(lambda: [state.pieces.text_of(token) for token in ids])
    return json_response(reply)


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the text of token ids."""
    state: ServerState = request.app.state.noria
    wanted = await state.read(request, _detokenize)
    state.check_model(wanted.model)
    state.inputs.check_ids(wanted.tokens, "tokens")
    return json_response(Detokenized(await state.inputs.decode(wanted.tokens, wanted.skip_special_tokens)))


async def tokenizer_info(request: Request) -> Response:
    """`GET /tokenizer_info`: the texts of the control tokens, under the names that templates use. Evaluation harnesses
    look for it, and then count tokens with `/tokenize` instead of a tokeniser of their own."""
    state: ServerState = request.app.state.noria
    named = state.inputs.tokenizer.names.get
    return json_response(
        TokenizerInfo(
            bos_token=named("bos_token"),
            eos_token=named("eos_token"),
            pad_token=named("pad_token"),
            unk_token=named("unk_token"),
            model_max_length=state.inputs.max_model_len,
        )
    )


async def health(request: Request) -> Response:
    """`GET /health`: 200 while the server lives, 503 when its engine is gone for good."""
    state: ServerState = request.app.state.noria
    if (error := state.client.error) is not None:
        return json_response(Condition("unavailable", str(error)), 503)
    return json_response(Condition("ok"))


async def ready(request: Request) -> Response:
    """`GET /ready`: 200 while requests are taken and there is an engine that makes progress, otherwise 503."""
    state: ServerState = request.app.state.noria
    if state.draining:
        message = "the server is stopping"
    elif state.client.ready:
        return json_response(Condition("ready"))
    else:
        message = str(state.client.error or "the engine is being started again")
    return json_response(Condition("unavailable", message), 503)


async def metrics(request: Request) -> Response:
    """`GET /metrics`, for Prometheus."""
    state: ServerState = request.app.state.noria
    if not state.options.metrics:
        raise NotFoundError("this server was started without metrics (--no-enable-metrics)")
    await state.client.refresh_stats()
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """`GET /version`."""
    return json_response(Version(noria.__version__))


async def openapi(request: Request) -> Response:
    """`GET /openapi.json`: what this server takes and answers."""
    state: ServerState = request.app.state.noria
    # To make it for the first time takes a tenth of a second.
    return json_response(await asyncio.to_thread(document, state.name, keys=not state.access.open))
