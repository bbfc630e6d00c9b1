"""Who may come in, and how often: keys, rates, and what each key has used.

Knows keys only as digests. Knows nothing of what requests want.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.config import ServerOptions
from noria.errors import AuthenticationError, ConfigError, InvalidRequestError, RateLimitError
from noria.frontend.client import Tenant
from noria.observe.logging import get_logger
from noria.server.errors import error_response
from noria.server.keys import Key, make_keys, warn_if_readable

log = get_logger(__name__)
OPEN = frozenset({"/health", "/ready"})  # orchestrators ask without a key, and learn nothing else

LIMITS = ("requests", "tokens")
LIMIT_HEADERS = ("limit", "remaining", "reset")


class Bucket:
    """A rate: so many per minute, all of which may come at once after a minute of rest.

    What is used is taken when it is known, so that it may owe for a while; nothing is admitted until that is paid.
    """

    __slots__ = ("_at", "_clock", "_level", "size")

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = size
        self._clock = clock
        self._level = float(size)
        self._at = clock()

    @property
    def level(self) -> float:
        """How many may be used now; negative: owed."""
        now = self._clock()
        self._level = min(float(self.size), self._level + (now - self._at) * self.size / 60.0)
        self._at = now
        return self._level

    def wait(self, count: float) -> float:
        """Seconds until `count` can be used; 0 if they can be now."""
        return max(0.0, (count - self.level) * 60.0 / self.size)

    def use(self, count: float) -> None:
        """`count` are used."""
        self._level = self.level - count

    def resized(self, size: int) -> Bucket:
        """The same at another rate: what was used stays used, but a lower rate makes no debt."""
        made, level = Bucket(size, self._clock), self.level
        made._level = max(level + size - self.size, min(0.0, level))
        return made


@dataclass(slots=True)
class Caller:
    """Whoever holds one key, or all who come if there are none.

    Attributes:
        salt: keeps prefix blocks of different keys apart.
        requests, tokens: limits, if any.
        admitted, prompt_tokens, generated, limited: what was counted since the start.
    """

    name: str = ""
    salt: str = ""
    share: float = 1.0
    requests: Bucket | None = None
    tokens: Bucket | None = None
    admitted: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    limited: dict[str, int] = field(default_factory=lambda: {"requests": 0, "tokens": 0})

    @property
    def tenant(self) -> Tenant:
        """For the engine."""
        return Tenant(self.name, self.share, self.spend)

    def admit(self) -> None:
        """Counts a request. Raises RateLimitError if there were too many, or too many tokens."""
        if self.tokens is not None and (wait := self.tokens.wait(1.0)):
            raise self._limit("tokens", self.tokens, wait)
        if self.requests is not None:
            if wait := self.requests.wait(1.0):
                raise self._limit("requests", self.requests, wait)
            self.requests.use(1.0)
        self.admitted += 1

    def take_prompt(self, tokens: int) -> None:
        """Counts a request's prompt.

        Raises:
            InvalidRequestError: it is longer than can ever be used.
            RateLimitError: it is longer than can be used now.
        """
        if self.tokens is not None:
            if tokens > self.tokens.size:
                raise InvalidRequestError(
                    f"the prompt has {tokens} tokens; key {self.name!r} may use {self.tokens.size} per minute,"
                    " prompts and answers together: send less at once"
                )
            if wait := self.tokens.wait(float(tokens)):
                raise self._limit("tokens", self.tokens, wait)
            self.tokens.use(float(tokens))
        self.prompt_tokens += tokens

    def give_back(self, tokens: int) -> None:
        """A prompt was counted, and then not answered because the server had too much to do."""
        if self.tokens is not None:
            self.tokens.use(-float(tokens))

    def spend(self, tokens: int) -> None:
        """Counts tokens that were generated."""
        self.generated += tokens
        if self.tokens is not None:
            self.tokens.use(float(tokens))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What a reply says of the limits."""
        return [
            pair
            for kind, bucket in (("requests", self.requests), ("tokens", self.tokens))
            if bucket is not None
            for pair in _headers(kind, bucket)
        ]

    def _limit(self, kind: str, bucket: Bucket, wait: float) -> RateLimitError:
        self.limited[kind] += 1
        message = f"key {self.name!r} may use {bucket.size} {kind} per minute; try again in {duration(wait)}"
        return RateLimitError(message, retry_after=wait)


def _headers(kind: str, bucket: Bucket) -> list[tuple[bytes, bytes]]:
    values = (bucket.size, max(0, math.floor(bucket.level)), duration(bucket.wait(float(bucket.size))))
    names = (f"x-ratelimit-{name}-{kind}" for name in LIMIT_HEADERS)
    return [(name.encode(), str(value).encode()) for name, value in zip(names, values, strict=True)]


