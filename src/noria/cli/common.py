"""Settings to options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from noria.config import ENGINE_SETTINGS, EngineOptions, RuleOptions, ServerOptions, setting
from noria.errors import ConfigError
from noria.server.keys import hashed, make_keys
from noria.server.listen import certificate

# Settings of the HTTP side by the name of their flag, and the field of ServerOptions.
SERVER_SETTINGS: dict[str, str] = {
    "host": "host",
    "port": "port",
    "uds": "uds",
    "uds_permissions": "uds_permissions",
    "ssl_certfile": "ssl_certfile",
    "ssl_keyfile": "ssl_keyfile",
    "ssl_keyfile_password": "ssl_keyfile_password",
    "ssl_ca_certs": "ssl_ca_certs",
    "cors_allow_origins": "cors_allow_origins",
    "max_connections": "max_connections",
    "max_header_bytes": "max_header_bytes",
    "client_timeout": "client_timeout",
    "served_model_name": "served_model_name",
    "api_key": "api_keys",
    "api_key_file": "api_key_file",
    "max_body_bytes": "max_body_bytes",
    "chat_template": "chat_template",
    "trust_request_chat_template": "trust_request_chat_template",
    "tool_call_parser": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
    "log_level": "log_level",
    "log_format": "log_format",
    "drain_timeout": "drain_timeout",
    "strict_fields": "strict_fields",
    "grammar_timeout": "grammar_timeout",
    "enable_metrics": "metrics",
}


SECRET = ("api_key", "ssl_keyfile_password")
SEVERAL = ("api_key", "cors_allow_origins")


# What may stand at the top of a configuration file beside sections: names of flags, and settings that have none.
FLAT = ("model", *SERVER_SETTINGS, *(name for name in ENGINE_SETTINGS if name != "rules"))


def _field(name: str) -> msgspec.structs.FieldInfo:
    """Of the options struct that a setting belongs to; constants of the rules are called rules.NAME."""
    if name in SERVER_SETTINGS:
        owner: Any = ServerOptions
        field = SERVER_SETTINGS[name]
    elif name.startswith("rules."):
        owner, field = RuleOptions, name.removeprefix("rules.")
    else:
        part, field = ENGINE_SETTINGS[name]
        owner = next(known.type for known in msgspec.structs.fields(EngineOptions) if known.name == part)
    return next(known for known in msgspec.structs.fields(owner) if known.name == field)


def hint_of(name: str) -> Any:
    """The type of a setting, by the name of its flag."""
    return _field(name).type


def default_of(name: str) -> Any:
    """What a setting is if nothing sets it."""
    default = _field(name).default
    return not default if name == "static_batching" else default


def server_options(settings: Mapping[str, Any]) -> ServerOptions:
    """ServerOptions from settings named as the flags are. Raises ConfigError that names the flag."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        field = SERVER_SETTINGS[name]
        given = (value,) if name in SEVERAL and isinstance(value, str) else value
        values[field] = setting(ServerOptions, field, given, "--" + name.replace("_", "-"), name in SECRET)
    options = ServerOptions(**values)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"must be in 0…65535, got {options.port}", "--port")
    _check_connections(options)
    certificate(options)
    make_keys(options.api_keys, options.api_key_file)
    options = msgspec.structs.replace(options, api_keys=tuple(map(hashed, options.api_keys)))
    if options.max_body_bytes < 1024:
        raise ConfigError(f"must be at least 1024, got {options.max_body_bytes}", "--max-body-bytes")
    if not options.drain_timeout >= 0:
        raise ConfigError(f"must not be negative, got {options.drain_timeout}", "--drain-timeout")
    if not 0 < options.grammar_timeout <= 3600:
        raise ConfigError(f"must be in (0, 3600], got {options.grammar_timeout}", "--grammar-timeout")
    return options


def _check_connections(options: ServerOptions) -> None:
    if not re.fullmatch(r"0?[0-7]{3}", options.uds_permissions):
        raise ConfigError(f"must be octal, such as 600 or 660, got {options.uds_permissions!r}", "--uds-permissions")
    if not 1 <= options.max_connections <= 1_000_000:
        raise ConfigError(f"must be in 1…1000000, got {options.max_connections}", "--max-connections")
    if not 1024 <= options.max_header_bytes <= 1 << 20:
        raise ConfigError(f"must be in 1024…{1 << 20}, got {options.max_header_bytes}", "--max-header-bytes")
    if not 0 < options.client_timeout <= 3600:
        raise ConfigError(f"must be in (0, 3600], got {options.client_timeout}", "--client-timeout")
    for origin in options.cors_allow_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
            raise ConfigError(f"must be * or like https://example.com, got {origin!r}", "--cors-allow-origins")


def engine_options(**parts: dict[str, Any]) -> EngineOptions:
    """EngineOptions from the fields of its parts. Raises ConfigError for a value that is none of those allowed."""
    try:
        return msgspec.convert(parts, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def positive_numbers(text: str, flag: str) -> list[int]:
    """ "1,8,100" → [1, 8, 100]; "0" → []. Raises ConfigError that names the flag."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if numbers == [0]:
        return []
    if min(numbers) < 1:
        raise ConfigError(f"must be positive numbers separated by commas, got {text!r}", flag)
    return numbers
