"""The JSON schema of a configuration file, from the tables of flags and keys: for editors that complete and check."""

from __future__ import annotations

from typing import Any

import msgspec

from noria.cli.common import FLAT, SEVERAL, default_of, hint_of
from noria.cli.flags import ENGINE_FLAGS, SERVER_FLAGS
from noria.cli.keys import Key
from noria.cli.sections import KEYS, SECTIONS

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """The schema, draft 2020-12. Names of flags are allowed with dashes too."""
    properties: dict[str, Any] = {name: _flag(name) for name in FLAT}
    for section, text in SECTIONS.items():
        _object_at(properties, section)["description"] = text
    for key in KEYS.values():
        section, _, name = key.path.rpartition(".")
        _object_at(properties, section)["properties"][name] = _key(key)
    for name in FLAT:
        if "_" in name:
            properties[name.replace("_", "-")] = {"$ref": f"#/properties/{name}"}
    return {
        "$schema": _DRAFT,
        "title": "Configuration of noria serve",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }


def _object_at(properties: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of a section, made where it is missing."""
    found: dict[str, Any] = {}
    for part in path.split("."):
        found = properties.setdefault(
            part, {"type": ["object", "null"], "additionalProperties": False, "properties": {}}
        )
        properties = found["properties"]
    return found


def _flag(name: str) -> dict[str, Any]:
    if name == "model":
        return {"type": "string", "description": "The same as the argument MODEL."}
    (made,), _ = msgspec.json.schema_components([hint_of(name)])
    if name in SEVERAL:
        made = {"anyOf": [{"type": "string"}, made]}
    helps = {flag.name: flag.help for flag in (*SERVER_FLAGS, *ENGINE_FLAGS)}
    text = {"description": helps[name]} if name in helps else {}
    return made | text | {"default": msgspec.to_builtins(default_of(name))}


def _key(key: Key) -> dict[str, Any]:
    made: dict[str, Any] = {"description": key.text}
    if key.choices:
        made["enum"] = list(key.choices)
    elif key.missing:
        made["const"] = key.default
    else:
        made["type"] = [_TYPES[key.kind], "null"] if key.optional else _TYPES[key.kind]
    if key.span is not None:
        made["exclusiveMinimum" if key.span.open_low else "minimum"] = key.kind(key.span.low)
        made["exclusiveMaximum" if key.span.open_high else "maximum"] = key.kind(key.span.high)
    return made | {"default": key_default(key)}


def key_default(key: Key) -> Any:
    """What holds where a key is left out."""
    return key.from_setting(default_of(key.setting)) if key.setting else key.default
