"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
import re

import msgspec
from starlette.responses import Response

from noria.errors import EngineError, InvalidRequestError, NotFoundError, RequestError

_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
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
        return error.status, ErrorReply(ErrorBody(error.message, error.type, error.param, code))
    message = str(error) if isinstance(error, EngineError) else "internal error; the server's log has the details"
    return 500, ErrorReply(ErrorBody(message, "internal_server_error", None, "internal_error"))


def error_response(error: Exception) -> Response:
    """The reply to a request that failed."""
    status, body = describe(error)
    headers: dict[str, str] = {}
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(math.ceil(retry_after))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def from_decoding(error: msgspec.DecodeError) -> InvalidRequestError:
    """A request's body that is not JSON, or not of the right types; names the field."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequestError(f"the body is not valid JSON: {text}")
    found = _PATH.search(text)
    path = found.group("path").removeprefix("$").removeprefix(".") if found else ""
    what = text[: found.start()] if found else text
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing.group('field')}" if path else missing.group("field")
        return InvalidRequestError(f"{path} is required", path)
    what = what[:1].lower() + what[1:]
    return InvalidRequestError(f"{path}: {what}" if path else f"the body: {what}", path or None)
