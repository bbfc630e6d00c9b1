"""Addresses, Unix sockets, certificates, and pages of other origins."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from fakes import serving, wait_until
from test_serve_command import serving as serve_command

from helpers.tiny_models import write_checkpoint
from noria.cli.common import server_options
from noria.config import ServerOptions
from noria.errors import ConfigError
from noria.server.listen import certificate, listening, url_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_checkpoint("llama", folder)
    return folder


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths: certificate, key, both, another key, the key encrypted with `secret`, the authority, and nonsense."""
    folder = tmp_path_factory.mktemp("certificates")
    made, other = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("other")
    key = load_pem_private_key(made.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    contents = {
        "cert": made.cert_chain_pems[0].bytes(),
        "key": made.private_key_pem.bytes(),
        "both": made.private_key_and_cert_chain_pem.bytes(),
        "other": other.private_key_pem.bytes(),
        "encrypted": encrypted,
        "ca": authority.cert_pem.bytes(),
        "nonsense": b"nothing",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: str(folder / name) for name in contents}


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


# ---------------------------------------------------------------------------------------------------- certificates


def test_no_certificate_is_no_tls() -> None:
    assert certificate(ServerOptions()) is None


def test_tls_is_1_2_at_least(files: dict[str, str]) -> None:
    context = certificate(ServerOptions(ssl_certfile=files["both"]))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert certificate(
        ServerOptions(ssl_certfile=files["cert"], ssl_keyfile=files["encrypted"], ssl_keyfile_password="secret")
    )


@pytest.mark.parametrize(
    ("given", "flag", "message"),
    [
        ({"ssl_keyfile": "key"}, "--ssl-keyfile", "needs --ssl-certfile"),
        ({"ssl_ca_certs": "ca"}, "--ssl-ca-certs", "needs --ssl-certfile"),
        ({"ssl_certfile": "none"}, "--ssl-certfile", "cannot be read: No such file"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "none"}, "--ssl-keyfile", "cannot be read"),
        ({"ssl_certfile": "cert"}, "--ssl-certfile", "a key is needed too"),
        ({"ssl_certfile": "nonsense", "ssl_keyfile": "key"}, "--ssl-certfile", "not a certificate and its key"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "other"}, "--ssl-keyfile", "is not the key of"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "encrypted"}, "--ssl-keyfile-password", "the key is encrypted; give"),
        (
            {"ssl_certfile": "cert", "ssl_keyfile": "encrypted", "ssl_keyfile_password": "guess"},
            "--ssl-keyfile-password",
            "this is not its password",
        ),
        ({"ssl_certfile": "both", "ssl_ca_certs": "nonsense"}, "--ssl-ca-certs", "no certificates in PEM"),
        ({"ssl_certfile": "both", "ssl_ca_certs": "none"}, "--ssl-ca-certs", "cannot be read"),
    ],
)
def test_what_does_not_fit_is_named_at_the_start(
    files: dict[str, str], given: dict[str, str], flag: str, message: str
) -> None:
    paths = {name: value if name.endswith("password") else files.get(value, value) for name, value in given.items()}
    with pytest.raises(ConfigError, match=message) as raised:
        server_options(paths)
    assert raised.value.field == flag


def test_it_serves_https_to_those_with_a_certificate(
    tiny: Path, tmp_path: Path, files: dict[str, str], authority: trustme.CA
) -> None:
    flags = ("--ssl-certfile", files["cert"], "--ssl-keyfile", files["key"], "--ssl-ca-certs", files["ca"])
    with serve_command(tiny, tmp_path, *flags) as server:
        assert server.url.startswith("https://")
        context = trusting(authority)
        with pytest.raises(httpx.TransportError), httpx.Client(verify=context) as http:
            http.get(f"{server.url}/health")
        authority.issue_cert("client").configure_cert(context)
        with httpx.Client(verify=context, timeout=60) as http:
            assert http.get(f"{server.url}/health").json() == {"status": "ok"}
            body = {"prompt": "water", "max_tokens": 3}
            assert http.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


# ---------------------------------------------------------------------------------------------------- Unix sockets


