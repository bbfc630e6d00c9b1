"""What holds whatever is asked: errors, limits, keys, disconnects, metrics."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fakes import BOS, EOS, MAX_LEN, VOCAB, ReciterCore, Running, recited, serving, wait_until

from noria.config import ServerOptions
from noria.server.reading import Defaults


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bad_json(http: httpx.Client, path: str) -> None:
    error = error_of(http.post(path, content=b'{"prompt": '), 400)
    assert error["type"] == "invalid_request_error"
    assert "not valid JSON" in error["message"]
    error_of(http.post(path, content=b"\xff\xfe"), 400)
    error_of(http.post(path, content=b"[" * 100_000), 400)


def test_wrong_type_names_the_field(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"prompt": "a", "temperature": "hot"}), 400)
    assert error["param"] == "temperature"
    assert error["message"] == 'temperature must be a number in [0, 100], got "hot"'


def test_unknown_model(http: httpx.Client) -> None:
    for path, body in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = error_of(http.post(f"/v1/{path}", json={"model": "mill"} | body), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'wheel'" in error["message"]
    error_of(http.get("/v1/models/mill"), 404)
    assert http.post("/v1/completions", json={"model": "wheel-alias", "prompt": "a"}).status_code == 200


def test_the_texts_of_control_tokens(http: httpx.Client) -> None:
    assert http.get("/tokenizer_info").json() == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": None,
        "unk_token": None,
        "model_max_length": MAX_LEN,
    }


def test_unknown_path_and_method(http: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(http.post("/v1/nothing"), 404)["message"]
    response = http.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_prompt_that_leaves_no_room(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"prompt": "x" * 250}), 400)
    assert error["param"] == "prompt"
    assert f"{MAX_LEN} tokens" in error["message"]
    assert "251" in error["message"]
    error = error_of(http.post("/v1/completions", json={"prompt": "x" * 150, "max_tokens": 60}), 400)
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in (str(MAX_LEN), "151", "60"))
    long = [{"role": "user", "content": "x" * 300}]
    assert error_of(http.post("/v1/chat/completions", json={"messages": long}), 400)["param"] == "messages"


def test_a_very_long_prompt_is_not_encoded_whole(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = running.state.inputs.tokenizer.encode

    def watched(text: str, add_bos: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_bos)

    monkeypatch.setattr(running.state.inputs.tokenizer, "encode", watched)
    error = error_of(http.post("/v1/completions", json={"prompt": "x" * 100_000}), 400)
    assert sum(lengths) <= 20_000
    assert str(MAX_LEN) in error["message"]
    assert error["param"] == "prompt"


def test_a_list_of_prompts_ends_at_the_first_that_does_not_fit(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = running.state.inputs.tokenizer.encode

    def watched(text: str, add_bos: bool) -> list[int]:
        encoded.append(text)
        return encode(text, add_bos)

    monkeypatch.setattr(running.state.inputs.tokenizer, "encode", watched)
    error = error_of(http.post("/v1/completions", json={"prompt": ["a", "b" * 500, *"cdefgh"]}), 400)
    assert encoded == ["a", "b" * 500]
    assert error["param"] == "prompt"


def test_counting_long_texts_keeps_nobody_waiting(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, decode = running.state.inputs.tokenizer.encode, running.state.inputs.tokenizer.decode
    answered = threading.Event()

    def slow_encode(text: str, add_bos: bool) -> list[int]:
        if len(text) > 10_000:
            answered.wait(10)
        return encode(text, add_bos)

    def slow_decode(ids: Sequence[int], skip_special: bool) -> str:
        if len(ids) > 10_000:
            answered.wait(10)
        return decode(ids, skip_special)

    def ask(path: str, **body: Any) -> int:
        return httpx.post(running.url + path, json=body, timeout=20).status_code

    monkeypatch.setattr(running.state.inputs.tokenizer, "encode", slow_encode)
    monkeypatch.setattr(running.state.inputs.tokenizer, "decode", slow_decode)
    try:
        with ThreadPoolExecutor(4) as pool:
            counts = [pool.submit(ask, "/tokenize", prompt="x" * 50_000) for _ in range(2)]
            counts += [pool.submit(ask, "/detokenize", tokens=[65] * 50_000) for _ in range(2)]
            time.sleep(0.2)
            response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=5)
            answered.set()
            assert response.status_code == 200
            assert [count.result() for count in counts] == [200] * 4
    finally:
        answered.set()


def test_bodies_are_bounded_together() -> None:
    with serving(options=ServerOptions(max_body_bytes=5000)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 4900\r\n\r\n".encode()
        slow = [socket.create_connection((host, int(port)), 5) for _ in range(33)]
        for raw in slow:
            raw.sendall(head + b"x" * 4800)  # never the rest
        assert not select.select(slow, [], [], 0.3)[0]  # nobody was refused
        more = socket.create_connection((host, int(port)), 5)
        more.sendall(head + b"x" * 4800)
        assert b" 429 " in more.recv(4000)
        for raw in (*slow, more):
            raw.close()
        with httpx.Client(base_url=server.url) as http:
            wait_until(lambda: http.post("/v1/completions", json={"prompt": "a"}).status_code == 200)


def test_the_default_is_cut_to_the_room(http: httpx.Client) -> None:
    made = http.post("/v1/completions", json={"prompt": "x" * (MAX_LEN - 6)}).json()
    assert made["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("ids", [[VOCAB], [5, -1], [[1], [2**40]]])
def test_token_ids_outside_the_vocabulary(http: httpx.Client, ids: Any) -> None:
    error = error_of(http.post("/v1/completions", json={"prompt": ids}), 400)
    assert error["param"] == "prompt"
    assert str(VOCAB - 1) in error["message"]


@pytest.mark.parametrize("field", [{"logit_bias": {str(VOCAB): 1}}, {"stop_token_ids": [VOCAB]}])
def test_other_ids_outside_the_vocabulary(http: httpx.Client, field: dict[str, Any]) -> None:
    assert error_of(http.post("/v1/completions", json={"prompt": "a"} | field), 400)["param"] == next(iter(field))


def test_empty_prompts(http: httpx.Client) -> None:
    assert error_of(http.post("/v1/completions", json={"prompt": []}), 400)["param"] == "prompt"
    assert error_of(http.post("/v1/completions", json={"prompt": [[]]}), 400)["param"] == "prompt"
    body = {"prompt": "", "add_special_tokens": False}
    assert error_of(http.post("/v1/completions", json=body), 400)["param"] == "prompt"
    assert error_of(http.post("/v1/chat/completions", json={"messages": []}), 400)["param"] == "messages"


def test_top_logprobs_need_logprobs(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}
    assert error_of(http.post("/v1/chat/completions", json=body), 400)["param"] == "top_logprobs"
    assert http.post("/v1/chat/completions", json=body | {"top_logprobs": 0, "max_tokens": 1}).status_code == 200
    body |= {"logprobs": True, "top_logprobs": 21}
    assert error_of(http.post("/v1/chat/completions", json=body), 400)["param"] == "top_logprobs"


def test_the_field_that_was_sent_is_named(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}
    error = error_of(http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "max_completion_tokens"
    assert error["message"].startswith("max_completion_tokens")


def test_best_of(http: httpx.Client) -> None:
    assert error_of(http.post("/v1/completions", json={"prompt": "a", "best_of": 3}), 400)["param"] == "best_of"
    assert http.post("/v1/completions", json={"prompt": "a", "best_of": 2, "n": 2}).status_code == 200


# ---------------------------------------------------------------------------------------------------- pages


def test_pages(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert set(http.get("/version").json()) == {"version"}
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("wheel", "model", MAX_LEN)


def test_tokens_and_back(http: httpx.Client) -> None:
    made = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert made["tokens"] == [BOS, *"hé".encode()]
    assert (made["count"], made["max_model_len"]) == (4, MAX_LEN)
    assert made["token_strs"][:2] == ["<bos>", "h"]
    assert http.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(chat["tokens"][1:]) == b"user: a\nassistant: "
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "<bos>hé"}
    error_of(http.post("/detokenize", json={"tokens": [VOCAB]}), 400)
    error_of(http.post("/tokenize", json={}), 400)


def test_slashes_at_the_end_of_a_path_change_nothing(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    assert http.post("/v1/completions/", json=body).json()["choices"][0]["text"] == recited(2)
    assert http.get("/v1/models//").json()["object"] == "list"
    assert http.get("/v1/models/wheel/").json()["id"] == "wheel"
    assert "there is no / here" in error_of(http.get("/"), 404)["message"]
    with serving(options=ServerOptions(api_keys=("one",))) as server:
        assert httpx.get(f"{server.url}/health/").status_code == 200
        assert httpx.get(f"{server.url}/v1/models/").status_code == 401


@pytest.mark.parametrize("name", ["a/b/c", "%2e%2e", "..%2f..", "a%20b", "%00", "ü", "x" * 5000, "?", "wheel?x=1"])
def test_odd_names_of_models(http: httpx.Client, name: str) -> None:
    reply = http.get(f"/v1/models/{name}")
    if name in ("?", "wheel?x=1"):
        assert reply.json()["object"] == ("list" if name == "?" else "model")
        return
    error = error_of(reply, 404)
    assert len(error["message"]) < 500


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/openapi.json"])
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    reply = http.head(path)
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-type"] == http.get(path).headers["content-type"]


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "HEAD"])
def test_other_methods_are_refused_in_json(http: httpx.Client, method: str) -> None:
    reply = http.request(method, "/v1/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.headers["content-type"] == "application/json"
    assert method == "HEAD" or method in reply.json()["error"]["message"]


def test_metrics_add_up() -> None:
    with serving() as server, httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 7, "n": 2})
        http.post("/v1/completions", json={"prompt": "brief"})
        http.post("/v1/completions", json={"prompt": "a", "stop": "W"})
        http.post("/v1/completions", json={"prompt": "a", "n": 0})
        page = http.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        values = {
            line.split(" ")[0]: float(line.split(" ")[1]) for line in page.text.splitlines() if not line.startswith("#")
        }
    label = '{model_name="wheel"}'
    expected = {
        "noria_prompt_tokens_total": 4 + 6 + 2,
        "noria_generation_tokens_total": 14 + 6 + 1,
        "noria_num_requests_running": 0,
        "noria_num_requests_waiting": 0,
        "noria_kv_cache_usage_perc": 0,
        "noria_prefix_cache_queries_total": 10,
        "noria_prefix_cache_hits_total": 4,
        "noria_num_preemptions_total": 0,
        "noria_time_to_first_token_seconds_count": 4,
        "noria_e2e_request_latency_seconds_count": 4,
        "noria_inter_token_latency_seconds_count": 6 + 6 + 5,
        "noria_time_per_output_token_seconds_count": 3,
        "noria_request_queue_time_seconds_count": 4,
        "noria_request_generation_tokens_sum": 21,
    }
    assert {name: values[name + label] for name in expected} == expected
    for reason, count in (("stop", 2), ("length", 2), ("abort", 0), ("error", 0)):
        name = f'noria_request_success_total{{finished_reason="{reason}",model_name="wheel"}}'
        assert values[name] == count
    assert values["noria_request_accepted_total" + label] == 4
    assert values['noria_request_refused_total{model_name="wheel",status="400"}'] == 1


# ---------------------------------------------------------------------------------------------------- limits


def test_large_bodies_are_refused_before_they_are_read() -> None:
    with serving(options=ServerOptions(max_body_bytes=2000)) as server:
        with httpx.Client(base_url=server.url) as http:
            error = error_of(http.post("/v1/completions", json={"prompt": "x" * 3000}), 413)
            assert "2000" in error["message"]
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\n"
        for length in ("content-length: 99999999\r\n\r\n", "transfer-encoding: chunked\r\n\r\nfa0\r\n" + "x" * 4000):
            with socket.create_connection((host, int(port)), 5) as raw:
                raw.sendall((head + length).encode())
                assert b" 413 " in raw.recv(4000)


def test_api_keys() -> None:
    with serving(options=ServerOptions(api_keys=("one", "two"))) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer three"},
            {"authorization": "one"},
            {"authorization": "Basic one"},
        ):
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                error = error_of(http.get(path, headers=headers), 401)
                assert error["type"] == "authentication_error"
        for key in ("one", "two", "one"):
            body = {"prompt": "a", "max_tokens": 1}
            reply = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200
        salts = [submit.salt for submit in server.core.submitted]
        assert salts[0] == salts[2] != salts[1]
        assert "one" not in salts[0]


def test_a_full_queue_is_429_at_once() -> None:
    core = ReciterCore(pause=0.02, seats=4)
    with serving(core, max_unfinished=8) as server:

        async def burst() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
                began = time.monotonic()

                async def one() -> httpx.Response:
                    reply = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 20})
                    if reply.status_code == 429:
                        assert time.monotonic() - began < 5
                    return reply

                return await asyncio.gather(*(one() for _ in range(80)))

        replies = asyncio.run(burst())
        refused = [reply for reply in replies if reply.status_code == 429]
        served = [reply for reply in replies if reply.status_code == 200]
        assert len(refused) + len(served) == 80
        assert len(served) >= 8
        assert refused
        assert error_of(refused[0], 429)["type"] == "rate_limit_error"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert all(reply.json()["choices"][0]["text"] == recited(20) for reply in served)
        assert server.state.client.unfinished == 0
        with httpx.Client(base_url=server.url) as http:
            error = error_of(http.post("/v1/completions", json={"prompt": "a", "n": 9}), 400)
            assert error["param"] == "n"
            assert http.post("/v1/completions", json={"prompt": "a", "n": 8, "max_tokens": 2}).status_code == 200


def test_a_refused_request_gives_its_seats_back(running: Running, http: httpx.Client) -> None:
    for body in ({"prompt": "x" * 500}, {"prompt": [[1], [VOCAB]]}, {"prompt": "a", "n": 0}):
        assert http.post("/v1/completions", json=body).status_code == 400
    assert running.state.client.unfinished == 0
    assert not running.state.client.requests


# ---------------------------------------------------------------------------------------------------- disconnects


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(stream: bool) -> None:
    core = ReciterCore(pause=0.01)
    with serving(core) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 190, "stream": stream, "n": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        idle = len(asyncio.all_tasks(server.loop))
        raw = socket.create_connection((host, int(port)), 5)
        raw.sendall(head.encode() + body)
        wait_until(lambda: core.steps > 3)
        if stream:
            assert b"text/event-stream" in raw.recv(4000)
        raw.close()
        wait_until(lambda: len(core.aborted) == 2, 1.0)
        assert core.steps < 100
        assert server.state.client.unfinished == 0
        assert not core.rows
        wait_until(lambda: len(asyncio.all_tasks(server.loop)) <= idle, 2.0)  # nobody waits on for its answer
        page = httpx.get(f"{server.url}/metrics").text
        assert 'noria_request_success_total{finished_reason="abort",model_name="wheel"} 2.0' in page


def test_others_go_on_when_one_leaves() -> None:
    core = ReciterCore(pause=0.005)
    with serving(core) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        replies: list[httpx.Response] = []

        def stay() -> None:
            replies.append(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 60}))

        thread = threading.Thread(target=stay)
        thread.start()
        with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "b", "stream": True}) as reply:
            next(reply.iter_bytes())
        thread.join()
        assert replies[0].json()["choices"][0]["text"] == recited(60)


def test_unknown_fields_are_counted(running: Running, http: httpx.Client) -> None:
    def counted() -> float:
        lines = http.get("/metrics").text.splitlines()
        line = next(line for line in lines if line.startswith("noria_request_unknown_fields_total{"))
        return float(line.rpartition(" ")[2])

    before = counted()
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "metadata": {"a": "b"}, "temprature": 0, "mood": [1]}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert counted() == before + 2


def test_unknown_fields_are_refused_where_that_is_wanted() -> None:
    with serving(options=ServerOptions(strict_fields=True)) as server, httpx.Client(base_url=server.url) as http:
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "user": "me"}).status_code == 200
        refused = error_of(http.post("/v1/completions", json={"prompt": "a", "temprature": 0}), 400)
        assert refused["param"] == "temprature"
        assert "temperature" in refused["message"]


def test_a_dead_engine_is_503_everywhere() -> None:
    core = ReciterCore(pause=0.01)
    with serving(core) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        replies: list[httpx.Response] = []
        threads = [
            threading.Thread(
                target=lambda stream=stream: replies.append(
                    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 150, "stream": stream})
                )
            )
            for stream in (False, True)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(core.rows) == 2)
        core.broken = True
        for thread in threads:
            thread.join()
        whole = next(reply for reply in replies if reply.status_code != 200)
        assert error_of(whole, 503)["type"] == "service_unavailable_error"
        assert "retry-after" in whole.headers
        streamed = next(reply for reply in replies if reply.status_code == 200)
        assert '"code":"service_unavailable"' in streamed.text
        assert http.get("/health").status_code == 503
        error_of(http.post("/v1/completions", json={"prompt": "a"}), 503)
        assert server.state.client.unfinished == 0
        assert http.get("/metrics").status_code == 200


def test_defaults_of_the_model() -> None:
    core = ReciterCore()
    with (
        serving(core, defaults=Defaults(temperature=0.2, top_k=50)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        http.post("/v1/completions", json={"prompt": "a"})
        http.post("/v1/completions", json={"prompt": "a", "temperature": 0.9, "ignore_eos": True, "priority": 4})
    first, second = core.submitted
    assert (first.params.temperature, first.params.top_k, first.stop_ids) == (0.2, 50, (EOS,))
    assert (second.params.temperature, second.params.top_k, second.stop_ids) == (0.9, 50, ())
    assert (first.priority, second.priority) == (0, 4)
