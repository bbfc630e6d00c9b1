"""32 requests at once, each held to a JSON schema, against a running `noria serve`: is every answer valid against its
schema, the same as alone, and the same streamed?

    python benchmarks/structured.py --model smollm2          # starts a server
    python benchmarks/structured.py --url http://127.0.0.1:8000

Half of the requests are greedy, half sampled with a seed; half chat, half completions. Schemas are bounded, or their
requests penalised for repeating, so that an answer that is cut (`length`) is a failure as well. Needs `jsonschema`,
which is among the development extras.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from operator import eq
from typing import Any

import httpx
from jsonschema import Draft202012Validator, FormatChecker
from serving import noria_server

MAX_TOKENS = 1000


def record(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all required, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(longest: int = 24, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest, **more}


def whole(low: int, high: int, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def listed(items: Any, low: int, high: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": record(value=whole(0, 99), children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})
    },
}
CHAIN = record(name=text(12), next={"anyOf": [{"type": "null"}, {"$ref": "#"}]})
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "nested": (
        "Describe a customer with an address.",
        record(
            name=text(),
            address=record(street=text(), city=text(), geo=record(lat=whole(-90, 90), lon=whole(-180, 180))),
            active={"type": "boolean"},
        ),
    ),
    "arrays": (
        "Give a matrix of small numbers and some tags.",
        record(matrix=listed(listed(whole(0, 9), 2, 3), 2, 3), tags=listed(text(10), 0, 4)),
    ),
    "enums": (
        "Classify this review: the food was cold but the staff were kind.",
        record(
            sentiment={"enum": ["positive", "negative", "mixed"]},
            stars={"enum": [1, 2, 3, 4, 5, None]},
            topics=listed({"enum": ["food", "staff", "price"]}, 1, 3),
        ),
    ),
    "recursive": ("Draw a small tree of numbers: a root with one child, which has no children.", TREE),
    "chain": ("Name three stations of a railway line, one after the other.", CHAIN),
    "any of": (
        "What is in the box?",
        record(
            content={"anyOf": [whole(0, 1000), text(16), record(kind={"const": "box"}, size=whole(1, 9))]},
            label={"type": ["string", "null"], "maxLength": 12},
        ),
    ),
    "discriminated": (
        "Describe a shape: a circle or a rectangle.",
        {
            "oneOf": [
                record(shape={"const": "circle"}, radius=whole(1, 99)),
                record(shape={"const": "rectangle"}, width=whole(1, 99), height=whole(1, 99)),
            ]
        },
    ),
    "unicode": (
        "Beschreibe ein Café in Zürich.",
        record(**{"größe": whole(1, 500), "名前": text(12), "🌊": {"type": "boolean"}, 'say "hi"\\': text(8)}),
    ),
    "patterns": (
        "Give a licence plate, a phone number and a semantic version.",
        record(
            plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
            phone={"type": "string", "pattern": r"^\+[0-9]{1,3} [0-9]{6,10}$"},
            version={"type": "string", "pattern": r"^[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}$"},
        ),
    ),
    "formats": (
        "Give an event: its id, its day, and the address of the machine.",
        record(
            id={"type": "string", "format": "uuid"},
            day={"type": "string", "format": "date"},
            host={"type": "string", "format": "ipv4"},
        ),
    ),
    "ranges": (
        "Roll some dice, and count in sevens.",
        record(
            die=whole(1, 6),
            below={"type": "integer", "exclusiveMinimum": -1000, "exclusiveMaximum": -17},
            sevens=whole(7, 700, multipleOf=7),
            share={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        ),
    ),
    "map": (
        "Count the fruit in the basket.",
        {
            "type": "object",
            "patternProperties": {"^[a-z]{2,8}$": whole(0, 99)},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 4,
        },
    ),
    "tuple": (
        "Give a measurement: a name, a value, whether it is good.",
        {
            "type": "array",
            "prefixItems": [text(12), whole(-50, 50), {"type": "boolean"}],
            "items": False,
            "minItems": 3,
        },
    ),
    "all of": (
        "Describe a book with its price.",
        {
            "allOf": [{"$ref": "#/$defs/titled"}, {"$ref": "#/$defs/priced"}],
            "$defs": {
                "titled": {"type": "object", "properties": {"title": text(30)}, "required": ["title"]},
                "priced": {
                    "type": "object",
                    "properties": {"title": True, "cents": whole(0, 100000), "currency": {"enum": ["EUR", "CHF"]}},
                    "required": ["cents", "currency"],
                    "additionalProperties": False,
                },
            },
        },
    ),
    "optional": (
        "Give whatever is known about the weather.",
        {
            "type": "object",
            "properties": {"sky": {"enum": ["clear", "cloudy"]}, "wind": whole(0, 40), "note": text(20)},
            "additionalProperties": False,
        },
    ),
}

# A small model goes on with these for ever, unless what it repeats becomes less likely.
ENDLESS = ("recursive", "chain")


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `name`: of its schema."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it."""

    text: str
    finish: str | None
    tokens: int


