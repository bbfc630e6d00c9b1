"""Flags, files and errors of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from noria.cli.common import SERVER_SETTINGS, server_options
from noria.cli.flags import ENGINE_FLAGS, SERVER_FLAGS
from noria.cli.main import COMMANDS, main
from noria.config import ENGINE_SETTINGS, EngineOptions, engine_options
from noria.errors import ConfigError


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


def test_every_flag_is_a_setting_and_back() -> None:
    assert {flag.name for flag in SERVER_FLAGS} == set(SERVER_SETTINGS)
    assert {flag.name for flag in ENGINE_FLAGS} == set(ENGINE_SETTINGS) - {"in_flight_depth", "rules"}


def test_every_field_of_the_engine_has_a_setting() -> None:
    fields = {
        (part.name, field.name)
        for part in msgspec.structs.fields(EngineOptions)
        for field in msgspec.structs.fields(part.type)
    }
    assert fields - set(ENGINE_SETTINGS.values()) == {("model", "model"), ("scheduler", "max_preemptions")}


def test_settings_reach_their_place() -> None:
    options = engine_options(
        "m", gpu_memory_utilization=0.5, static_batching=True, scheduling_policy="priority", threads=3, num_blocks=7
    )
    assert options.cache.memory_utilization == 0.5
    assert options.cache.num_blocks == 7
    assert options.scheduler.continuous is False
    assert options.scheduler.policy == "priority"
    assert options.device.threads == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 3}, "max_num_seq: there is no such setting; did you mean max_num_seqs?"),
        ({"dtype": "f16"}, "--dtype: must be one of auto, f32, bf16; got 'f16'"),
        ({"max_num_seqs": "many"}, "--max-num-seqs: Expected `int`, got `str`; got 'many'"),
        ({"max_num_seqs": 0}, "--max-num-seqs: must be in 1…1024, got 0"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: 2 is not yet possible"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        engine_options("m", **settings)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"port": 70000}, "--port"),
        ({"api_key": [""]}, "--api-key"),
        ({"log_level": "loud"}, "--log-level"),
        ({"max_body_bytes": 1}, "--max-body-bytes"),
        ({"drain_timeout": -1}, "--drain-timeout"),
        ({"grammar_timeout": 0}, "--grammar-timeout"),
    ],
)
def test_bad_server_settings_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        server_options(settings)
    assert raised.value.field == field


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",)):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert all(name in out for name in COMMANDS)
    assert run(capsys, "--version")[1].startswith("noria 0")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "Usage" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serv",), "there is no command 'serv'; did you mean serve?"),
        (("serve",), "which model?"),
        (("serve", "a", "--model", "b"), "--model: MODEL is 'a' and --model is 'b'"),
        (("serve", "a", "--dtype", "f16"), "--dtype: must be one of"),
        (("serve", "no-such-model", "--port", "0"), "no-such-model"),
        (("chat", "no-such-model"), "no-such-model"),
        (("chat", "http://127.0.0.1:9", "--threads", "2"), "--threads: only for a model that is loaded here"),
        (("chat", "http://127.0.0.1:9"), "cannot talk to http://127.0.0.1:9"),
        (("serve", "a", "--port", "many"), "Invalid value for '--port'"),
        (("serve", "a", "--max-num-seq", "3"), "No such option: --max-num-seq"),
        (("serve", "a", "b"), "`noria serve --help` tells more"),
        (("bench", "nothing"), "No such command 'nothing'; `noria bench --help` tells more"),
        (("bench", "serve", "--frob"), "`noria bench serve --help` tells more"),
        (("bench", "offline", "--num-requests", "0"), "--num-requests: must be at least 1"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NORIA_DEBUG", raising=False)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("noria: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "╭" not in err
    assert "Traceback" not in err


def test_without_arguments_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "bench", "config"):
        _, out, _ = run(capsys, command)
        assert "Usage" in out


def test_doctor_names_a_wrong_level() -> None:
    program = "from noria.cli.main import main; main(['doctor'])"
    environment = {**os.environ, "NORIA_ISA": "avx9000"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("noria: NORIA_ISA: ")
    assert "Traceback" not in ended.stderr


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from noria.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'typer', 'rich', 'starlette', 'uvicorn', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
