"""Safetensors checkpoints: layouts, element types, damaged files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from noria.errors import UnsupportedModelError, WeightsError
from noria.files.safetensors import INDEX, SafetensorsCheckpoint

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.asarray([[1.5, -2.0], [3.25, 0.0]], ml_dtypes.bfloat16),
    "d": np.arange(3, dtype=np.int32),
    "e": np.asarray(7, np.uint8),
}


def make(folder: Path, files: dict[str, list[str]], index: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    for file, names in files.items():
        save_file({name: ARRAYS[name] for name in names}, folder / file)
    if index:
        names = {name: file for file, inside in files.items() for name in inside}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def test_arrays_are_read_as_written(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(make(tmp_path, {"model.safetensors": list(ARRAYS)}))
    assert checkpoint.config["hidden_size"] == 8
    assert set(checkpoint.names) == set(ARRAYS)
    for name, want in ARRAYS.items():
        got = checkpoint.array(name)
        assert got.dtype == want.dtype
        assert got.shape == checkpoint.shape(name) == want.shape
        np.testing.assert_array_equal(got, want)
    assert checkpoint.dtype("c") == "BF16"
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.array("a")[0, 0] = 1
    with pytest.raises(WeightsError, match="nothing"):
        checkpoint.array("nothing")


def test_index_says_which_files_belong(tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
    make(tmp_path, files, index=True)
    save_file({"stray": ARRAYS["d"]}, tmp_path / "other.safetensors")
    assert set(SafetensorsCheckpoint(tmp_path).names) == {"a", "b", "c"}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002\.safetensors is missing \(1 of 2"):
        SafetensorsCheckpoint(tmp_path)


def test_index_must_agree_with_the_files(tmp_path: Path) -> None:
    make(tmp_path, {"model-1.safetensors": ["a"], "model-2.safetensors": ["b"]})
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(WeightsError, match=r"model-2\.safetensors holds 'c'"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors", "model.bin", 3])
def test_index_cannot_leave_its_directory(tmp_path: Path, file: object) -> None:
    make(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(WeightsError, match="weight_map: a:"):
        SafetensorsCheckpoint(tmp_path)


def test_without_an_index_all_parts_are_read_but_not_repetitions(tmp_path: Path) -> None:
    make(tmp_path, {"x-1.safetensors": ["a"], "x-2.safetensors": ["b"], "consolidated.safetensors": ["a"]})
    assert set(SafetensorsCheckpoint(tmp_path).names) == {"a", "b"}
    save_file({"a": ARRAYS["a"]}, tmp_path / "x-3.safetensors")
    with pytest.raises(WeightsError, match=r"'a' is also in x-1\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_lone_file_needs_no_config(tmp_path: Path) -> None:
    save_file({"a": ARRAYS["a"]}, tmp_path / "w.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path / "w.safetensors")
    assert checkpoint.config == {}
    np.testing.assert_array_equal(checkpoint.array("a"), ARRAYS["a"])


def header(fields: object, data: bytes = b"") -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


BAD = {
    "empty": b"",
    "header length": struct.pack("<Q", 2**63) + b"{}",
    "no json": header(b"]["),
    "behind the end": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(8)),
    "shape and bytes": header({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, bytes(16)),
    "overflow": header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, bytes(16)),
    "gap": header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, bytes(16)),
    "more data": header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(16)),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_file_is_a_clean_error(tmp_path: Path, case: str) -> None:
    make(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(BAD[case])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    make(tmp_path, {})
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    text += " " * ((3 - len(text)) % 8)
    data = np.asarray([1.5, -2], np.float32)
    (tmp_path / "model.safetensors").write_bytes(header(text.encode(), data.tobytes()))
    np.testing.assert_array_equal(SafetensorsCheckpoint(tmp_path).array("a"), data)


def test_unknown_element_type_is_named(tmp_path: Path) -> None:
    make(tmp_path, {})
    fields = {"a": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}}
    (tmp_path / "model.safetensors").write_bytes(header(fields, bytes(8)))
    with pytest.raises(UnsupportedModelError, match="F8_E8M0"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is no JSON"), ("[1]", "must hold a JSON object"), (None, "config.json is missing")]
)
def test_bad_config_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    make(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(WeightsError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no safetensors file"):
        SafetensorsCheckpoint(make(tmp_path, {}))