def test_it_serves_on_a_unix_socket_and_reads_its_keys_again(tiny: Path, tmp_path: Path) -> None:
    path, keys = tmp_path / "socket", tmp_path / "keys.yaml"
    keys.write_text("- {name: first, key: one}")
    keys.chmod(0o600)
    with serve_command(tiny, tmp_path, "--uds", str(path), "--api-key-file", str(keys)) as server:
        assert server.url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", timeout=60) as http:

            def ask(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                body = {"prompt": "water", "max_tokens": 3}
                return http.post("/v1/completions", json=body, headers=headers).status_code

            assert [ask("one"), ask("two")] == [200, 401]
            keys.write_text("- {name: second, key: two}")
            os.kill(server.process.pid, signal.SIGHUP)
            wait_until(lambda: server.said("1 API keys are in force"))
            assert [ask("one"), ask("two")] == [401, 200]
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert not path.exists()


def test_permissions_of_the_socket_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listening(ServerOptions(uds=str(path), uds_permissions="660")) as listener:
        assert path.stat().st_mode & 0o777 == 0o660
        assert url_of(listener, secure=False) == f"unix:{path}"
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening(ServerOptions(uds=str(path))):
        with pytest.raises(ConfigError, match="a server listens on"), listening(ServerOptions(uds=str(path))):
            pass
        assert path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"), listening(ServerOptions(uds=str(path))):
        pass
    assert path.read_text() == "mine"
    with (
        pytest.raises(ConfigError, match="--uds: cannot listen"),
        listening(ServerOptions(uds=f"{tmp_path}/no/socket")),
    ):
        pass


def test_of_servers_that_start_together_one_has_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
        together, done = threading.Barrier(4), threading.Barrier(4)

        def start(together: threading.Barrier = together, done: threading.Barrier = done) -> str:
            together.wait(10)
            try:
                with listening(ServerOptions(uds=str(path))):
                    done.wait(10)
                    return "listens"
            except ConfigError as error:
                done.wait(10)
                return "already" if "already" in str(error) else str(error)

        with ThreadPoolExecutor(4) as pool:
            ended = [future.result() for future in [pool.submit(start) for _ in range(4)]]
        assert sorted(ended) == ["already"] * 3 + ["listens"]
        assert not path.exists()


def test_addresses_are_shown_as_clients_write_them() -> None:
    with listening(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, secure=False) == f"http://127.0.0.1:{port}/v1"
        assert url_of(listener, secure=True) == f"https://127.0.0.1:{port}/v1"
        with pytest.raises(ConfigError, match="in use"), listening(ServerOptions(port=port)):
            pass


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"uds_permissions": "999"}, "--uds-permissions"),
        ({"max_connections": 0}, "--max-connections"),
        ({"max_header_bytes": 10}, "--max-header-bytes"),
        ({"client_timeout": float("nan")}, "--client-timeout"),
        ({"cors_allow_origins": ["example.com"]}, "--cors-allow-origins"),
        ({"cors_allow_origins": ["https://example.com/"]}, "--cors-allow-origins"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        server_options(settings)
    assert raised.value.field == flag


@pytest.mark.parametrize("name", ["api_key", "ssl_keyfile_password"])
def test_secrets_are_not_repeated(name: str) -> None:
    for value in (12345, [12345]):  # as YAML reads what somebody wrote without quotes
        with pytest.raises(ConfigError) as raised:
            server_options({name: value})
        assert "12345" not in str(raised.value)


# ---------------------------------------------------------------------------------------------------- other origins

PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def test_pages_of_other_origins_may_call_only_if_they_are_named() -> None:
    mine, other = {"origin": "https://mine.example"}, {"origin": "https://other.example"}
    options = ServerOptions(cors_allow_origins=("https://mine.example",), api_keys=("one",))
    with serving(options=options) as server, httpx.Client(base_url=server.url) as http:
        asked = http.options("/v1/chat/completions", headers=mine | PREFLIGHT)
        assert asked.status_code == 200  # without a key: a browser sends none here
        assert asked.headers["access-control-allow-origin"] == "https://mine.example"
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        assert http.options("/v1/chat/completions", headers=other | PREFLIGHT).status_code == 400
        reply = http.post("/v1/completions", json={"prompt": "a"}, headers=mine | {"authorization": "Bearer one"})
        assert reply.headers["access-control-allow-origin"] == "https://mine.example"
        exposed = reply.headers["access-control-expose-headers"]
        assert "x-ratelimit-remaining-tokens" in exposed
        assert "retry-after" in exposed
        refused = http.get("/v1/models", headers=mine)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://mine.example"
        assert "access-control-allow-origin" not in http.get("/health", headers=other).headers


def test_without_the_flag_no_page_may_call() -> None:
    with serving() as server, httpx.Client(base_url=server.url) as http:
        headers = {"origin": "https://mine.example"} | PREFLIGHT
        asked = http.options("/v1/chat/completions", headers=headers)
        assert asked.status_code == 405
        assert "access-control-allow-origin" not in asked.headers
