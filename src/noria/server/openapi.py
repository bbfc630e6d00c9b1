"""`/openapi.json`: the API as an OpenAPI 3.1 document, made from the structs that bodies and replies are made of.

Nothing is said twice: types, ranges and descriptions are those of the structs, refused and ignored fields those of
`others`. What is here is which path takes and gives which struct, and with which status codes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

import noria
from noria.observe.metrics import CONTENT_TYPE
from noria.server.accounts import Account, Requests
from noria.server.debug import PacerDecisions
from noria.server.errors import ErrorReply
from noria.server.fields import known_fields
from noria.server.others import Ignored, Refused, others_of
from noria.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from noria.server.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Condition,
    Detokenized,
    Model,
    Models,
    Tokenized,
    TokenizerInfo,
    Version,
)

Struct = type[msgspec.Struct]
Query = tuple[str, str, int, int | None]
_JSON = "application/json"
_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "A field is wrong, or the prompt leaves no room in the context. `param` names the field.",
    401: "No API key, or a wrong one.",
    404: "Another model than the one that is served, or something else that is not here.",
    413: "The body is larger than the server's limit.",
    429: "The queue is full, or a limit is reached; `Retry-After` says when to try again.",
    500: "A fault of the server; its log has the details.",
    503: "The engine is gone, or the server stops.",
}
_ALWAYS = (401, 500)  # of every operation but those that are open
_WITH_BODY = (400, 404, 413, 429)


@dataclass(frozen=True, slots=True)
class Operation:
    """What one path does.

    Attributes:
        path: as OpenAPI writes it, with parameters in braces.
        body: what is sent; None: nothing, and the method is GET.
        reply: the answer; None: text.
        chunk: of a stream, if there may be one.
        errors: status codes beside those that all operations of its kind have; of /health and /ready with `reply` as
            their body.
        open: no API key is needed.
        query: parameters: name, meaning, least and most; all of them integers.
    """

    path: str
    summary: str
    reply: Struct | None
    body: Struct | None = None
    chunk: Struct | None = None
    errors: tuple[int, ...] = ()
    open: bool = False
    query: tuple[Query, ...] = ()


_LIMIT: Query = ("limit", "How many at most, 100 if not given.", 1, 1000)
_CHOICE: Query = ("choice", "Index of the only choice to be told of; the first eight if not given.", 0, None)
_PARAMETERS = {
    "model": "The model's name; it may hold slashes.",
    "id": "As the reply calls it, or the client's own `request_id`.",
}
OPERATIONS = (
    Operation("/v1/completions", "Continues prompts", Completion, CompletionRequest, Completion, (503,)),
    Operation("/v1/chat/completions", "Answers a conversation", ChatCompletion, ChatRequest, ChatChunk, (503,)),
    Operation("/v1/models", "The served model", Models),
    Operation("/v1/models/{model}", "The served model, by its name", Model, errors=(404,)),
    Operation("/tokenize", "Token ids of a prompt, or of messages under the chat template", Tokenized, TokenizeRequest),
    Operation("/detokenize", "The text of token ids", Detokenized, DetokenizeRequest),
    Operation("/tokenizer_info", "The texts of the control tokens", TokenizerInfo),
    Operation("/health", "Whether the server lives", Condition, errors=(503,), open=True),
    Operation("/ready", "Whether requests are taken", Condition, errors=(503,), open=True),
    Operation("/metrics", "Metrics for Prometheus", None, errors=(404,)),
    Operation("/version", "The version", Version),
    Operation("/openapi.json", "This document", None),
    Operation("/debug/requests", "The last requests of the caller", Requests, errors=(400, 429), query=(_LIMIT,)),
    Operation("/debug/requests/{id}", "Where a request's time went", Account, errors=(400, 404, 429), query=(_CHOICE,)),
    Operation("/debug/pacer", "What the pacer decided, and why", PacerDecisions, errors=(429, 503)),
)


@functools.lru_cache(4)
def document(name: str, keys: bool) -> dict[str, Any]:
    """The document of a server, not to be written to.

    Args:
        name: of the model.
        keys: whether an API key is needed.
    """
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Noria",
            "version": noria.__version__,
            "description": f"OpenAI's protocol, with the extensions of vLLM and llama.cpp, for the model `{name}`.",
        },
        "paths": {one.path: {"post" if one.body else "get": _operation(one, keys)} for one in OPERATIONS},
        "components": {"schemas": _schemas()},
    }
    if keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _operation(one: Operation, keys: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": f"{'post' if one.body else 'get'}{one.path.translate(_TO_NAME)}",
        "summary": one.summary,
        "responses": {"200": _answer(one)} | {str(status): _error(one, status) for status in _statuses(one, keys)},
    }
    if one.body is not None:
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(one.body)}}}
    if parameters := [*_in_path(one.path), *map(_in_query, one.query)]:
        made["parameters"] = parameters
    if one.open and keys:
        made["security"] = []
    return made


def _in_path(path: str) -> Iterator[dict[str, Any]]:
    for name, said in _PARAMETERS.items():
        if f"{{{name}}}" in path:
            kind = {"type": "string"}
            yield {"name": name, "in": "path", "required": True, "schema": kind, "description": said}


def _in_query(parameter: Query) -> dict[str, Any]:
    name, said, least, most = parameter
    schema = {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})
    return {"name": name, "in": "query", "schema": schema, "description": said}


_TO_NAME = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _statuses(one: Operation, keys: bool) -> list[int]:
    found = {*one.errors, *(_WITH_BODY if one.body else ()), *(() if one.open else _ALWAYS)}
    return sorted(found if keys else found - {401})


def _answer(one: Operation) -> dict[str, Any]:
    if one.reply is None:
        kind = _JSON if one.path.endswith(".json") else CONTENT_TYPE.partition(";")[0]
        schema = {"type": "object" if kind == _JSON else "string"}
        return {"description": "The answer.", "content": {kind: {"schema": schema}}}
    content: dict[str, Any] = {_JSON: {"schema": _ref(one.reply)}}
    if one.chunk is not None:
        said = "Events `data: CHUNK`, then `data: [DONE]`. What goes wrong in between is an event with an ErrorReply."
        # OpenAPI 3.1 has no word for what an event holds, and readers differ in what a schema would mean here.
        content["text/event-stream"] = {"x-description": said, "x-chunk": _ref(one.chunk)}
    return {"description": "The answer; with `stream`, as events." if one.chunk else "The answer.", "content": content}


def _error(one: Operation, status: int) -> dict[str, Any]:
    if status == 503 and one.open:
        return {"description": "No.", "content": {_JSON: {"schema": _ref(one.reply or ErrorReply)}}}
    made: dict[str, Any] = {"description": _ERRORS[status], "content": {_JSON: {"schema": _ref(ErrorReply)}}}
    if status in (429, 503):
        schema = {"type": "integer", "minimum": 0}
        made["headers"] = {"Retry-After": {"description": "Seconds to wait.", "schema": schema}}
    if status == 401:
        made["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return made


def _ref(struct: Struct) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}


def _schemas() -> dict[str, Any]:
    structs = [struct for one in OPERATIONS for struct in (one.body, one.reply, one.chunk) if struct is not None]
    structs = list(dict.fromkeys((*structs, ErrorReply)))
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    for struct in structs:
        properties = schemas[struct.__name__].get("properties", {})
        for field in known_fields(struct).values():
            said = "; ".join(filter(None, (field.description, field.range and f"value: {field.range}")))
            if said:
                properties[field.name]["description"] = f"{said}; default: {field.default}" if field.default else said
        for name, other in others_of(struct).items():
            properties[name] = _other(other)
    return schemas


def _other(other: Ignored | Refused) -> dict[str, Any]:
    if isinstance(other, Ignored):
        return {"description": f"Ignored: {other.why}"}
    return {"description": f"Refused: {other.why}", "enum": [None, False, "", [], {}, *other.harmless]}
