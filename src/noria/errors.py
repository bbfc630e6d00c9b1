"""Every error that Noria raises on purpose.

NoriaError
├── ConfigError              a flag, a configuration key or an argument that cannot work; names it and the remedy
├── ModelError               a checkpoint that cannot be loaded
│   ├── UnsupportedModelError    an architecture, tensor type or scaling that Noria does not run
│   ├── WeightsError             tensors missing, superfluous or of the wrong shape; a damaged file
│   ├── TokenizerError           a tokeniser that cannot be made from the files
│   └── PullError                a model that cannot be found or downloaded
├── GrammarError             a grammar that cannot be compiled or followed
├── BackendError             a kernel refused its input (always our own bug)
├── EngineError              the engine process died or cannot be reached
└── RequestError             a request that is refused; carries the HTTP status
    ├── InvalidRequestError      400: a field is wrong; names field, value and range
    ├── TemplateError            400: the chat template refused the messages, in the template's own words
    ├── AuthenticationError      401
    ├── NotFoundError            404
    ├── TooLargeError            413
    ├── QueueFullError           429, with seconds to wait
    ├── RateLimitError           429, with seconds to wait
    ├── OverloadedError          429: it would miss an objective of the server; with seconds to wait
    └── UnavailableError         503, with seconds to wait
"""

from __future__ import annotations


class NoriaError(Exception):
    """Root of all errors raised on purpose. `str(error)` is fit for a user to read."""


class ConfigError(NoriaError):
    """A flag, configuration key or argument that cannot work.

    Args:
        message: what is wrong and what to do.
        field: the flag or key, as the user wrote it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class ModelError(NoriaError):
    """A checkpoint that cannot be loaded."""


class UnsupportedModelError(ModelError):
    """An architecture, tensor type or RoPE scaling that Noria does not run."""


class WeightsError(ModelError):
    """Tensors missing, superfluous or of the wrong shape, or a damaged file."""


class TokenizerError(ModelError):
    """A tokeniser or chat template that cannot be made from the model's files."""


class PullError(ModelError):
    """A model that cannot be found or downloaded."""


class GrammarError(NoriaError):
    """A grammar that cannot be compiled, or that an output cannot follow within its limits."""


class BackendError(NoriaError):
    """A kernel refused its input. Always a defect of Noria, never of the request."""


class EngineError(NoriaError):
    """The engine process died or cannot be reached."""


class RequestError(NoriaError):
    """A request that is refused.

    Attributes:
        status: HTTP status.
        type: the `type` of an OpenAI error object.
        param: the request field at fault, as the client wrote it.
        retry_after: seconds after which trying again makes sense.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequestError(RequestError):
    """400: a field is wrong."""


class TemplateError(RequestError):
    """400: the chat template refused the messages."""


class AuthenticationError(RequestError):
    """401: no API key, or a wrong one."""

    status = 401
    type = "authentication_error"


class NotFoundError(RequestError):
    """404: no such model or path."""

    status = 404
    type = "not_found_error"


class TooLargeError(RequestError):
    """413: the request's body is over the limit."""

    status = 413


class QueueFullError(RequestError):
    """429: the queue of waiting requests is full."""

    status = 429
    type = "rate_limit_error"


class RateLimitError(RequestError):
    """429: an API key has used up what it may use in a minute."""

    status = 429
    type = "rate_limit_error"


class OverloadedError(RequestError):
    """429: the server has so much to do that the answer would miss its objective (`--admission slo`)."""

    status = 429
    type = "rate_limit_error"


class UnavailableError(RequestError):
    """503: the server is starting, draining or without an engine."""

    status = 503
    type = "service_unavailable_error"
