"""Keeping what step times have taught: what comes back, and what is not believed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.step_times import decode, taught
from noria.messages import EngineInfo
from noria.pacer import store
from noria.pacer.steptime import StepTimeModel
from noria.pacer.store import Key, load, make_key, save, step_times_dir

KEY = Key(model="m 92", weights="int8", cache="int8", backend="cpu", isa="avx2", threads=2, processor="fast one")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NORIA_HOME", str(tmp_path / "noria"))
    return tmp_path / "noria"


def path() -> Path:
    return step_times_dir() / KEY.file


def change(**fields: Any) -> None:
    path().write_text(json.dumps(json.loads(path().read_text()) | fields))


def test_what_was_learned_comes_back(home: Path) -> None:
    model = taught()
    assert load(KEY) is None
    assert save(KEY, model.fit)
    assert path().parent == home / "step-times"
    assert path().stat().st_size < 4096
    fit = load(KEY)
    assert fit == model.fit
    assert StepTimeModel(fit).seconds(decode(30)) == pytest.approx(model.seconds(decode(30)), rel=0.1)  # but its mood
    assert [file.name for file in path().parent.iterdir()] == [KEY.file]


def test_another_model_or_machine_has_its_own() -> None:
    save(KEY, taught().fit)
    others = {"model": "n", "weights": "bf16", "cache": "f32", "backend": "x", "isa": "amx", "threads": 3}
    for name, value in (others | {"processor": "slow one"}).items():
        assert load(msgspec.structs.replace(KEY, **{name: value})) is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"format": 0}, "another version"),
        ({"profile": "00000000"}, "another version"),
        ({"key": msgspec.to_builtins(KEY) | {"threads": 3}}, "another model or machine"),
        ({"theta": [1.0]}, "another shape"),
        ({"theta": [-1.0] * 8}, "out of range"),
        ({"theta": [1e300] * 8}, "out of range"),
        ({"theta": ["x"] * 8}, "Expected `float`"),
        ({"information": [[1.0] * 8] * 7}, "another shape"),
        ({"information": [[1.0], [1.0, 2.0]]}, "inhomogeneous"),
        ({"information": [[-1.0 if i == j else 0.0 for i in range(8)] for j in range(8)]}, "no information"),
        ({"information": [[float(i) for i in range(8)] for _ in range(8)]}, "no information"),
        ({"sizes": [1]}, "another shape"),
        ({"sizes": [-1] * 17}, "out of range"),
        ({"sizes": [10**30] * 17}, "out of range"),
        ({"steps": -1}, "out of range"),
        ({"steps": 10**30}, "out of range"),
        ({"stretch": 1e9}, "not finite"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_what_is_wrong_is_ignored_with_one_line(
    fields: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(KEY, taught().fit)
    change(**fields)
    assert load(KEY) is None
    (record,) = caplog.records
    assert why in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 10_000, b" " * 100_000])
def test_what_is_no_such_file_is_ignored_with_one_line(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    save(KEY, taught().fit)
    path().write_bytes(data)
    assert load(KEY) is None
    assert len(caplog.records) == 1


def test_a_folder_in_its_place_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    path().mkdir(parents=True)
    assert load(KEY) is None
    assert not save(KEY, taught().fit)
    assert len(caplog.records) == 2
    assert [entry.name for entry in step_times_dir().iterdir()] == [KEY.file]  # nothing half written is left


def test_a_file_in_place_of_the_folder_is_no_error(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.write_text("")
    assert not save(KEY, taught().fit)
    assert load(KEY) is None
    assert len(caplog.records) == 2


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_FILES", 3)
    keys = [msgspec.structs.replace(KEY, threads=threads) for threads in range(1, 7)]
    for age, key in enumerate(keys):
        save(key, taught().fit)
        os.utime(step_times_dir() / key.file, (1e9 + age, 1e9 + age))
    assert [load(key) is not None for key in keys] == [False] * 3 + [True] * 3


def test_is_readable_by_its_user_only() -> None:
    save(KEY, taught().fit)
    assert stat.S_IMODE(path().stat().st_mode) == 0o600


def test_a_key_names_model_and_machine() -> None:
    info = EngineInfo(
        build_id="b",
        max_model_len=1,
        vocab_size=1,
        num_blocks=1,
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        backend="cpu",
        isa="amx",
        threads=2,
        weights="int8",
        cache_dtype="bf16",
        weight_bytes=1,
        cache_bytes=1,
    )
    key = make_key("no/such-model", info)
    assert (key.model, key.weights, key.cache, key.isa, key.threads) == ("no/such-model", "int8", "bf16", "amx", 2)
    assert key.processor
    assert key.file.startswith("no-such-model-")
