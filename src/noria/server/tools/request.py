"""What a request says of tools: checked, and in the forms that templates, grammars and parsers take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from noria.errors import InvalidRequestError
from noria.frontend.template import parsed_arguments
from noria.server.fields import about

MAX_TOOLS = 128
MAX_TOOL_BYTES = 160 * 1024  # of all functions of a request together, as JSON
MAX_CALLS = 128  # in one message
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("auto", "none", "required")
_USUAL = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'


class Function(msgspec.Struct, kw_only=True):
    """`tools[].function`: what the model may call."""

    name: Annotated[str, about("what it is called", range="1 to 64 letters, digits, underscores and dashes")]
    description: Annotated[str | None, about("what it does, for the model")] = None
    parameters: Annotated[
        dict[str, Any] | None, about("a JSON schema of an object", default="it takes no arguments")
    ] = None
    strict: Annotated[bool | None, about("arguments surely match the schema", default="false")] = None


class Tool(msgspec.Struct, kw_only=True):
    """`tools[]`: one of them."""

    type: Annotated[str, about("its kind", range='`"function"`')]
    function: Annotated[Function | None, about("the function")] = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may or must call.

    Attributes:
        functions: those that are offered.
        mode: `named`: exactly one call, of the only function.
        parallel: there may be several calls in one answer.
    """

    functions: tuple[Function, ...]
    mode: Literal["auto", "required", "named"] = "auto"
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Of the functions."""
        return frozenset(function.name for function in self.functions)

    @property
    def must(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode != "auto"

    @property
    def binds(self) -> bool:
        """Whether not every answer will do: there must be a call, or the arguments of one must match."""
        return self.must or any(function.strict for function in self.functions)

    @property
    def limit(self) -> int | None:
        """Most calls in an answer; None: any number."""
        return 1 if self.mode == "named" or not self.parallel else None

    def described(self) -> list[dict[str, Any]]:
        """The tools as chat templates show them to the model."""
        return [{"type": "function", "function": _described(function)} for function in self.functions]


# Keywords beside `properties` by which a schema may name further arguments.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")


def schema_of(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments, certainly of an object.

    One that lists arguments and says nothing of others gets no others: hardly a function takes arguments that it never
    named, and a small model makes some up where it may.
    """
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **function.parameters}
    if "properties" in schema and not any(keyword in schema for keyword in _OPEN):
        schema["additionalProperties"] = False
    return schema


def _described(function: Function) -> dict[str, Any]:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return described


def tool_use(tools: list[Tool] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """What a request lets the model call; None: nothing. Raises InvalidRequestError that names the field."""
    functions = _functions(tools or [])
    if choice is None:
        choice = "auto"
    if choice not in _CHOICES and not isinstance(choice, Mapping):
        raise InvalidRequestError(f"tool_choice {_USUAL}", "tool_choice")
    if not functions and choice in ("auto", "none"):
        return None
    if not functions:
        raise InvalidRequestError("tool_choice: there is nothing to choose; give tools", "tool_choice")
    several = parallel is not False
    if choice == "none":
        return None
    if not isinstance(choice, Mapping):
        return ToolUse(functions, "required" if choice == "required" else "auto", several)
    if choice.get("type") == "allowed_tools":
        return _allowed(functions, choice.get("allowed_tools"), several)
    return ToolUse((_named(functions, choice),), "named", several)


def _functions(tools: list[Tool]) -> tuple[Function, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools: at most {MAX_TOOLS} are possible, got {len(tools)}", "tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise InvalidRequestError(f"{where}.type: only function is served, got {tool.type[:100]!r}", where)
        if tool.function is None:
            raise InvalidRequestError(f"{where}.function is required", where)
        _check(tool.function, f"{where}.function")
        if tool.function.name in functions:
            raise InvalidRequestError(f"{where}.function.name: {tool.function.name!r} is there already", where)
        functions[tool.function.name] = tool.function
    size = len(msgspec.json.encode(list(functions.values())))
    if size > MAX_TOOL_BYTES:
        raise InvalidRequestError(f"tools: {size} bytes; at most {MAX_TOOL_BYTES} are possible", "tools")
    return tuple(functions.values())


def _check(function: Function, where: str) -> None:
    if not _NAME.fullmatch(function.name):
        allowed = "1 to 64 letters, digits, underscores and dashes"
        raise InvalidRequestError(f"{where}.name must have {allowed}, got {function.name[:100]!r}", f"{where}.name")
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        message = f"{where}.parameters: must be a schema of an object, got one of type {str(kind)[:100]!r}"
        raise InvalidRequestError(message, f"{where}.parameters")


def _named(functions: tuple[Function, ...], choice: Mapping[str, Any]) -> Function:
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidRequestError(f"tool_choice {_USUAL}", "tool_choice")
    for function in functions:
        if function.name == name:
            return function
    raise InvalidRequestError(f"tool_choice: no function in tools is called {name[:100]!r}", "tool_choice")


def _allowed(functions: tuple[Function, ...], allowed: Any, several: bool) -> ToolUse:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not 0 < len(listed) <= MAX_TOOLS:
        message = f"tool_choice.allowed_tools must have a mode, auto or required, and 1 to {MAX_TOOLS} tools"
        raise InvalidRequestError(message, "tool_choice")
    names = {_named(functions, entry if isinstance(entry, Mapping) else {}).name for entry in listed}
    kept = tuple(function for function in functions if function.name in names)
    return ToolUse(kept, "required" if mode == "required" else "auto", several)


def check_calls(calls: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The calls of an earlier message, with arguments as objects, as templates show them."""
    if len(calls) > MAX_CALLS:
        raise InvalidRequestError(f"{where}: at most {MAX_CALLS} are possible, got {len(calls)}", where)
    return [_earlier(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _earlier(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}: must be the call of a function", where)
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function.name is required, a string", f"{where}.function.name")
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequestError(f"{where}.id: expected a string", f"{where}.id")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | Mapping):
        field = f"{where}.function.arguments"
        raise InvalidRequestError(f"{field}: expected JSON in a string", field)
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
