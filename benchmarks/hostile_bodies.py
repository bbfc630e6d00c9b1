"""Bodies of requests that are as large as they may be, or larger."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

MB = 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def huge() -> dict[tuple[str, str], Callable[[], bytes]]:
    """Path and name → body, 5 to 50 MB, or just below the limit of 8 MiB."""
    user = b'{"messages": [{"role": "user", "content": '
    near = 8 * MB - 1000
    return {
        (COMPLETIONS, "text of 5 MB"): lambda: json.dumps({"prompt": "the wheel turns " * (5 * MB // 16)}).encode(),
        (COMPLETIONS, "one letter"): lambda: json.dumps({"prompt": "a" * near}).encode(),
        (COMPLETIONS, "50 MB"): lambda: json.dumps({"prompt": "a" * 50 * MB}).encode(),
        (COMPLETIONS, "ids"): lambda: b'{"prompt": [' + b"1," * (near // 2) + b"1]}",
        (COMPLETIONS, "empty lists"): lambda: b'{"prompt": [' + b"[]," * (near // 3) + b"[]]}",
        (COMPLETIONS, "empty texts"): lambda: b'{"prompt": [' + b'"",' * (near // 3) + b'""]}',
        (COMPLETIONS, "short texts"): lambda: b'{"prompt": [' + b'"a",' * (near // 4) + b'"a"]}',
        (COMPLETIONS, "biases"): lambda: json.dumps(
            {"prompt": "x", "logit_bias": {str(i): 1 for i in range(400_000)}}
        ).encode(),
        (COMPLETIONS, "stops"): lambda: b'{"prompt": "x", "stop": [' + b'"a",' * (near // 4) + b'"a"]}',
        (COMPLETIONS, "unknown"): lambda: json.dumps({"prompt": "x", **{f"x{i}": 0 for i in range(500_000)}}).encode(),
        (COMPLETIONS, "ignored"): lambda: b'{"prompt": "x", "metadata": [' + b"[]," * (near // 3) + b"[]]}",
        (COMPLETIONS, "any"): lambda: b'{"prompt": "x", "tools": [' + b"{}," * (near // 3) + b"{}]}",
        (CHAT, "text of 5 MB"): lambda: user + json.dumps("the wheel turns " * (5 * MB // 16)).encode() + b"}]}",
        (CHAT, "parts"): lambda: user + b"[" + b"{}," * (near // 3) + b"{}]}]}",
        (CHAT, "messages"): lambda: (
            b'{"messages": [' + b'{"role":"user","content":"a"},' * (near // 30) + b'{"role":"a"}]}'
        ),
        (CHAT, "variables"): lambda: (
            user + b'"x"}], "chat_template_kwargs": {"a": [' + b"[]," * (near // 3 - 40) + b"[]]}}"
        ),
        ("/tokenize", "text"): lambda: json.dumps({"prompt": "the wheel turns " * (5 * MB // 16)}).encode(),
        ("/tokenize", "strings"): lambda: json.dumps(
            {"prompt": "a b c " * (5 * MB // 6), "return_token_strs": True}
        ).encode(),
        ("/detokenize", "ids"): lambda: b'{"tokens": [' + b"100," * (near // 4) + b"100]}",
    }


def large(chance: random.Random, ids: Callable[[int], list[int]], tokens: int) -> list[dict[str, Any]]:
    """Completions at the limits of what is served, and just past. `ids`: makes a prompt; `tokens`: of the context."""
    small = {"prompt": ids(10), "max_tokens": 2}
    return [
        {**small, "n": 128},
        {**small, "n": 129},
        {**small, "n": 4, "best_of": 8},
        {**small, "prompt": [ids(5) for _ in range(chance.choice((16, 1000, 5000)))]},
        {**small, "stop": [f"stop {i}" for i in range(16)]},
        {**small, "stop": [f"stop {i}" for i in range(10_000)]},
        {**small, "stop": ["a" * 1024] * 16},
        {**small, "stop": ["a" * 1025]},
        {**small, "logit_bias": {str(i): -100 for i in range(1000)}},
        {**small, "logit_bias": {str(i): 1 for i in range(5000)}},
        {**small, "stop_token_ids": [*range(128)]},
        {**small, "stop_token_ids": [*range(129)]},
        {**small, "logprobs": 20, "echo": True, "prompt": ids(500)},
        {**small, "prompt": ids(tokens - 2)},
        {**small, "prompt": ids(tokens - 1)},
        {**small, "prompt": ids(tokens * 3)},
        {**small, "prompt": "wheel " * (tokens - 10), "truncate_prompt_tokens": 5},
        {**small, "temperature": 100, "top_k": 1, "repetition_penalty": 100, "frequency_penalty": 2, "logprobs": 20},
    ]


def forms() -> list[dict[str, Any]]:
    """Answers in forms that cost much to work out, or do not end, or are none."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"], "additionalProperties": False}
    wide = {"type": "object", "properties": {f"field {i}": {"type": "integer"} for i in range(5000)}}
    looped = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    pairs = {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}, {"allOf": [{"$ref": "#"}, {}]}]}
    schemas: list[Any] = [
        deep,
        wide,
        looped,
        pairs,
        {"enum": [f"{i}" * 50 for i in range(20_000)]},
        {"type": "x"},
        5,
        [],
    ]
    schemas += [{"type": "string", "pattern": pattern} for pattern in ("(a|a)*" * 50, "(", "(?=a)b", "^.{100000}$")]
    schemas += [{"type": "array", "minItems": 10**9}, {"not": {}}, {"$ref": "http://elsewhere/schema"}, {"type": []}]
    return [
        *({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": one}}} for one in schemas),
        *(
            {"structured_outputs": {"regex": one}}
            for one in ("((a{1,999}){1,999}){1,999}", "(" * 1000, "[" * 1000, "\\")
        ),
        *({"structured_outputs": {"grammar": one}} for one in ("start: start start", "x", "start: " + '"a" ' * 50_000)),
        {"structured_outputs": {"choice": [f"choice {i}" for i in range(50_000)]}},
        {"structured_outputs": {"json": deep, "regex": "a"}},
    ]
