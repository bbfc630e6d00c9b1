"""What all endpoints share, and the way of a request that generates: seats, prompts, submission, disconnects."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from noria.config import ServerOptions, nearest
from noria.errors import EngineError, InvalidRequestError, NotFoundError, OverloadedError, UnavailableError
from noria.frontend.client import EngineClient
from noria.frontend.course import Course
from noria.frontend.detokenizer import Pieces
from noria.frontend.grammars import Grammars
from noria.frontend.inputs import InputProcessor
from noria.frontend.stream import Increment, RequestStream, StreamClosedError
from noria.observe.logging import get_logger
from noria.observe.metrics import Metrics
from noria.pacer.outlook import LATEST, SOONEST
from noria.params import SamplingParams
from noria.server.access import Access, Caller, KeyCollector, caller_of
from noria.server.fields import known_fields
from noria.server.http import Bodies, Watch, decode, other_fields
from noria.server.journal import Journal
from noria.server.others import check_others
from noria.server.protocol import GenerationRequest
from noria.server.reading import Defaults
from noria.server.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from noria.server.tools.dialect import Dialect
from noria.server.turns import Turns

log = get_logger(__name__)
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection: nobody reads the answer."""


@dataclass(slots=True)
class ServerState:
    """One served model.

    Attributes:
        name: the id in `/v1/models`; `aliases` are accepted as well.
        defaults: sampling defaults of the model.
        dialect: how the model calls functions and reasons.
        draining: no request is taken any more; those that were are finished.
        deadline: of that, `time.monotonic()`.
        answered: something was read since memory was last given back.
        questioning: about what became of requests, which takes milliseconds.
        sheds: requests that would miss an objective are refused (`--admission slo`).
    """

    client: EngineClient
    inputs: InputProcessor
    pieces: Pieces
    metrics: Metrics
    name: str
    options: ServerOptions = field(default_factory=ServerOptions)
    defaults: Defaults = field(default_factory=Defaults)
    aliases: tuple[str, ...] = ()
    dialect: Dialect = field(default_factory=Dialect)
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    deadline: float = math.inf
    answered: bool = False
    sheds: bool = False
    grammars: Grammars = field(default_factory=Grammars)
    bodies: Bodies = field(init=False)
    access: Access = field(init=False)
    journal: Journal = field(default_factory=Journal)
    questioning: Turns = field(default_factory=Turns)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.options.max_body_bytes, self.inputs.max_model_len)
        self.access = Access(self.options)
        self.metrics.registry.register(KeyCollector(self.access, self.name))

    async def read(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """The body of a request, within its limit and of the right types. Fields that are not known are counted, or
        refused with `--strict-fields`."""
        self.answered = True
        body = await self.bodies.read(request)
        struct: Any = decoder.type
        async with self.bodies.turn(body):
            made = decode(body, decoder)
            others = other_fields(body, struct)
        if unknown := check_others(struct, others):
            if self.options.strict_fields:
                name = unknown[0][:100]
                hint = nearest(name, known_fields(struct))
                raise InvalidRequestError(f"{name}: there is no such field{hint}", name)
            self.metrics.unknown_fields.inc(len(unknown))
            log.debug("fields that are not known: %s", ", ".join(name[:100] for name in unknown[:10]))
        return made

    def check_model(self, model: str | None) -> None:
        """404 for a model that is not served here."""
        if model is not None and model != self.name and model not in self.aliases:
            raise NotFoundError(f"the model {model[:200]!r} is not served here; this server has {self.name!r}", "model")

    def check_capacity(self, request: Request) -> None:
        """Refuses before the body is read: 503 without an engine or while draining, 429 when the queue is full or the
        key's limit is reached."""
        self.check_draining()
        self.client.reserve(1).release()
        caller_of(request).admit()

    def check_outlook(self) -> None:
        """429 if the queue alone would make a first token too late."""
        try:
            self.client.door.check(time.monotonic())
        except OverloadedError:
            self.metrics.shed("door")
            raise

    def check_draining(self) -> None:
        """503 while the server finishes what it has."""
        if self.draining:
            # By then another server answers, or none.
            left = min(LATEST, max(SOONEST, self.deadline - time.monotonic()))
            raise UnavailableError("the server is stopping", retry_after=left)


def arrival_of(request: Request) -> float:
    """When the head of a request had come, `time.monotonic()`; now, if the connection did not note it."""
    found: float | None = request.scope.get("state", {}).get("arrived")
    return time.monotonic() if found is None else found


Prepare = Callable[[], Coroutine[Any, Any, tuple[list[list[int]], list[SamplingParams]]]]
Bind = Callable[[], Coroutine[Any, Any, str | None]]
Kind = Literal["chat", "completion"]
PREFIXES: dict[Kind, str] = {"chat": "chatcmpl", "completion": "cmpl"}  # of ids


async def submit(
    state: ServerState,
    request: Request,
    wanted: GenerationRequest,
    kind: Kind,
    choices: int,
    prepare: Prepare,
    arrived: float,
    bind: Bind | None = None,
    marks: bool = False,
) -> RequestStream:
    """Takes seats for `choices`, lets `prepare` make prompts and parameters, and submits them.

    Args:
        kind: of the answer.
        arrived: when the request came, `time.monotonic()`.
        bind: makes the grammar of the answers, after `prepare`; None: they are free.
        marks: the text keeps the control tokens that tell the parts of an answer from each other.

    Raises:
        ClientGoneError: the client left meanwhile.
        OverloadedError: the answer would miss an objective of the server. Once this returns, it will not be raised.
    """
    state.check_draining()  # it may have begun while the body was read
    moments = [time.monotonic()]
    limit, caller = state.client.max_unfinished, caller_of(request)
    if choices > limit:
        raise InvalidRequestError(f"{choices} choices in one request; this server takes at most {limit}", "n")
    with state.client.reserve(choices) as seats, Watch(request.receive) as watch:
        if choices == 1:
            state.check_outlook()
        prompts, params = await _unless_gone(watch, prepare())
        moments.append(time.monotonic())
        if bind is not None:
            grammar = await _unless_gone(watch, bind())
            params = [msgspec.structs.replace(one, grammar=grammar) for one in params]
            moments.append(time.monotonic())
        caller.take_prompt(sum(map(len, prompts)))
        stream = state.client.submit(
            prompts,
            params,
            seats=seats,
            salt=_salt(caller, wanted),
            priority=wanted.priority or 0,
            arrived=arrived,
            tenant=caller.tenant,
            marks=marks,
            sheddable=state.sheds,
        )
        _enter(state, stream.course, wanted, kind, caller, arrived, moments)
        if state.sheds and choices == 1:
            await _begun(watch, stream, caller)
        return stream


def _enter(
    state: ServerState,
    course: Course,
    wanted: GenerationRequest,
    kind: Kind,
    caller: Caller,
    arrived: float,
    moments: list[float],
) -> None:
    """Gives a request its id, and enters it into the journal. `moments`: when it was read, prepared and maybe bound."""
    course.id = f"{PREFIXES[kind]}-{wanted.request_id or uuid.uuid4().hex}"
    course.kind, course.owner, course.streamed = kind, caller.name, bool(wanted.stream)
    course.time -= course.arrived - arrived
    course.arrived = arrived
    course.read, course.prepared, course.bound = moments if len(moments) == 3 else (*moments, math.nan)
    state.journal.add(course)


async def _begun(watch: Watch, stream: RequestStream, caller: Caller) -> None:
    """Until the request is past being refused: what was said before could not be taken back."""
    try:
        await _unless_gone(watch, stream.begun())
    except OverloadedError:
        caller.give_back(stream.prompt_tokens)
        raise
    except BaseException:
        stream.close()
        raise


async def _unless_gone(watch: Watch, work: Coroutine[Any, Any, T]) -> T:
    """Waits for work that may take long, unless the client leaves: then it is cancelled, and ClientGoneError raised."""
    task = asyncio.ensure_future(work)

    def leave() -> None:
        task.cancel()

    watch.callback = leave
    try:
        made = await task
    except asyncio.CancelledError:
        task.cancel()
        if not watch.gone:
            raise
    finally:
        watch.callback = None
    if watch.gone:
        raise ClientGoneError
    return made


def _salt(caller: Caller, wanted: GenerationRequest) -> str:
    """Keeps prefix blocks of different keys apart, and within a key those of different `cache_salt`s."""
    return caller.salt if wanted.cache_salt is None else f"{caller.salt}:{wanted.cache_salt}"


async def whole(request: Request, stream: RequestStream) -> list[Increment]:
    """All of an answer. Aborts it if the client goes; raises EngineError if a choice ended in error."""
    with stream, Watch(request.receive) as watch:
        watch.callback = stream.close
        try:
            choices = await stream.result()
        except StreamClosedError:
            raise ClientGoneError from None
        if watch.gone:
            raise ClientGoneError
    for choice in choices:
        raise_error(choice)
    return choices


def raise_error(increment: Increment) -> None:
    """Raises why a choice could not be continued."""
    finish = increment.finish
    if finish is not None and finish.reason == "error":
        message = finish.message or "the engine could not continue this request"
        raise InvalidRequestError(message) if finish.refused else EngineError(message)


def usage(stream: RequestStream, completion_tokens: int, reasoning_tokens: int | None = None) -> Usage:
    """Usage of a request so far. `reasoning_tokens`: None for models that do not reason."""
    return Usage(
        stream.prompt_tokens,
        completion_tokens,
        stream.prompt_tokens + completion_tokens,
        PromptTokensDetails(stream.cached_tokens),
        UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
    )


def log_answer(kind: str, request_id: str, stream: RequestStream, completion_tokens: int, seconds: float) -> None:
    """One line for each answered request."""
    fields = {
        "request": request_id,
        "prompt_tokens": stream.prompt_tokens,
        "cached_tokens": stream.cached_tokens,
        "completion_tokens": completion_tokens,
        "choices": stream.choices,
        "seconds": seconds,
    }
    log.info("%s answered", kind, extra={"fields": fields})


def parts_of(choices: Sequence[Increment]) -> int:
    """How many log-probabilities an answer has."""
    columns = (one for choice in choices for one in (choice.logprobs, choice.prompt_logprobs) if one is not None)
    return sum(one.size for one in columns)


def total_tokens(choices: Sequence[Increment]) -> int:
    """Tokens of all choices."""
    return sum(len(choice.token_ids) for choice in choices)
