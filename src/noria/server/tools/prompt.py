"""Conversations with tools for templates that know none: functions are described in the system message, calls and
their results are told as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from noria.server.tools.formats import CallFormat
from noria.server.tools.request import ToolUse

_INTRODUCTION = "You can call functions. These are described here, one in each line, as JSON:"
_HOW = (
    "To call a function, answer with this and nothing else, with the function's name and its arguments put in:",
    "Several functions are called by writing several of these. If no function helps, answer in plain words.",
)


def told(
    messages: Sequence[Mapping[str, Any]], use: ToolUse | None, form: CallFormat, takes_system: bool
) -> list[dict[str, Any]]:
    """The conversation without anything that a template without tools would not show.

    Args:
        use: the functions to describe, if any. form: how they are to be called.
        takes_system: the template knows system messages.
    """
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        entry = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        calls = message.get("tool_calls") or ()
        names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        if calls:
            written = form.write([(call["function"]["name"], _json(call["function"]["arguments"])) for call in calls])
            entry["content"] = f"{entry['content']}\n{written}" if entry["content"] else written
        if entry["role"] == "tool":
            own = entry.pop("name", None)
            name = names.get(message["tool_call_id"], own) if "tool_call_id" in message else own
            entry = {"role": "user", "content": _result(name, entry["content"]), "told": True}
        _append(made, entry)
    if use is not None:
        _describe(made, use, form, takes_system)
    return [{key: value for key, value in entry.items() if key != "told"} for entry in made]


def _append(made: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """Results, and what the user says after them, are one message: many templates want turns to alternate."""
    if made and made[-1].get("told") and entry["role"] == "user":
        made[-1]["content"] += f"\n\n{entry['content']}"
    else:
        made.append(entry)


def _describe(made: list[dict[str, Any]], use: ToolUse, form: CallFormat, takes_system: bool) -> None:
    functions = "\n".join(_json(tool["function"]) for tool in use.described())
    example = form.write([("FUNCTION", '{"ARGUMENT": VALUE}')])
    text = f"{_INTRODUCTION}\n{functions}\n\n{_HOW[0]}\n{example}\n{_HOW[1]}"
    if made and made[0]["role"] == "system":
        made[0] = {**made[0], "content": f"{made[0]['content']}\n\n{text}"}
    elif takes_system or not made or made[0]["role"] != "user":
        made.insert(0, {"role": "system", "content": text})
    else:
        made[0] = {**made[0], "content": f"{text}\n\n{made[0]['content']}"}


def _result(name: str | None, content: str) -> str:
    return f"Result of the function {name}:\n{content}" if name else f"Result of the function:\n{content}"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
