"""Keys and their limits, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import ReciterCore, Running, serving

from noria.config import ServerOptions

KEYS = """
- {name: team, key: one, share: 2, requests_per_minute: 3}
- {name: tokens, key: two, tokens_per_minute: 30}
- {name: free, key: three}
"""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return str(path)


def ask(server: Running, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 4} | body, headers=headers)


def test_each_key_is_a_tenant_with_its_share_and_its_salt(keys: str) -> None:
    with serving(options=ServerOptions(api_key_file=keys)) as server:
        for key in ("one", "two", "one"):
            assert ask(server, key).status_code == 200
        seen = [(submit.tenant, submit.share) for submit in server.core.submitted]
        salts = [submit.salt for submit in server.core.submitted]
    assert seen == [("team", 2.0), ("tokens", 1.0), ("team", 2.0)]
    assert salts[0] == salts[2] != salts[1]


def test_health_and_readiness_are_open_and_nothing_else(keys: str) -> None:
    with serving(options=ServerOptions(api_key_file=keys)) as server, httpx.Client(base_url=server.url) as http:
        for path in ("/health", "/ready", "/health/"):
            assert http.get(path).status_code == 200
        for path in ("/metrics", "/version", "/v1/models", "/openapi.json", "/health/x", "/nothing", "//health"):
            assert http.get(path).status_code == 401


def test_who_has_no_key_is_counted(keys: str) -> None:
    with serving(options=ServerOptions(api_key_file=keys)) as server:
        for _ in range(2):
            assert ask(server, "wrong").status_code == 401
        assert b'noria_request_refused_total{model_name="wheel",status="401"} 2.0' in server.state.metrics.render()


def test_requests_per_minute(keys: str) -> None:
    with serving(options=ServerOptions(api_key_file=keys)) as server:
        replies = [ask(server, "one") for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
        assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["2", "1", "0", "0"]
        refused = replies[-1]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "'team' may use 3 requests per minute" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert 0 < int(refused.headers["retry-after-ms"]) <= 20_000
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        assert ask(server, "three").status_code == 200
        assert "x-ratelimit-limit-requests" not in ask(server, "three").headers
        headers = {"authorization": "Bearer one"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200  # only what generates counts


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_minute(keys: str, stream: bool) -> None:
    with serving(options=ServerOptions(api_key_file=keys)) as server:
        too_long = ask(server, "two", prompt="x" * 31)
        assert too_long.status_code == 400
        assert "may use 30 per minute" in too_long.json()["error"]["message"]
        first = ask(server, "two", prompt="x" * 10, max_tokens=25, stream=stream)
        assert first.status_code == 200
        assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 19
        refused = ask(server, "two")
        assert refused.status_code == 429
        assert "30 tokens per minute" in refused.json()["error"]["message"]
        # Six tokens are owed and one is wanted, at half a token a second.
        assert 1 <= int(refused.headers["retry-after"]) <= 14
        assert len(server.core.submitted) == 1
        assert server.state.client.unfinished == 0


def test_metrics_name_the_keys_and_never_show_them(keys: str) -> None:
    with serving(options=ServerOptions(api_key_file=keys, api_keys=("secret",))) as server:
        assert ask(server, "three", prompt="xyz", max_tokens=5).status_code == 200
        for _ in range(4):
            ask(server, "one")
        headers = {"authorization": "Bearer secret"}
        page = httpx.get(f"{server.url}/metrics", headers=headers).text
    for line in (
        'noria_key_requests_total{key="free",model_name="wheel"} 1.0',
        'noria_key_prompt_tokens_total{key="free",model_name="wheel"} 4.0',
        'noria_key_generation_tokens_total{key="free",model_name="wheel"} 5.0',
        'noria_key_requests_total{key="team",model_name="wheel"} 3.0',
        'noria_key_limited_total{key="team",limit="requests",model_name="wheel"} 1.0',
        'noria_key_requests_total{key="key-1",model_name="wheel"} 0.0',
    ):
        assert line in page
    assert "secret" not in page
    assert "three" not in page


def test_without_keys_everybody_is_one_tenant() -> None:
    with serving(ReciterCore()) as server:
        assert ask(server, "whatever").status_code == 200
        assert [(one.tenant, one.share, one.salt) for one in server.core.submitted] == [("", 1.0, "")]
        assert "noria_key_" not in httpx.get(f"{server.url}/metrics").text
