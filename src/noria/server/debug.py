"""`GET /debug/requests`, `/debug/requests/ID` and `/debug/pacer`: what became of requests, and what the pacer decided.

Who has a key sees its own requests only; those of others do not exist for it. No text and no token is shown.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidRequestError, NotFoundError, UnavailableError
from noria.frontend.course import Course
from noria.messages import EngineInfo, Explained, PacerLog
from noria.server.access import caller_of
from noria.server.accounts import Requests, account, latest, summary
from noria.server.http import json_response
from noria.server.state import ServerState

_LISTED = 100
_SHOWN = 8  # choices that are told of unless one is asked for


class PacerDecisions(msgspec.Struct):
    """`GET /debug/pacer`.

    Attributes:
        enabled: whether there is a pacer. max_batch, max_budget: most that it may set.
        decisions: the last ones, first to last; `seconds_ago` says when.
    """

    enabled: bool
    max_batch: int
    max_budget: int
    decisions: list[dict[str, Any]]


async def list_requests(request: Request) -> Response:
    """`GET /debug/requests`: the caller's last ones."""
    state: ServerState = request.app.state.noria
    count, now = _number(request, "limit", _LISTED, 1000), time.monotonic()
    caller = caller_of(request).name
    with state.questioning.place(caller):
        found = state.journal.latest(caller)[:count]
        return await state.questioning.work(lambda: json_response(Requests([summary(one, now) for one in found])))


async def explain_request(request: Request) -> Response:
    """`GET /debug/requests/ID`: where a request's time went."""
    state: ServerState = request.app.state.noria
    name, caller = request.path_params["id"], caller_of(request).name
    course = state.journal.find(caller, name)
    if course is None:
        raise NotFoundError(
            f"there is no request {name[:200]!r} among the last ones; GET /debug/requests lists those",
            "id",
        )
    with state.questioning.place(caller):
        return await _explained(state, course, _shown(request, course))


async def _explained(state: ServerState, course: Course, shown: list[int]) -> Response:
    told = await _told(state, course, shown)
    info = state.client.info
    limits = {"batch": info.max_num_seqs, "budget": info.max_num_batched_tokens}
    now = max([time.monotonic(), *(one.now for one in told.values())]) if course.ended is None else time.monotonic()
    return await state.questioning.work(lambda: json_response(account(course, told, shown, now, limits)))


async def _told(state: ServerState, course: Course, shown: list[int]) -> dict[int, Explained]:
    """What the engine says of these choices, by its ids. An engine that does not answer is not asked again."""
    told: dict[int, Explained] = {}
    stints = (stint for index in shown for stint in course.passages[index].stints if not stint.died)
    for stint in stints:
        answer = await state.client.questions.explain(stint.request_id)
        if answer is None:
            break
        told[stint.request_id] = answer
    return told


def _shown(request: Request, course: Course) -> list[int]:
    """Indices of the choices to be told of: the one asked for, or the first ones and the one that ended last."""
    count = len(course.passages)
    if "choice" in request.query_params:
        return [_number(request, "choice", 0, count - 1, least=0)]
    return sorted({*range(min(count, _SHOWN)), latest(course)})


def _number(request: Request, name: str, default: int, most: int, least: int = 1) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit()) or len(given) > 9 or not least <= int(given) <= most:
        raise InvalidRequestError(f"{name} must be an integer in [{least}, {most}], got {given[:50]!r}", name)
    return int(given)


async def explain_pacer(request: Request) -> Response:
    """`GET /debug/pacer`: its last decisions."""
    state: ServerState = request.app.state.noria
    with state.questioning.place(caller_of(request).name):
        log = await state.client.questions.pacer()
        if log is None:
            raise UnavailableError("the engine does not answer; try again", retry_after=1.0)
        return await state.questioning.work(lambda: json_response(_decisions(log, state.client.info)))


def _decisions(log: PacerLog, info: EngineInfo) -> PacerDecisions:
    encoded = log.decisions or msgspec.msgpack.encode([])
    made = msgspec.msgpack.decode(encoded, type=list[dict[str, Any]])
    told = [{"seconds_ago": round(log.now - one["at"], 4)} | one for one in made]
    return PacerDecisions(log.decisions is not None, info.max_num_seqs, info.max_num_batched_tokens, told)
