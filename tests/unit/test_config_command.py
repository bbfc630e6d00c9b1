"""`noria config`: what it prints is true, can be used again, and tells no secrets. The schema and the reader agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from noria.cli.common import server_options
from noria.cli.config import problem_of
from noria.cli.main import main
from noria.cli.resolve import options_of, resolve
from noria.cli.schema import schema
from noria.cli.sections import KEYS
from noria.config import ENGINE_SETTINGS
from noria.errors import ConfigError

DATA = Path(__file__).parent.parent / "data"
BATCHING, ENGINE = DATA / "continuous_batching.yaml", DATA / "engine.yaml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["config", *arguments])
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


def test_what_is_shown_is_a_file_that_means_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "64", "--slo-tpot-ms", "50", "--cors-allow-origins", "*", "--static-batching")
    code, out, err = run(capsys, "show", "some/model", "--config", str(BATCHING), *flags)
    assert (code, err) == (0, "")
    again = tmp_path / "again.yaml"
    again.write_text(out)
    given = {"max_num_seqs": 64, "slo_tpot_ms": 50.0, "cors_allow_origins": ["*"], "static_batching": True}
    wanted = options_of(resolve([BATCHING], {"model": "some/model"} | given))
    assert options_of(resolve([again], {})) == wanted
    assert wanted[1].scheduler.continuous is False


def test_every_value_has_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "m", "--config", str(BATCHING), "--max-num-seqs", "64", "--threads", "3")
    lines = {line.split(":")[0].strip(): line for line in out.splitlines() if ":" in line}
    assert lines["max_num_seqs"].endswith("# flag --max-num-seqs")
    assert lines["threads"].split("#")[0].split() == ["threads:", "3"]
    assert lines["model"].endswith("# argument MODEL")
    place = f"{BATCHING}:19 continuous_batching.adaptive_batch_size.smoothing_factor"
    assert lines["smoothing_factor"].endswith(place)
    assert BATCHING.read_text().splitlines()[18].split(":")[0].strip() == "smoothing_factor"
    assert lines["dtype"].endswith("# default")


def test_every_setting_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "--json")
    shown = json.loads(out)
    assert (code, shown["problem"]) == (0, None)
    settings = shown["settings"]
    assert {name.partition(".")[0] for name in settings} >= set(ENGINE_SETTINGS) | {"model", "port", "api_key"}
    assert settings["block_size"] == {"source": "default", "value": 16}
    assert settings["static_batching"]["value"] is False
    assert settings["rules.growth"]["value"] == 1.25


def test_what_cannot_be_served_is_shown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", "m", "--config", str(ENGINE))
    assert code == 1
    assert yaml.safe_load(out)["tensor_parallel_size"] == 8
    assert err.startswith(f"noria: {ENGINE}:10: tensor_parallel.size: 8 is not yet possible")
    assert len(err.splitlines()) == 1
    code, _, err = run(capsys, "show", "m", "--config", str(ENGINE), "--tensor-parallel-size", "1")
    assert (code, err) == (0, "")


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "noria.yaml"
    path.write_text("api_key: [hunter2, hunter3]\n")
    given = ("--config", str(path), "--ssl-keyfile-password", "hunter4", "--api-key", "hunter5")
    for form in ((), ("--json",)):
        for flags in (given, given[:2]):
            _, out, err = run(capsys, "show", *flags, *form)
            assert "hunter" not in out + err
            assert "api_key" in out


def test_a_wrong_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "noria.yaml"
    path.write_text("max-num-seq: 4")
    code, out, err = run(capsys, "show", "--config", str(path))
    assert (code, out) == (2, "")
    assert err == f"noria: {path}:1: max_num_seq: there is no such key; did you mean max_num_seqs?\n"


def test_the_schema_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "schema")
    assert code == 0
    made = json.loads(out)
    assert made == json.loads(json.dumps(schema()))
    jsonschema.Draft202012Validator.check_schema(made)


def valid(content: Any) -> bool:
    return jsonschema.Draft202012Validator(schema()).is_valid(content)


@pytest.mark.parametrize("path", [BATCHING, ENGINE], ids=lambda path: path.name)
def test_the_files_of_the_mission_are_valid(path: Path) -> None:
    jsonschema.Draft202012Validator(schema()).validate(yaml.safe_load(path.read_text()))


def test_what_is_shown_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "m", "--config", str(BATCHING))
    jsonschema.Draft202012Validator(schema()).validate(yaml.safe_load(out))


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("path", KEYS)
@pytest.mark.parametrize("value", [True, False, 0, 1, 3, 16, 0.25, 1e9, -1, "lru", "slo", "ring", "x", None, [], {}])
def test_the_schema_agrees_with_the_reader(path: str, value: Any) -> None:
    """(A whole number with a point is an integer to JSON schema, and none to us: 1e9 is left out there.)"""
    if KEYS[path].kind is int and value == 1e9:
        return
    assert valid(nested(path, value)) == (KEYS[path].problem(value) is None)


@pytest.mark.parametrize(
    "content",
    [{"max_num_seqs": "many"}, {"max_num_seq": 3}, {"continuous_batching": {"num_blocks": 3}}, {"rules": {"x": 1}}, []],
)
def test_the_schema_refuses(content: Any) -> None:
    assert not valid(content)


@pytest.mark.parametrize(
    "content", [None, {}, {"max-num-seqs": 3}, {"api_key": "k"}, {"api_key": ["k"]}, {"rules": None}]
)
def test_the_schema_accepts(content: Any) -> None:
    assert valid(content)


def test_defaults_have_no_problem() -> None:
    assert problem_of({}) is None
    with pytest.raises(ConfigError, match="which model"):
        options_of({})
    assert server_options({}).metrics