def duration(seconds: float) -> str:
    """As OpenAI writes it: `250ms`, `1.5s`, `6m0s`. Rounded up, so that waiting for it is enough."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:g}s"
    return f"{minutes}m{shown}" if minutes else shown


class Access:
    """All keys. None: open to all.

    Raises:
        ConfigError: a key, or the file of keys, is wrong.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._anybody = Caller()
        self._callers: dict[bytes, Caller] = {}  # by digest
        self._reloads = 0
        self._take(make_keys(options.api_keys, options.api_key_file))
        self._check_file()

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return not self._callers

    @property
    def callers(self) -> list[Caller]:
        """Those with a key."""
        return list(self._callers.values())

    async def reload(self) -> None:
        """Reads the file of keys again, in a thread: many take a second. If it is wrong, all stays as it was, and the
        log says why. Of several at a time, the one that began last counts."""
        self._reloads += 1
        turn = self._reloads
        try:
            keys = await asyncio.to_thread(make_keys, self._options.api_keys, self._options.api_key_file)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        if turn != self._reloads:
            return
        self._take(keys)
        self._check_file()
        log.info("%d API keys are in force", len(keys))

    def caller(self, key: bytes) -> Caller | None:
        """Whose key this is. Compares with all, each in constant time, so that the time tells nothing."""
        if self.open:
            return self._anybody
        digest, found = sha256(key).digest(), None
        for known, caller in self._callers.items():
            if hmac.compare_digest(digest, known):
                found = caller
        return found

    def _check_file(self) -> None:
        if self._options.api_key_file is not None:
            warn_if_readable(Path(self._options.api_key_file))

    def _take(self, keys: tuple[Key, ...]) -> None:
        before = {caller.name: caller for caller in self._callers.values()}
        callers: dict[bytes, Caller] = {}
        for key in keys:
            caller = before.get(key.name) or Caller(key.name)
            caller.salt, caller.share = key.digest.hex()[:32], key.share
            caller.requests = _bucket(caller.requests, key.requests_per_minute)
            caller.tokens = _bucket(caller.tokens, key.tokens_per_minute)
            callers[key.digest] = caller
        self._callers = callers


def _bucket(before: Bucket | None, size: int | None) -> Bucket | None:
    if size is None or before is None:
        return None if size is None else Bucket(size)
    return before if before.size == size else before.resized(size)


def caller_of(request: Request) -> Caller:
    """Whose request it is."""
    found: Caller | None = request.scope.get("state", {}).get("caller")
    return found or Caller()


class ApiKeys:
    """ASGI middleware: lets in who has a key, and sets `state["caller"]`. `/health` and `/ready` are open.

    `refused` is told of those who have none, by HTTP status.
    """

    def __init__(self, app: ASGIApp, access: Access, refused: Callable[[int], None] = lambda _: None) -> None:
        self._app = app
        self._access = access
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        caller = self._access.caller(_bearer(scope))
        if caller is None:
            self._refused(AuthenticationError.status)
            refusal = AuthenticationError("a valid API key is required: Authorization: Bearer KEY")
            await error_response(refusal)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        if caller.requests is None and caller.tokens is None:
            await self._app(scope, receive, send)
            return

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *caller.headers()]
            await send(message)

        await self._app(scope, receive, with_limits)


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = bytes(value).partition(b" ")
            return key.strip() if kind.lower() == b"bearer" else b""
    return b""


class KeyCollector(Collector):
    """What each key has used, by its name, for the metrics page."""

    def __init__(self, access: Access, model: str) -> None:
        self._access = access
        self._model = model

    def collect(self) -> Iterator[Metric]:
        callers = self._access.callers
        if not callers:
            return
        counts: tuple[tuple[str, str, Callable[[Caller], int]], ...] = (
            ("key_requests", "Requests by API key, those over a limit not counted.", lambda one: one.admitted),
            ("key_prompt_tokens", "Prompt tokens by API key.", lambda one: one.prompt_tokens),
            ("key_generation_tokens", "Tokens generated by API key.", lambda one: one.generated),
        )
        for name, text, value in counts:
            family = CounterMetricFamily(f"noria_{name}", text, labels=["model_name", "key"])
            for caller in callers:
                family.add_metric([self._model, caller.name], value(caller))
            yield family
        text = "Requests refused because an API key had used up its limit."
        limited = CounterMetricFamily("noria_key_limited", text, labels=["model_name", "key", "limit"])
        for caller in callers:
            for limit, count in caller.limited.items():
                limited.add_metric([self._model, caller.name, limit], count)
        yield limited
