"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from starlette.responses import Response

from noria.errors import (
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RateLimitError,
    RequestError,
)
from noria.server.fields import allowed, shorten, type_at, value_at

_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
_PLACE = re.compile(r"\(byte (\d+)\)$")
_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]:]')
_LOOK_AT = 1 << 16  # bytes of a body that are looked through for the field in which JSON went wrong
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")


class ErrorBody(msgspec.Struct):
    """The inside of an error reply."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorReply(msgspec.Struct):
    """An error reply."""

    error: ErrorBody


_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    413: "request_too_large",
    429: "queue_full",
    503: "service_unavailable",
}


def describe(error: Exception) -> tuple[int, ErrorReply]:
    """HTTP status and body of an error. What was not raised on purpose is 500 and keeps its details to the log."""
    if isinstance(error, RequestError):
        code = _CODES.get(error.status)
        if isinstance(error, NotFoundError) and error.param == "model":
            code = "model_not_found"
        elif isinstance(error, RateLimitError):
            code = "rate_limit_exceeded"
        elif isinstance(error, OverloadedError):
            code = "slo_unreachable"
        return error.status, ErrorReply(ErrorBody(error.message, error.type, error.param, code))
    message = str(error) if isinstance(error, EngineError) else "internal error; the server's log has the details"
    return 500, ErrorReply(ErrorBody(message, "internal_server_error", None, "internal_error"))


def error_response(error: Exception) -> Response:
    """The reply to a request that failed."""
    status, body = describe(error)
    headers: dict[str, str] = {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        # The first is the standard's, in whole seconds; the second is exact, and OpenAI's clients prefer it.
        headers["retry-after"] = str(max(1, math.ceil(retry_after)))
        headers["retry-after-ms"] = str(math.ceil(retry_after * 1000))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def from_decoding(error: msgspec.DecodeError, body: bytes | bytearray = b"", struct: Any = None) -> InvalidRequestError:
    """A request's body that is not JSON, or not of the right types; names the field.

    Args:
        body: what was decoded, so that the message can quote the value.
        struct: what it was to become, so that the message can say what is possible.
    """
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        place = _PLACE.search(text)
        field = _last_field(body, int(place.group(1))) if place else None
        where = f"{field}: " if field else ""
        return InvalidRequestError(f"{where}the body is not valid JSON: {text}", field)
    found = _PATH.search(text)
    path = found.group("path").removeprefix("$").removeprefix(".") if found else ""
    what = text[: found.start()] if found else text
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing.group('field')}" if path else missing.group("field")
        return InvalidRequestError(f"{path} is required", path)
    written = value_at(body, path) if path else None
    kind = type_at(struct, path) if path and struct is not None else None
    field = path.partition("[...]")[0] or None
    if kind is None:
        what = what[:1].lower() + what[1:]
        return InvalidRequestError(f"{path or 'the body'}: {what}", field)
    got = "" if written is None else f", got {shorten(written)}"
    return InvalidRequestError(f"{path} must be {allowed(kind)}{got}", field)


def _last_field(body: bytes | bytearray, place: int) -> str | None:
    """The field that the JSON was in when it went wrong, as with `NaN`; None if it is far into the body."""
    if place > _LOOK_AT:
        return None
    depth, name, said = 0, None, ""
    for found in _MARKS.finditer(body[:place]):
        mark = found.group()
        if mark[:1] == b'"':
            said = mark[1:-1].decode("utf-8", "replace")
        elif mark == b":":
            name = said if depth == 1 else name
        else:
            depth += 1 if mark in b"{[" else -1
    return name
