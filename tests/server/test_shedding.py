"""Requests that would miss an objective, as their clients see it: refused with 429 before anything of an answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from fakes import LATE, Running, recited, serving, wait_until

from noria.config import ServerOptions
from noria.messages import Outlook
from noria.server.access import Bucket

REFUSALS = [("hurry", "door"), ("patient", "queue")]


@pytest.fixture
def server() -> Iterator[Running]:
    """A server that sheds."""
    with serving(sheds=True) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as made:
        yield made


def chat(word: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": word}], "max_tokens": 6, **more}


def count(client: httpx.Client, name: str, **labels: str) -> float:
    """The value of a counter."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"{name}{{") and all(one in line for one in wanted):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} {labels}")


def reconciled(client: httpx.Client) -> bool:
    reasons = ("stop", "length", "abort", "error")
    ended = sum(count(client, "noria_request_success_total", finished_reason=reason) for reason in reasons)
    return count(client, "noria_request_accepted_total") == ended


@pytest.mark.parametrize(("word", "where"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_refusal_is_a_status_for_streams_and_whole_answers_alike(
    client: httpx.Client, server: Running, word: str, where: str, stream: bool, path: str
) -> None:
    body = chat(word, stream=stream) if "chat" in path else {"prompt": word, "max_tokens": 6, "stream": stream}
    reply = client.post(path, json=body)
    assert reply.status_code == 429
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["retry-after"] == "2"
    assert reply.headers["retry-after-ms"] == "1500"
    error = {"message": LATE, "type": "rate_limit_error", "param": None, "code": "slo_unreachable"}
    assert reply.json() == {"error": error}
    assert count(client, "noria_request_shed_total", where=where) == 1
    assert count(client, "noria_request_refused_total", status="429") == 1
    assert count(client, "noria_request_accepted_total") == 1
    assert count(client, "noria_request_success_total", finished_reason="error") == 1
    assert count(client, "noria_e2e_request_latency_seconds_count") == 0
    assert reconciled(client)
    wait_until(lambda: server.state.client.unfinished == 0 and not server.core.rows)


def test_others_are_answered_as_ever(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json=chat("hello"))
    assert whole.json()["choices"][0]["message"]["content"] == recited(6)
    lines = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 6, "stream": True}).text
    assert "data: [DONE]" in lines
    assert reconciled(client)


@pytest.mark.parametrize("body", [{"prompt": "hurry", "n": 2}, {"prompt": ["hurry", "hello"]}])
def test_several_choices_are_never_shed(client: httpx.Client, server: Running, body: dict[str, object]) -> None:
    reply = client.post("/v1/completions", json={**body, "max_tokens": 6})
    assert reply.json()["choices"][0]["text"] == recited(6)
    assert not any(one.sheddable for one in server.core.submitted)


def test_without_the_flag_nothing_is_shed() -> None:
    with serving() as running, httpx.Client(base_url=running.url) as client:
        assert client.post("/v1/completions", json={"prompt": "hurry", "max_tokens": 6}).status_code == 200
        assert not running.core.submitted[0].sheddable


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    with serving(sheds=True) as running:
        running.core.seats = 0  # nothing begins
        with httpx.Client(base_url=running.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": "hello", "stream": True})
        wait_until(lambda: not running.state.client.requests and not running.core.rows)
        assert running.core.aborted == [running.core.submitted[0].request_id]


def test_the_head_of_a_stream_waits_for_its_admission() -> None:
    with serving(sheds=True) as running, httpx.Client(base_url=running.url, timeout=20) as client:
        running.core.seats = 0
        replies: list[httpx.Response] = []
        body = {"prompt": "hello", "max_tokens": 6, "stream": True}
        thread = threading.Thread(target=lambda: replies.append(client.post("/v1/completions", json=body)))
        thread.start()
        wait_until(lambda: running.core.steps > 20)
        assert not replies
        running.core.seats = 64
        thread.join(20)
        assert replies[0].status_code == 200
        assert replies[0].text.endswith("data: [DONE]\n\n")


def test_the_openai_client_sees_a_rate_limit(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError) as raised:
        client.chat.completions.create(model="wheel", messages=[{"role": "user", "content": "hurry"}], stream=True)
    assert raised.value.code == "slo_unreachable"
    assert "the objective is 1.0 s" in str(raised.value)


def test_the_queue_alone_refuses_before_a_prompt_is_encoded(client: httpx.Client, server: Running) -> None:
    server.core.outlook = Outlook(9.0, 1.0, 0.9)
    assert client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}).status_code == 200
    wait_until(lambda: server.state.metrics.stats.outlook.first_token == 9.0)
    for stream in (False, True):
        reply = client.post("/v1/completions", json={"prompt": "hello", "stream": stream})
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "slo_unreachable"
        assert "the objective is 1.0 s; try again in 8 s" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == "8"
    assert len(server.core.submitted) == 1
    assert count(client, "noria_request_shed_total", where="door") == 2
    assert count(client, "noria_request_accepted_total") == 1
    several = client.post("/v1/completions", json={"prompt": "hello", "n": 2, "max_tokens": 1})
    assert several.status_code == 200
    assert server.core.stats_wanted is False


def test_what_was_refused_does_not_use_up_a_keys_tokens() -> None:
    with serving(sheds=True, options=ServerOptions(api_keys=("sk-1",))) as running:
        (caller,) = running.state.access.callers
        caller.tokens = Bucket(100)
        with httpx.Client(base_url=running.url, headers={"authorization": "Bearer sk-1"}) as client:
            for _ in range(5):
                assert client.post("/v1/completions", json={"prompt": "hurry" * 10}).status_code == 429
            assert caller.tokens.level > 99.0
