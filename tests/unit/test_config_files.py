"""Configuration files: what may stand in them, what wins, and how what is wrong is said."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from noria.cli.common import FLAT, SERVER_SETTINGS
from noria.cli.keys import Key
from noria.cli.resolve import options_of, read_files, resolve
from noria.cli.sections import KEYS, SECTIONS
from noria.config import ENGINE_SETTINGS
from noria.errors import ConfigError

DATA = Path(__file__).parent.parent / "data"
MISSION = (DATA / "continuous_batching.yaml", DATA / "engine.yaml")


def written(folder: Path, text: str, name: str = "noria.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        options_of(resolve([path], {"model": "m"} | flags))
    return str(raised.value).replace(str(path), path.name)


def test_the_file_of_the_mission_is_accepted_as_it_is() -> None:
    name, engine, server = options_of(resolve([MISSION[0]], {"model": "m"}))
    assert name == "m"
    assert (engine.scheduler.max_num_seqs, engine.scheduler.build_interval) == (1024, 0.001)
    assert (engine.pacer.predictor, engine.pacer.smoothing_factor) == ("rules", 0.7)
    assert (engine.cache.num_blocks, engine.cache.reclaim_strategy) == (1024, "lru")
    assert (server.log_format, server.metrics) == ("json", True)


def test_every_key_of_the_mission_is_known() -> None:
    assert len(read_files(MISSION)) == 42
    assert set(read_files(MISSION)) <= set(KEYS)


def test_the_second_file_is_refused_on_one_rank_and_names_both_sizes(tmp_path: Path) -> None:
    said = refusal(MISSION[1])
    assert said.startswith("engine.yaml:10: tensor_parallel.size: 8 is not yet possible")
    assert f"{MISSION[1]}:4: engine_config.tensor_parallel_size is 2" in said.replace("(engine", f"({DATA}/engine")
    _, engine, _ = options_of(resolve(MISSION[1:], {"model": "m", "tensor_parallel_size": 1}))
    assert (engine.model.max_model_len, engine.cache.memory_utilization) == (4096, 0.9)
    assert engine.device.tensor_parallel_size == 1


def test_an_enabled_section_goes_before_the_size_beside_it(tmp_path: Path) -> None:
    text = "engine_config: {tensor_parallel_size: 2}\ntensor_parallel: {enabled: %s, size: 1}"
    assert options_of(resolve([written(tmp_path, text % "true")], {"model": "m"}))[1].device.tensor_parallel_size == 1
    said = refusal(written(tmp_path, text % "false"))
    assert said.startswith("noria.yaml:1: engine_config.tensor_parallel_size: 2 is not yet possible")


def test_a_file_holds_flags_and_flags_win(tmp_path: Path) -> None:
    text = "model: from-file\nmax-num-seqs: 4\nblock_size: 32\napi-key: secret\nport: 9000\nrules: {growth: 2}\n"
    path = written(tmp_path, text)
    name, engine, server = options_of(resolve([path], {"max_num_seqs": 8}))
    assert (name, engine.scheduler.max_num_seqs, engine.cache.block_size) == ("from-file", 8, 32)
    assert (server.api_keys, server.port) == (("sha256:" + sha256(b"secret").hexdigest(),), 9000)
    assert engine.pacer.rules.growth == 2
    assert options_of(resolve([path], {"model": "given"}))[0] == "given"


def test_later_files_win_whatever_names_they_use(tmp_path: Path) -> None:
    first = written(tmp_path, "continuous_batching: {max_batch_size: 5, min_batch_size: 2}\nblock_size: 8", "1.yaml")
    second = written(tmp_path, "max_num_seqs: 6\ncontinuous_batching: {block_allocation: {block_size: 64}}", "2.yaml")
    _, engine, _ = options_of(resolve([first, second], {"model": "m"}))
    assert (engine.scheduler.max_num_seqs, engine.cache.block_size, engine.pacer.min_batch_size) == (6, 64, 2)
    _, engine, _ = options_of(resolve([second, first], {"model": "m"}))
    assert (engine.scheduler.max_num_seqs, engine.cache.block_size) == (5, 8)


def test_a_switch_goes_before_its_keys(tmp_path: Path) -> None:
    text = "continuous_batching: {performance_optimization: {enabled: false, enable_prefetch: true}}"
    path = written(tmp_path, text)
    _, engine, _ = options_of(resolve([path], {"model": "m"}))
    scheduler = engine.scheduler
    assert (scheduler.async_planning, scheduler.fusion, scheduler.prefetch) == (False, False, False)
    _, engine, _ = options_of(resolve([path], {"model": "m", "enable_prefetch": True}))
    assert engine.scheduler.prefetch
    path = written(tmp_path, "continuous_batching: {monitoring: {enabled: false, log_level: debug}}")
    server = options_of(resolve([path], {"model": "m"}))[2]
    assert (server.metrics, server.log_level) == (False, "none")


_CB = "continuous_batching"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 4", "noria.yaml:1: max_num_seq: there is no such key; did you mean max_num_seqs?"),
        (
            "continuous_batching:\n  adaptive_batch_size:\n    smoothing: 0.5",
            f"noria.yaml:3: {_CB}.adaptive_batch_size.smoothing: there is no such key; did you mean smoothing_factor?",
        ),
        (
            "continuous_batching: {num_blocks: 4}",
            f"noria.yaml:1: {_CB}.num_blocks: there is no such key; did you mean num_blocks, at the top of the file?",
        ),
        (
            "use_ml_model: true",
            f"noria.yaml:1: use_ml_model: there is no such key; did you mean {_CB}.adaptive_batch_size.use_ml_model?",
        ),
        (
            "adaptive_batch_size:\n  use_ml_model: true",
            "noria.yaml:1: adaptive_batch_size: is a flag with one value; did you mean the section",
        ),
        (
            "engine_config: {max_modellen: 1}",
            "noria.yaml:1: engine_config.max_modellen: there is no such key; did you mean max_model_len?",
        ),
        (
            "tensor_parallel: {pipeline_parallel_sise: 1}",
            "there is no such key; did you mean pipeline_parallel_size, at the top of the file?",
        ),
        ("tensor_parallel: {frobnicate: 1}", "there is no such key; known here: enabled, method, size"),
        ("- a", "noria.yaml must hold `key: value` lines, not a list"),
        ("continuous_batching: 3", "noria.yaml:1: continuous_batching: must hold keys of its own, not a single value"),
        ("a: [", "noria.yaml is not valid YAML"),
        ("port: 1\n---\nport: 2", "noria.yaml is not valid YAML"),
        ("port: 1\nhost: x\nport: 2", "noria.yaml:3: port: stands twice, first at noria.yaml:1"),
        ("port: 70000", "noria.yaml:1: port: must be in 0…65535, got 70000"),
        ("max_model_len: -1", "noria.yaml:1: max_model_len: must be in 1…2147483647, got -1"),
        ("static_batch_timeout: .nan", "noria.yaml:1: static_batch_timeout: must be in 0…3600 seconds, got nan"),
        ("\nmax_num_seqs: many", "noria.yaml:2: max_num_seqs: Expected `int`, got `str`; got 'many'"),
        ("rules: {growth: 0.5}", "noria.yaml:1: rules.growth: must be a number above 1 and at most 16, got 0.5"),
        (
            "continuous_batching: {enabled: 'true'}",
            "continuous_batching.enabled: must be true or false, got 'true'; true and false are written without quotes",
        ),
        ("rules: {shrink: 1e-3}", "got '1e-3'; such a number is written with a point in YAML: 1.0e-3"),
        ("continuous_batching: {max_batch_size: 2000}", "max_batch_size: must be a whole number in 1…1024, got 2000"),
        ("continuous_batching: {max_batch_size: true}", "max_batch_size: must be a whole number in 1…1024, got True"),
        ("continuous_batching: {batch_build_interval: .nan}", "must be a number in 0…10, got nan"),
        (
            "continuous_batching: {block_allocation: {block_size: 15}}",
            "block_size: must be one of 8, 16, 32, 64, 128, got 15",
        ),
        (
            "continuous_batching: {block_allocation: {reclaim_strategy: mru}}",
            "reclaim_strategy: must be one of lru, fifo, random, got 'mru'",
        ),
        (
            "max_num_seqs: 4\ncontinuous_batching:\n  max_batch_size: 5",
            f"noria.yaml:3: {_CB}.max_batch_size: contradicts noria.yaml:1: max_num_seqs; leave one out",
        ),
        (
            "continuous_batching:\n  min_batch_size: 9\n  max_batch_size: 8",
            f"noria.yaml:2: {_CB}.min_batch_size: must be at most --max-num-seqs, which is 8; got 9",
        ),
        (
            "continuous_batching: {speculative_decoding: {min_prediction_length: 9}}",
            "must fit min_prediction_length 9 ≤ prediction_length 4 ≤ max_prediction_length 8",
        ),
        (
            "continuous_batching: {adaptive_batch_size: {admission: slo}}",
            "admission: slo needs an objective",
        ),
    ],
)
def test_what_is_wrong_is_said_of_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(written(tmp_path, text))


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.missing], ids=lambda key: key.path)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, key: Key) -> None:
    said = refusal(written(tmp_path, nested(key.path, "true")))
    assert said == f"noria.yaml:1: {key.path}: {key.missing}; leave it at false"
    assert "not built yet" in key.missing
    resolve([written(tmp_path, nested(key.path, "false"))], {})


def nested(path: str, value: str) -> str:
    """A file with one key."""
    *sections, name = path.split(".")
    return "".join(f"{section}: {{" for section in sections) + f"{name}: {value}" + "}" * len(sections)


def test_nothing_is_a_file_too(tmp_path: Path) -> None:
    assert resolve([written(tmp_path, "")], {}) == {}
    assert resolve([written(tmp_path, "continuous_batching:\nengine_config:\n")], {}) == {}
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve([tmp_path / "nothing.yaml"], {})


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "engine_config: &a {max_model_len: 9}\ncontinuous_batching:\n  block_allocation:\n    <<: {num_blocks: 3}\n"
    _, engine, _ = options_of(resolve([written(tmp_path, text)], {"model": "m"}))
    assert (engine.model.max_model_len, engine.cache.num_blocks) == (9, 3)


def test_a_secret_is_not_repeated(tmp_path: Path) -> None:
    assert "hunter2" not in refusal(written(tmp_path, "api_key: {hunter2: 3}"))


def test_every_key_sets_something_that_exists() -> None:
    for key in KEYS.values():
        name = key.setting
        assert not name or name.startswith("rules.") or name in SERVER_SETTINGS or name in ENGINE_SETTINGS, key.path
        assert bool(name) != bool(key.when_false or key.default is not None), key.path
        assert key.path.rpartition(".")[0] in SECTIONS
    assert not set(FLAT) & set(SECTIONS)


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.span and key.setting], ids=lambda key: key.path)
def test_ranges_are_those_of_the_settings(tmp_path: Path, key: Key) -> None:
    """What the table allows at its bounds, the options allow too; and the flag beyond them is refused."""
    assert key.span is not None
    settings = {"max_num_seqs": 1024} if key.setting == "min_batch_size" else {}
    step = 1 if key.kind is int else 1e-6
    low, high = key.kind(key.span.low), key.kind(key.span.high)
    inside = [low + step if key.span.open_low else low, high - step if key.span.open_high else high]
    outside = [low if key.span.open_low else low - step, high if key.span.open_high else high + step]
    if key.setting in ("tensor_parallel_size", "pipeline_parallel_size"):
        inside = [1]
    if key.setting in ("num_blocks", "max_model_len"):
        inside, outside = inside[:1], []  # bounded by others, and by memory
    for value in inside:
        text = nested(key.path, f"{value:.7f}" if key.kind is float else str(value))
        options_of(resolve([written(tmp_path, text)], {"model": "m"} | settings))
    for value in outside:
        assert key.problem(value) is not None
        given = {"rules": {key.name: value}} if key.setting.startswith("rules.") else {key.setting: value}
        with pytest.raises(ConfigError):
            options_of(resolve([], {"model": "m"} | settings | given))


_DIGITS = "9" * 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nport: 2001-13-45", "noria.yaml:2: port: cannot be read as timestamp: month must be in 1..12"),
        ("port: 2001-01-02", "noria.yaml:1: port: must be a plain value, not a date; a text that looks like one needs"),
        ("served_model_name: !!binary aGk=", "noria.yaml:1: served_model_name: must be a plain value, not a bytes"),
        ("cors_allow_origins: [!!set {a}]", "noria.yaml:1: cors_allow_origins: must be a plain value, not a set"),
        ("rules: {growth: !!float x}", "noria.yaml:1: rules.growth: cannot be read as float"),
        ("rules: {growth: !!int ''}", "noria.yaml:1: rules.growth: cannot be read as int"),
        ("port: !!bool maybe", "noria.yaml:1: port: cannot be read as bool"),
        (f"port: {20 * _DIGITS}", "noria.yaml:1: port: cannot be read as int: Exceeds the limit"),
        (f"port: {_DIGITS}", "noria.yaml:1: port: must be in 0…65535"),
        (f"continuous_batching: {{max_batch_size: {_DIGITS}}}", "max_batch_size: must be a whole number in 1…1024"),
        (f"rules: {{growth: {_DIGITS}}}", "rules.growth: must be a number above 1 and at most 16"),
        ("? 2001-13-45\n: 1", "noria.yaml:1: cannot be read as timestamp"),
        ('served_model_name: "\\uD800"', "noria.yaml:1: served_model_name: holds characters that no text can have"),
        ('api_key_file: "a\\0"', "noria.yaml:1: api_key_file: holds characters that no text can have"),
        ("port: " + 2000 * "[", "noria.yaml is not valid YAML: nested too deeply"),
        ("port: 1\nhost: *nobody", "noria.yaml is not valid YAML, line 2: found undefined alias"),
    ],
)
def test_what_yaml_cannot_make_is_said_of_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(written(tmp_path, text))


def test_a_broken_line_with_a_secret_is_not_repeated(tmp_path: Path) -> None:
    said = refusal(written(tmp_path, 'port: 1\napi_key: "hunter2\n'))
    assert said.startswith("--config: noria.yaml is not valid YAML, line 3: ")
    assert "hunter2" not in said