def make_cases(model: str, count: int) -> list[Case]:
    """Requests that go round the schemas, each time with another way to ask."""
    names = list(SCHEMAS)
    cases = []
    for index in range(count):
        name, turn = names[index % len(names)], index // len(names) + index % len(names)
        prompt, schema = SCHEMAS[name]
        body: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}
        if index % 2:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": index}
        if turn % 2:
            body["messages"] = [{"role": "user", "content": f"{prompt} Answer in JSON."}]
        else:
            body["prompt"] = f"{prompt}\nJSON:\n"
        if name in ENDLESS:
            body["frequency_penalty"] = 1.0
        if index % 3:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        else:
            body["structured_outputs"] = {"json": schema}
        cases.append(Case(name, "/v1/chat/completions" if turn % 2 else "/v1/completions", body))
    return cases


async def ask(client: httpx.AsyncClient, case: Case) -> Answer:
    """The whole answer."""
    response = await client.post(case.path, json=case.body)
    if response.status_code != 200:
        raise SystemExit(f"{case.name}: {response.status_code} {response.text}")
    made = response.json()
    choice = made["choices"][0]
    written = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(written, choice["finish_reason"], made["usage"]["completion_tokens"])


async def ask_streamed(client: httpx.AsyncClient, case: Case) -> Answer:
    """The answer, put together from its stream."""
    body = case.body | {"stream": True, "stream_options": {"include_usage": True}}
    written, finish, tokens = "", None, 0
    async with client.stream("POST", case.path, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(f"{case.name}: {chunk['error']}")
            for choice in chunk["choices"]:
                written += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                finish = choice["finish_reason"] or finish
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return Answer(written, finish, tokens)


def fault(case: Case, answer: Answer) -> str | None:
    """What is wrong with an answer by itself."""
    if answer.finish != "stop":
        return f"ended with {answer.finish}"
    try:
        value = json.loads(answer.text)
    except ValueError as error:
        return f"not JSON: {error}"
    validator = Draft202012Validator(SCHEMAS[case.name][1], format_checker=FormatChecker())
    errors = [error.message for error in validator.iter_errors(value)]
    return f"not valid: {errors[0]}" if errors else None


async def measure(url: str, cases: list[Case]) -> int:
    """Asks in three ways, prints what came, and returns how many faults there were."""
    limits = httpx.Limits(max_connections=len(cases))
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        start = time.perf_counter()
        together = await asyncio.gather(*(ask(client, case) for case in cases))
        middle = time.perf_counter()
        streamed = await asyncio.gather(*(ask_streamed(client, case) for case in cases))
        end = time.perf_counter()
        alone = [await ask(client, case) for case in cases]
        last = time.perf_counter()
    faults = []
    for case, answer, other, single in zip(cases, together, streamed, alone, strict=True):
        wrong = fault(case, answer)
        faults += [f"{case.name}: {wrong}: {answer.text[:200]!r}"] if wrong else []
        faults += [f"{case.name}: streamed differs: {other!r} from {answer!r}"] if other != answer else []
        faults += [f"{case.name}: alone differs: {single!r} from {answer!r}"] if single != answer else []
    for line in faults:
        print(line)
    valid = sum(fault(case, answer) is None for case, answer in zip(cases, together, strict=True))
    tokens = sum(answer.tokens for answer in together)
    print(f"{len(cases)} requests over {len({case.name for case in cases})} schemas, {tokens} tokens")
    print(f"ended: {dict(Counter(answer.finish for answer in together))}; valid against their schemas: {valid}")
    print(f"equal streamed: {sum(map(eq, together, streamed))}; equal alone: {sum(map(eq, together, alone))}")
    print(f"at once {middle - start:.2f} s, at once and streamed {end - middle:.2f} s, alone {last - end:.2f} s")
    return len(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="of a running server; otherwise one is started")
    parser.add_argument("--requests", type=int, default=32)
    args = parser.parse_args()
    cases = make_cases(args.model, args.requests)
    if args.url:
        faults = asyncio.run(measure(args.url, cases))
    else:
        with noria_server(args.model) as url:
            faults = asyncio.run(measure(url, cases))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
