"""Bodies that nobody would write: each is answered, or refused with an error that names its field. Never a 500."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fakes import Running
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.server.fields import known_fields
from noria.server.others import others_of
from noria.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

STRUCTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "abc"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "abc"}]}),
    "/tokenize": (TokenizeRequest, {"prompt": "abc"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [97, 98]}),
}
EDGES = (
    *(sign * (2**bits + off) for bits in (7, 15, 31, 32, 53, 63, 64) for off in (-1, 0, 1) for sign in (1, -1)),
    *(
        0,
        1,
        -1,
        2,
        100,
        10**40,
        -(10**40),
        0.0,
        -0.0,
        0.5,
        1.0,
        1e-320,
        1e308,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
)
# Surrogates as well: JSON can write halves of them, and no encoding can.
texts = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["auto", "none", "text", "json_object", "user", "\ud83d", "\udf0a", "\x00", "<|im_end|>", "-", "1e9", "(" * 200]
)
scalars = st.none() | st.booleans() | st.sampled_from(EDGES) | st.integers() | st.floats() | texts
names = st.sampled_from(
    [
        "type",
        "text",
        "content",
        "role",
        "name",
        "function",
        "arguments",
        "json",
        "regex",
        "choice",
        "$ref",
        "schema",
        "",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | texts, inner, max_size=4),
    max_leaves=8,
)


def fields_of(path: str) -> list[str]:
    struct = STRUCTS[path][0]
    return sorted({*known_fields(struct), *others_of(struct)})


def check(reply: httpx.Response, sent: bytes) -> None:
    """An answer, or a refusal whose message is short and whose field the body has or lacks."""
    if reply.status_code == 200:
        return
    assert reply.status_code in (400, 404), (reply.status_code, reply.text, sent)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2000, error
    if error["param"] is not None:
        assert error["param"].split(".")[0].split("[")[0] in error["message"], error


@pytest.mark.parametrize("path", STRUCTS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
def test_anything_at_all(http: httpx.Client, path: str, data: bytes) -> None:
    check(http.post(path, content=data), data)


@pytest.mark.parametrize("path", STRUCTS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_known_fields_with_any_values(http: httpx.Client, path: str, data: st.DataObject) -> None:
    """A body that would be right, but for one to three of its fields."""
    chosen = st.dictionaries(st.sampled_from(fields_of(path)), values, min_size=1, max_size=3)
    sent = json.dumps(STRUCTS[path][1] | data.draw(chosen)).encode()
    check(http.post(path, content=sent), sent)


def test_none_of_it_is_left(running: Running, http: httpx.Client) -> None:
    """After all of that the server answers, and the engine has nothing left to do."""
    assert http.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
    assert not running.core.rows
