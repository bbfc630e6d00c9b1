"""`/debug/*`: a request's time, told whole, to nobody but whose it is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fakes import Running, serving, wait_until

from helpers.fake_executor import FakeExecutor
from noria.config import CacheOptions, SchedulerOptions, ServerOptions
from noria.engine.core import EngineCore
from noria.frontend.course import Course, Passage, Stint
from noria.messages import Explained, Phase
from noria.pacer.base import Decision, Load, Prediction, Sizes
from noria.server.accounts import account
from noria.server.journal import Journal
from noria.server.turns import Turns

SECRET = "sluice"
LIMITS = {"batch": 4, "budget": 64}


def engine(pacer: Any = None) -> Any:
    """A real core over an executor that runs steps at once."""
    executor = FakeExecutor(num_blocks=64, slots=4, max_model_len=200)
    executor.info = replace(executor.info, vocab_size=260)
    core: Any = EngineCore(executor, CacheOptions(block_size=8), SchedulerOptions(max_num_seqs=4), pacer=pacer)
    core.context = 200
    return core


@pytest.fixture(scope="module")
def wheel() -> Iterator[Running]:
    with serving(engine()) as running:
        yield running


@pytest.fixture(scope="module")
def http(wheel: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=wheel.url, timeout=20) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> Any:
    response = http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 6, "seed": 1} | fields)
    assert response.status_code == 200, response.text
    return response


def explained(http: httpx.Client, name: str, **params: Any) -> Any:
    response = http.get(f"/debug/requests/{name}", params=params)
    assert response.status_code == 200, response.text
    return response.json()


def check(told: Any) -> None:
    """Phases follow each other from the arrival on, and everything adds up."""
    for choice in told["choices"]:
        at = 0.0
        for phase in choice["phases"]:
            assert phase["at_ms"] == pytest.approx(at, abs=0.001)
            assert phase["ms"] > 0
            at = phase["at_ms"] + phase["ms"]
        assert at == pytest.approx(told["total_ms"], abs=0.001)
        sums = choice["sums"]
        parts = ("before_ms", "waiting_ms", "ran_ms", "others_ms", "delivery_ms", "lost_ms")
        assert sum(sums[part] for part in parts) == pytest.approx(sums["total_ms"])
        assert sums["total_ms"] == pytest.approx(told["total_ms"], abs=0.001)
        assert sum(sums["waited"].values()) == pytest.approx(sums["waiting_ms"])


def test_a_whole_answer(http: httpx.Client) -> None:
    answer = complete(http).json()
    told = explained(http, answer["id"])
    check(told)
    (choice,) = told["choices"]
    assert (told["state"], told["streamed"], choice["finish_reason"], choice["known"]) == (
        "finished",
        False,
        "length",
        True,
    )
    assert [step["tokens"] for step in choice["steps"]] == [7, 1, 1, 1, 1, 1]
    assert [phase["what"] for phase in choice["phases"]][-2:] == ["running", "delivering"]
    assert (choice["tokens"], choice["prompt_tokens"], choice["engines"], told["notes"]) == (6, 7, 1, [])
    assert told["advice"].endswith(".")


def test_a_stream(http: httpx.Client) -> None:
    complete(http, stream=True, request_id="mine.1")
    told = explained(http, "cmpl-mine.1")
    check(told)
    assert told["streamed"]
    assert told["ttft_ms"] <= told["total_ms"]
    assert told == explained(http, "mine.1")  # the client's own id will do


def test_a_chat_ended_by_a_stop_string(http: httpx.Client) -> None:
    whole = complete(http, max_tokens=40).json()["choices"][0]["text"]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 150, "seed": 3, "request_id": "talk"}
    text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert whole
    http.post("/v1/chat/completions", json=body | {"stop": text[30], "request_id": "stopped"})
    told = explained(http, "chatcmpl-stopped")
    check(told)
    assert told["choices"][0]["finish_reason"] == "stop"
    assert sum(step["tokens"] for step in told["choices"][0]["steps"]) >= told["choices"][0]["tokens"]


def test_choices_and_prompts(http: httpx.Client) -> None:
    answer = complete(http, prompt=[SECRET, "pond"], n=6, max_tokens=3).json()
    told = explained(http, answer["id"])
    check(told)
    assert [choice["index"] for choice in told["choices"]] == sorted({*range(8), told["latest"]})
    assert told["choices_left_out"] == 12 - len(told["choices"])
    alone = explained(http, answer["id"], choice=11)
    check(alone)
    assert [choice["index"] for choice in alone["choices"]] == [11]
    wrong = http.get(f"/debug/requests/{answer['id']}", params={"choice": 12})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "choice")


def test_the_list_is_of_the_last_ones(http: httpx.Client) -> None:
    ids = [complete(http).json()["id"] for _ in range(3)]
    listed = http.get("/debug/requests", params={"limit": 2}).json()["data"]
    assert [one["id"] for one in listed] == [ids[2], ids[1]]
    assert listed[0]["finish_reasons"] == ["length"]
    for limit in ("0", "x", "-1", "9999999999999"):
        assert http.get("/debug/requests", params={"limit": limit}).status_code == 400


def test_neither_texts_nor_tokens_are_shown(http: httpx.Client) -> None:
    answer = complete(http, prompt=SECRET * 3).json()
    for path in ("/debug/requests", f"/debug/requests/{answer['id']}", "/debug/pacer"):
        shown = http.get(path).text
        assert SECRET not in shown
        assert answer["choices"][0]["text"] not in shown


def test_its_time_begins_with_its_head(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    early = SimpleNamespace(monotonic=lambda: time.monotonic() - 1000.0)
    monkeypatch.setattr("noria.server.connection.time", early)
    told = explained(http, complete(http).json()["id"])
    check(told)
    assert told["choices"][0]["phases"][0]["what"] == "reading"
    assert told["choices"][0]["phases"][0]["ms"] > 1e6


def test_an_unknown_id_is_a_404(http: httpx.Client) -> None:
    response = http.get("/debug/requests/cmpl-nobody")
    assert response.status_code == 404
    assert "/debug/requests" in response.json()["error"]["message"]


def test_a_key_sees_its_own_requests_only() -> None:
    with serving(engine(), options=ServerOptions(api_keys=("one", "two"))) as running:
        with httpx.Client(base_url=running.url, headers={"authorization": "Bearer one"}) as one:
            name = complete(one, request_id="same").json()["id"]
            assert explained(one, name)["id"] == name
        with httpx.Client(base_url=running.url, headers={"authorization": "Bearer two"}) as two:
            assert two.get(f"/debug/requests/{name}").status_code == 404
            assert two.get("/debug/requests").json()["data"] == []
            complete(two, request_id="same", max_tokens=2)
            assert explained(two, name)["choices"][0]["tokens"] == 2
            assert two.get("/debug/pacer").status_code == 200
        with httpx.Client(base_url=running.url, headers={"authorization": "Bearer one"}) as one:
            assert explained(one, name)["choices"][0]["tokens"] == 6
        for path in ("/debug/requests", f"/debug/requests/{name}", "/debug/pacer"):
            assert httpx.get(running.url + path).status_code == 401


def test_one_whose_client_left() -> None:
    core = engine()
    submit = core._executor.submit
    core._executor.submit = lambda *given, **named: (time.sleep(0.01), submit(*given, **named))[1]
    with serving(core) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        body = {"prompt": SECRET, "max_tokens": 190, "seed": 1, "stream": True, "request_id": "gone"}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            told = explained(client, "gone")
            check(told)
            assert (told["state"], told["choices"][0]["state"]) == ("running", "running")
        wait_until(lambda: explained(client, "gone")["state"] == "finished")
        told = explained(client, "gone")
        check(told)
        assert told["choices"][0]["finish_reason"] == "abort"


def test_an_engine_that_knows_nothing_of_it() -> None:
    with serving() as running, httpx.Client(base_url=running.url, timeout=20) as client:
        name = complete(client).json()["id"]
        told = explained(client, name)
        check(told)
        assert not told["choices"][0]["known"]
        assert told["choices"][0]["sums"]["lost_ms"] > 0
        assert "the engine tells nothing of it" in told["notes"][0]


def test_without_a_pacer(http: httpx.Client) -> None:
    assert http.get("/debug/pacer").json() == {"enabled": False, "max_batch": 4, "max_budget": 512, "decisions": []}


# ---------------------------------------------------------------------------------------------------- by hand


def story(phases: list[tuple[float, float, str]], ended: float | None, **more: Any) -> Explained:
    """Of phases; a step for each that runs."""
    told = [Phase(start, end, cause, 1, 5, 3, 4, 64, 2, 1) for start, end, cause in phases]
    ran = [(start, end) for start, end, cause in phases if cause == "running"]
    columns = {
        "numbers": np.arange(len(ran)).astype("<i8").tobytes(),
        "starts": np.array([start for start, _ in ran], "<f8").tobytes(),
        "ends": np.array([end for _, end in ran], "<f8").tobytes(),
    }
    columns |= {name: np.ones(len(ran), "<i4").tobytes() for name in ("own", "rows", "tokens")}
    begin = phases[0][0] if phases else 0.0
    return Explained(ask=1, now=99.0, submitted=begin, ended=ended, phases=tuple(told), **columns, **more)


def course(*passages: Passage, sent: float = math.nan) -> Course:
    return Course(0.0, 1e9, "cmpl-x", "completion", "", 3, True, 1.0, 2.0, 2.0, sent=sent, passages=list(passages))


def waits() -> Passage:
    """One that has been with an engine since 3.0."""
    return Passage(0, 3, 3.0, [Stint(7, 3.0)])


def phases_of(made: Any, index: int = 0) -> list[tuple[str, str, float]]:
    """What, why and how many seconds; checks that nothing lies between them."""
    told = msgspec.to_builtins(made)
    check(told)
    return [(one["what"], one.get("cause", ""), one["ms"] / 1e3) for one in told["choices"][index]["phases"]]


def test_waiting_running_and_delivery_are_the_whole_time() -> None:
    passage = Passage(0, 3, 3.0, [Stint(7, 3.0)], first=11.0, last=20.0, ended=20.0, reason="length", tokens=2)
    told = story([(4.0, 6.0, "cap"), (6.0, 16.0, "running"), (16.0, 17.0, "budget"), (17.0, 19.0, "running")], 19.0)
    told = msgspec.structs.replace(told, reason="length")
    made = account(course(passage, sent=23.0), {7: told}, [0], 99.0, LIMITS)
    assert phases_of(made) == [
        ("reading", "", 1.0),
        ("preparing", "", 1.0),
        ("submitting", "", 1.0),
        ("waiting", "step", 1.0),
        ("waiting", "cap", 2.0),
        ("running", "", 10.0),
        ("waiting", "budget", 1.0),
        ("running", "", 2.0),
        ("delivering", "", 4.0),
    ]
    sums = made.choices[0].sums
    assert (sums.before_ms, sums.waiting_ms, sums.ran_ms, sums.delivery_ms) == (3000.0, 4000.0, 12000.0, 4000.0)
    assert sums.total_ms == made.total_ms == 23000.0
    assert made.advice.startswith("It ran 52 % of its time, in 2 steps")


def test_one_that_a_dead_engine_had() -> None:
    stints = [Stint(7, 3.0, left=8.0, died=True), Stint(7, 10.0)]
    passage = Passage(0, 3, 3.0, stints, first=5.0, last=15.0, ended=15.0, reason="length", tokens=2)
    told = msgspec.structs.replace(story([(10.0, 15.0, "running")], 15.0), reason="length", received=1)
    made = account(course(passage, sent=15.0), {7: told}, [0], 99.0, LIMITS)
    assert phases_of(made)[3:] == [("lost", "", 5.0), ("held", "", 2.0), ("running", "", 5.0)]
    assert made.choices[0].engines == 2
    assert "an engine died" in made.notes[0]


def test_one_that_was_taken_back_and_goes_on_under_another_id() -> None:
    stints = [Stint(7, 3.0, left=8.0), Stint(9, 12.0)]
    passage = Passage(0, 3, 3.0, stints, first=5.0, last=15.0, ended=15.0, reason="length", tokens=2)
    before = msgspec.structs.replace(story([(3.0, 9.0, "running")], 9.0), reason="abort")
    after = msgspec.structs.replace(story([(12.0, 15.0, "running")], 15.0), reason="length")
    made = account(course(passage, sent=15.0), {7: before, 9: after}, [0], 99.0, LIMITS)
    assert phases_of(made)[3:] == [("running", "", 5.0), ("held", "", 4.0), ("running", "", 3.0)]


def test_a_stop_string_that_the_engine_hears_of_later() -> None:
    passage = Passage(0, 3, 3.0, [Stint(7, 3.0)], first=5.0, last=6.5, ended=6.5, reason="stop", tokens=2)
    phases = [(3.0, 6.0, "running"), (6.0, 9.0, "running")]
    told = msgspec.structs.replace(story(phases, 9.0), reason="abort")
    made = account(course(passage, sent=7.0), {7: told}, [0], 99.0, LIMITS)
    assert phases_of(made)[3:] == [("running", "", 3.0), ("delivering", "", 1.0)]
    assert len(made.choices[0].steps) == 1


def test_a_choice_waits_for_the_others_of_its_answer() -> None:
    quick = Passage(0, 3, 3.0, [Stint(7, 3.0)], first=5.0, last=6.0, ended=6.0, reason="length", tokens=2)
    slow = Passage(1, 3, 3.0, [Stint(8, 3.0)], first=5.0, last=13.0, ended=13.0, reason="length", tokens=2)
    told = {7: story([(3.0, 6.0, "running")], 6.0), 8: story([(3.0, 13.0, "running")], 13.0)}
    told = {key: msgspec.structs.replace(one, reason="length") for key, one in told.items()}
    made = account(course(quick, slow, sent=14.0), told, [0, 1], 99.0, LIMITS)
    assert phases_of(made)[3:] == [("running", "", 3.0), ("others", "", 7.0), ("delivering", "", 1.0)]
    assert phases_of(made, 1)[3:] == [("running", "", 10.0), ("delivering", "", 1.0)]
    assert made.latest == 1


def test_one_that_still_waits() -> None:
    made = account(
        course(Passage(0, 3, 3.0, [Stint(7, 3.0)])), {7: story([(3.0, 50.0, "cap")], None)}, [0], 50.0, LIMITS
    )
    assert phases_of(made)[3:] == [("waiting", "cap", 47.0)]
    assert made.state == "running"
    assert made.advice == (
        "It waited 94 % of its time so far for the batch cap of 4: 2 requests ran already; a larger --max-num-seqs lets"
        " more run at once, each of them slower."
    )
    made = account(course(Passage(0, 3, 3.0)), {}, [0], 50.0, LIMITS)
    assert phases_of(made)[3:] == [("held", "", 47.0)]
    assert "no engine" in made.advice


CAUSES = [
    "step",
    "budget",
    "blocks",
    "policy",
    "prefix",
    "grammar",
    "static",
    "preempted",
    "gathering",
    "kind",
    "lookups",
]


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_its_advice(cause: str) -> None:
    made = account(
        course(Passage(0, 3, 3.0, [Stint(7, 3.0)])), {7: story([(3.0, 50.0, cause)], None)}, [0], 50.0, LIMITS
    )
    assert made.advice.startswith("It waited 94 % of its time so far ")
    assert f"for {cause}:" not in made.advice  # but in words


def test_the_pacers_cap_is_called_so() -> None:
    told = {7: story([(3.0, 50.0, "cap")], None)}
    made = account(course(waits()), told, [0], 50.0, {"batch": 32, "budget": 64})
    assert "the pacer had set it below --max-num-seqs (32)" in made.advice


def test_the_journal_is_bounded_and_forgets_no_live_request() -> None:
    journal = Journal(3)
    courses = [course(Passage(0, 3, 3.0, ended=4.0 if number else None)) for number in range(10)]
    for number, one in enumerate(courses):
        one.id, one.arrived = f"cmpl-{number}", float(number)
        journal.add(one)
    assert len(journal) == 3
    assert journal.find("", "0") is courses[0]
    assert journal.latest("")[0].id == "cmpl-9"
    assert journal.find("", "cmpl-1") is None
    assert journal.find("other", "cmpl-9") is None
    many = course(*(Passage(number, 3, 3.0, ended=4.0) for number in range(20_000)))
    many.id = "cmpl-many"
    journal.add(many)
    courses[0].passages[0].ended = 9.0
    journal.add(courses[5])
    assert journal.find("", "many") is None


class Still:
    """A pacer that has decided once."""

    def __init__(self) -> None:
        sizes = Sizes(4, 64)
        prediction = Prediction(sizes, "as it is")
        self.sizes = sizes
        self.decisions = [
            Decision(1, 5.0, 1e9, Load(at=5.0, running=2), "most", prediction, None, False, sizes, sizes, (), "why not")
        ]

    @property
    def stats(self) -> Any:
        from noria.messages import PacerStats

        return PacerStats(4, 64)

    def is_due(self, now: float) -> bool:
        return False


def test_the_pacers_decisions() -> None:
    with serving(engine(Still())) as running:
        told = httpx.get(running.url + "/debug/pacer").json()
    (decision,) = told["decisions"]
    assert told["enabled"]
    assert (decision["reason"], decision["load"]["running"], decision["after"]) == (
        "why not",
        2,
        {"batch": 4, "budget": 64},
    )
    assert decision["seconds_ago"] > 0


@pytest.mark.parametrize("path", ["/debug/requests", "/debug/requests/busy", "/debug/pacer"])
def test_who_asks_too_much_at_once_is_refused(
    wheel: Running, http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(http, request_id="busy")
    monkeypatch.setattr(wheel.state, "questioning", Turns(most=0))
    response = http.get(path)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert http.get("/health").status_code == 200
