"""`/openapi.json`: a document that holds, and that the server holds to."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest
from fakes import serving

from noria.config import ServerOptions
from noria.server.app import create_app
from noria.server.fields import known_fields
from noria.server.others import others_of
from noria.server.protocol import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    made: dict[str, Any] = http.get("/openapi.json").json()
    return made


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Of a schema within the document."""
    return jsonschema.Draft202012Validator(schema | {"components": document["components"]})


def refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()


def test_every_schema_is_one_and_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert document["openapi"].startswith("3.1")
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert refs(document) == {f"#/components/schemas/{name}" for name in schemas}
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(names)
    for item in document["paths"].values():
        for operation in item.values():
            assert all(re.fullmatch(r"[1-5]\d\d", status) for status in operation["responses"])
            assert all(answer["description"] for answer in operation["responses"].values())


def test_the_paths_are_those_of_the_application(document: dict[str, Any], running: Any) -> None:
    routes = {
        (route.path.replace("{model:path}", "{model}"), method.lower())
        for route in create_app(running.state).routes
        for method in route.methods
        if method != "HEAD"
    }
    assert {(path, method) for path, item in document["paths"].items() for method in item} == routes


@pytest.mark.parametrize("struct", [CompletionRequest, ChatRequest])
def test_every_known_field_is_in_it_and_described(document: dict[str, Any], struct: Any) -> None:
    properties = document["components"]["schemas"][struct.__name__]["properties"]
    assert set(properties) == {*known_fields(struct), *others_of(struct)}
    assert [name for name, schema in properties.items() if not schema.get("description")] == []
    assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 100}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/completions", {"prompt": "a", "temperature": 101}),
        ("/v1/completions", {"prompt": "poison"}),
        ("/v1/completions", {"prompt": "a", "model": "mill"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "suffix": "x"}),
        ("/v1/models", None),
        ("/v1/models/wheel", None),
        ("/v1/models/mill", None),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [65]}),
        ("/tokenizer_info", None),
        ("/health", None),
        ("/ready", None),
        ("/metrics", None),
        ("/version", None),
        ("/openapi.json", None),
    ],
)
def test_replies_are_as_the_document_says(http: httpx.Client, document: dict[str, Any], path: str, body: Any) -> None:
    written = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    operation = document["paths"][written]["get" if body is None else "post"]
    reply = http.get(path) if body is None else http.post(path, json=body)
    content = operation["responses"][str(reply.status_code)]["content"]
    kind = reply.headers["content-type"].partition(";")[0]
    assert kind in content
    value = reply.text if kind == "text/plain" else reply.json()
    validator(document, content[kind]["schema"]).validate(value)
    if body is not None and reply.status_code == 200:
        validator(document, operation["requestBody"]["content"]["application/json"]["schema"]).validate(body)


@pytest.mark.parametrize(
    ("path", "struct", "body"),
    [
        ("/v1/completions", "Completion", {"prompt": "a", "logprobs": 1}),
        ("/v1/chat/completions", "ChatChunk", {"messages": MESSAGES, "logprobs": True}),
    ],
)
def test_chunks_are_as_the_document_says(
    http: httpx.Client, document: dict[str, Any], path: str, struct: str, body: dict[str, Any]
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    reply = http.post(path, json=body | options)
    answer = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert answer["x-chunk"] == {"$ref": f"#/components/schemas/{struct}"}
    check = validator(document, answer["x-chunk"])
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    for event in events:
        check.validate(httpx.Response(200, text=event).json())


def test_keys_are_asked_for_where_there_are_any(document: dict[str, Any]) -> None:
    assert "security" not in document
    with serving(options=ServerOptions(api_keys=("one",))) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/openapi.json").status_code == 401
        made = http.get("/openapi.json", headers={"authorization": "Bearer one"}).json()
    assert made["security"] == [{"key": []}]
    assert made["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert made["paths"]["/health"]["get"]["security"] == []
    assert "401" in made["paths"]["/v1/completions"]["post"]["responses"]
