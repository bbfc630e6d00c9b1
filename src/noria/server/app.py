"""The application: routes, and one place where errors become replies."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from noria.errors import NotFoundError, RequestError
from noria.observe.logging import get_logger
from noria.server import debug, pages
from noria.server.access import LIMIT_HEADERS, LIMITS, ApiKeys
from noria.server.chat import create_chat_completion
from noria.server.completions import create_completion
from noria.server.errors import describe, error_response
from noria.server.state import ClientGoneError, ServerState

log = get_logger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]
# Headers that scripts of another origin may read.
EXPOSED = (
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{what}-{kind}" for what in LIMIT_HEADERS for kind in LIMITS),
)
CLIENT_GONE = 499  # nobody will read it; the number that the field logs


def create_app(state: ServerState) -> Starlette:
    """The ASGI application of one served model."""
    routes = [
        _route("/v1/models", pages.list_models, "GET"),
        _route("/v1/models/{model:path}", pages.get_model, "GET"),
        _route("/v1/completions", create_completion, "POST"),
        _route("/v1/chat/completions", create_chat_completion, "POST"),
        _route("/tokenize", pages.tokenize, "POST"),
        _route("/detokenize", pages.detokenize, "POST"),
        _route("/tokenizer_info", pages.tokenizer_info, "GET"),
        _route("/health", pages.health, "GET"),
        _route("/ready", pages.ready, "GET"),
        _route("/metrics", pages.metrics, "GET"),
        _route("/version", pages.version, "GET"),
        _route("/openapi.json", pages.openapi, "GET"),
        _route("/debug/requests", debug.list_requests, "GET"),
        _route("/debug/requests/{id}", debug.explain_request, "GET"),
        _route("/debug/pacer", debug.explain_pacer, "GET"),
    ]
    app = Starlette(
        routes=routes,
        middleware=_middleware(state),
        exception_handlers={HTTPException: _http_error},
    )
    app.state.noria = state
    return app


def _middleware(state: ServerState) -> list[Middleware]:
    inner = [Middleware(TrailingSlashes), Middleware(ApiKeys, access=state.access, refused=state.metrics.refused)]
    if not state.options.cors_allow_origins:
        return inner
    # Outside: a browser asks what it may do before it sends a key.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=state.options.cors_allow_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=EXPOSED,
    )
    return [cors, *inner]


class TrailingSlashes:
    """ASGI middleware: a path with slashes at its end is the one without. (A redirect would lose a POST's body in many
    clients, and names a host that a proxy's clients may not reach.)"""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and len(scope["path"]) > 1:
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


def _route(path: str, endpoint: Endpoint, method: str) -> Route:
    return Route(path, _guarded(endpoint), methods=[method])


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Turns whatever an endpoint raises into a reply to that request alone."""

    @functools.wraps(endpoint)
    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except RequestError as error:
            request.app.state.noria.metrics.refused(error.status)
            log.debug("%s %s: %d %s", request.method, request.url.path, error.status, error)
            return error_response(error)
        except Exception as error:
            request.app.state.noria.metrics.refused(500)
            log.exception("%s %s failed", request.method, request.url.path)
            return error_response(error)

    return call


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    status = error.status_code if isinstance(error, HTTPException) else describe(error)[0]
    path = request.url.path[:200]
    if status == 404:
        return error_response(NotFoundError(f"there is no {path} here"))
    refusal = RequestError(f"{request.method} is not possible on {path}" if status == 405 else f"refused: {status}")
    refusal.status = status
    response = error_response(refusal)
    response.headers.update(getattr(error, "headers", None) or {})
    return response
