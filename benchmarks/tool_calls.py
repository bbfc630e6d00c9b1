"""Fifty prompts, each with functions that must be called, against a running `noria serve`: every answer is read as
calls, all arguments are valid against their function's schema, and what is streamed equals what is not.

python benchmarks/tool_calls.py --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
from serving import noria_server

Schema = dict[str, Any]


def function(name: str, does: str, properties: Schema, *optional: str, **more: Any) -> Schema:
    """A function whose arguments are all required but for the `optional` ones."""
    required = [key for key in properties if key not in optional]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, "description": does, "parameters": schema | more, "strict": True}


def text(longest: int = 40) -> Schema:
    return {"type": "string", "maxLength": longest}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def several(item: Schema, most: int = 4) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


_DATE = {"type": "string", "format": "date"}
_POINT = {
    "type": "object",
    "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}, "lon": {"type": "number"}},
    "required": ["lat", "lon"],
    "additionalProperties": False,
}


def node(**properties: Schema) -> Schema:
    inner = {"label": text(12), **properties}
    return {"type": "object", "properties": inner, "required": ["label"], "additionalProperties": False}


def children(of: str) -> Schema:
    return {"type": "array", "items": {"$ref": f"#/$defs/{of}"}, "maxItems": 2}


# A model that cannot stop would go down forever in a schema that refers to itself.
_TREE = {
    "$defs": {"node": node(children=children("twig")), "twig": node(children=children("leaf")), "leaf": node()},
}
FUNCTIONS = [
    function("get_weather", "The weather in a city.", {"city": text(), "unit": {"enum": ["celsius", "fahrenheit"]}}),
    function("add_numbers", "Adds numbers.", {"numbers": several({"type": "number"})}),
    function("send_mail", "Sends a mail.", {"to": several(text(30), 2), "subject": text(), "body": text(80)}, "body"),
    function("book_table", "Books a table.", {"restaurant": text(), "people": whole(1, 12), "day": _DATE}),
    function("find_route", "A way between places.", {"start": _POINT, "end": _POINT, "by": {"enum": ["car", "bike"]}}),
    function("set_timer", "Sets a timer.", {"minutes": whole(1, 180), "label": {"type": ["string", "null"]}}, "label"),
    function("translate", "Translates.", {"text": text(60), "to": {"type": "string", "pattern": "^[a-z]{2}$"}}),
    function(
        "paint",
        "Paints a shape.",
        {"shape": {"anyOf": [{"const": "circle"}, {"const": "square"}]}, "size": whole(1, 9)},
    ),
    function("make_tree", "Makes a tree.", {"root": {"$ref": "#/$defs/node"}}, **_TREE),
    function("look_up", "Looks up a word – größer, 水車, 🌊.", {"word": text(20), "größe": {"type": "boolean"}}),
    function(
        "tag",
        "Tags a file.",
        {"path": text(30), "tags": {"type": "object", "additionalProperties": text(8), "maxProperties": 2}},
    ),
    {"name": "now", "description": "The time."},
]
_ASKED = (
    "What is the weather in Paris?",
    "Add 3, 4 and 5.5 for me.",
    "Tell Ann that the meeting is at noon.",
    "We are four and want pizza on Friday.",
    "How do I get from the station to the lake?",
    "Wake me in 20 minutes.",
    'How do you say "good morning" in Spanish?',
    "Draw something round, but not too large.",
    "Sketch the parts of a bicycle as a tree.",
    'What does "noria" mean?',
    'Mark my notes as "{urgent}" and "done]".',
    "What time is it?",
)
_WISHES = ("", " Be exact.", " Quickly, please!", " Antworte kurz.", " 谢谢 🌊")


@dataclass(frozen=True)
class Case:
    """A request that must be answered with calls."""

    body: dict[str, Any]

    @property
    def schemas(self) -> dict[str, Schema]:
        empty = {"type": "object", "properties": {}, "additionalProperties": False}
        return {tool["function"]["name"]: tool["function"].get("parameters", empty) for tool in self.body["tools"]}


def cases(model: str, count: int) -> list[Case]:
    """Named and required in turns, one call at most or several, greedy and with a seed."""
    made = []
    for index in range(count):
        first = index % len(FUNCTIONS)
        choice: Any = "required"
        offered = [FUNCTIONS[(first + step) % len(FUNCTIONS)] for step in range(1 + index % 4)]
        if index % 2:
            choice = {"type": "function", "function": {"name": offered[0]["name"]}}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": _ASKED[first] + _WISHES[index % len(_WISHES)]}],
            "tools": [{"type": "function", "function": one} for one in offered],
            "tool_choice": choice,
            "parallel_tool_calls": index % 8 == 0,
            "max_tokens": 4000 if index % 8 == 0 else 1000,
        }
        made.append(Case(body | ({"temperature": 0} if index % 4 < 2 else {"temperature": 0.9, "seed": index})))
    return made


def read_whole(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without the ids of its calls."""
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return {"content": message["content"], "calls": calls, "finish": choice["finish_reason"]}


def read_stream(lines: list[str]) -> dict[str, Any]:
    """The same of a streamed one."""
    made: dict[str, Any] = {"content": None, "calls": [], "finish": None}
    for line in lines:
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        delta = choice["delta"]
        if delta.get("content") is not None:
            made["content"] = (made["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                made["calls"].append((call["function"]["name"], ""))
            name, arguments = made["calls"][call["index"]]
            made["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
        made["finish"] = choice["finish_reason"] or made["finish"]
    return made


def fault(case: Case, made: dict[str, Any]) -> str | None:
    """What is wrong with an answer."""
    if made["finish"] != "tool_calls" or made["content"] is not None or not made["calls"]:
        return f"no calls, or more than calls: {made}"
    named = case.body["tool_choice"] != "required"
    if len(made["calls"]) > 1 and (named or not case.body["parallel_tool_calls"]):
        return f"more than one call: {made}"
    for name, arguments in made["calls"]:
        if name not in case.schemas or (named and name != case.body["tool_choice"]["function"]["name"]):
            return f"{name} was not asked for"
        try:
            jsonschema.validate(json.loads(arguments), case.schemas[name], jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{name}({arguments}): {error}"
    return None


async def try_case(client: httpx.AsyncClient, case: Case) -> tuple[str | None, bool, int]:
    """What is wrong with the answer, whether the streamed one equals it, and its calls."""
    reply = await client.post("/v1/chat/completions", json=case.body)
    if reply.status_code != 200:
        return f"{reply.status_code}: {reply.text}", False, 0
    made = read_whole(reply.json()["choices"][0])
    async with client.stream("POST", "/v1/chat/completions", json=case.body | {"stream": True}) as stream:
        streamed = read_stream([line async for line in stream.aiter_lines()])
    return fault(case, made), streamed == made, len(made["calls"])


async def run(url: str, model: str, count: int) -> bool:
    """All cases at once; prints what came of them."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:
        results = await asyncio.gather(*(try_case(client, case) for case in cases(model, count)))
    faults = [wrong for wrong, _, _ in results if wrong]
    equal = sum(same for _, same, _ in results)
    print(
        f"{count - len(faults)} of {count} answers are calls with valid arguments, {sum(n for *_, n in results)} calls"
    )
    print(f"{equal} of {count} are the same when streamed")
    for wrong in faults:
        print(f"  {wrong[:600]}")
    return not faults and equal == count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--url", help="of a server that runs already, without /v1")
    args = parser.parse_args()
    if args.url:
        good = asyncio.run(run(args.url, args.model, args.count))
    else:
        with noria_server(args.model) as url:
            good = asyncio.run(run(url, args.model, args.count))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
