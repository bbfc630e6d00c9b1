"""GGUF container and block formats, against the `gguf` package; damaged files must fail cleanly."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noria.errors import ModelError, UnsupportedModelError, WeightsError
from noria.files.blocks import dequantise, grouped
from noria.files.gguf import GGUFFile

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Byte positions of the float16 fields of a block, which get ordinary numbers; the other bytes may be anything.
HALVES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_tensor(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Stored bytes [rows, bytes of a row] of a random tensor."""
    rng = np.random.default_rng(seed)
    kind_id = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16"):
        return gguf.quantize(rng.standard_normal((rows, width), dtype=np.float32), kind_id).view(np.uint8)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind_id]
    raw = rng.integers(0, 256, (rows * width // block, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = rng.standard_normal((len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def write_gguf(path: Path, kinds: list[str], values: dict[str, Any] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("answer", 42)
    writer.add_float32("pi", 3.25)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("names", ["a", "", "日本"])
    for key, value in (values or {}).items():
        writer.add_uint32(key, value)
    for kind in kinds:
        writer.add_tensor(f"t.{kind}", random_tensor(kind, 3, 512), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", TYPES)
def test_dequantised_values_equal_the_gguf_package_bit_for_bit(kind: str) -> None:
    raw = random_tensor(kind, 130, 1024)
    want = np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]), np.float32)
    got = dequantise(kind, raw.reshape(-1), (130, 1024))
    assert got.dtype == np.float32
    assert got.shape == (130, 1024)
    np.testing.assert_array_equal(got.view(np.uint32), want.reshape(130, 1024).view(np.uint32))


@pytest.mark.parametrize("kind", TYPES)
def test_grouped_holds_the_stored_values_exactly(kind: str) -> None:
    raw = random_tensor(kind, 130, 1024).reshape(-1)
    if kind == "Q8_0":
        raw.reshape(-1, 34)[:, 2:] = raw.reshape(-1, 34)[:, 2:].view(np.int8).clip(-127, 127).view(np.uint8)
    parts = grouped(kind, raw, (130, 1024))
    if kind not in ("Q8_0", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K"):
        assert parts is None
        return
    assert parts is not None
    assert parts.bits == (8 if kind == "Q8_0" else 4)
    assert parts.group == (16 if kind in ("Q2_K", "Q3_K") else 32)
    assert parts.codes.shape == (130, 1024)
    assert parts.scales.shape == (130, 1024 // parts.group)
    values = parts.codes.reshape(130, -1, parts.group).astype(np.float32) * parts.scales[..., None]
    if parts.bits == 4:
        assert parts.codes.dtype == np.uint8
        assert parts.codes.max() <= 15
        assert parts.minimums is not None
        values = values + parts.minimums[..., None]
    else:
        assert parts.minimums is None
    np.testing.assert_array_equal(values.reshape(130, 1024), dequantise(kind, raw, (130, 1024)))


def test_grouped_refuses_a_code_that_symmetric_kernels_cannot_hold() -> None:
    raw = np.zeros(34, np.uint8)
    raw[5] = 0x80
    assert grouped("Q8_0", raw, (1, 32)) is None
    assert dequantise("Q8_0", raw, (1, 32)).shape == (1, 32)


def test_wrong_lengths_and_unknown_types_are_refused() -> None:
    with pytest.raises(WeightsError, match="Q4_0"):
        dequantise("Q4_0", np.zeros(17, np.uint8), (1, 32))
    with pytest.raises(WeightsError, match="Q4_K"):
        grouped("Q4_K", np.zeros(143, np.uint8), (1, 256))
    with pytest.raises(UnsupportedModelError, match="IQ2_XS"):
        dequantise("IQ2_XS", np.zeros(74, np.uint8), (1, 256))


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", TYPES))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["answer"] == 42
    assert file.metadata["pi"] == 3.25
    assert file.metadata["yes"] is True
    assert file.metadata["text"] == "grüße"
    assert list(file.metadata["ints"]) == [1, -2, 3]
    assert file.metadata["names"] == ["a", "", "日本"]
    assert file.metadata.get("absent") is None
    assert list(file.tensors) == [f"t.{kind}" for kind in TYPES]
    for kind in TYPES:
        tensor = file.tensors[f"t.{kind}"]
        assert (tensor.shape, tensor.type) == ((3, 512), kind)
        np.testing.assert_array_equal(file.raw(tensor.name), random_tensor(kind, 3, 512).reshape(-1))
    with pytest.raises(WeightsError, match="nothing"):
        file.raw("nothing")


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("a", data)
    writer.add_tensor("b", data + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.tensors["b"].offset % 256 == 0
    np.testing.assert_array_equal(dequantise("F32", file.raw("b"), (3, 4)), data + 1)


def test_a_split_model_is_opened_as_one(tmp_path: Path) -> None:
    for i, kind in enumerate(["F32", "Q8_0"], 1):
        write_gguf(tmp_path / f"m-{i:05}-of-00002.gguf", [kind], {"split.count": 2, f"only.{i}": i})
    file = GGUFFile(tmp_path / "m-00001-of-00002.gguf")
    assert set(file.tensors) == {"t.F32", "t.Q8_0"}
    assert file.metadata["only.2"] == 2
    np.testing.assert_array_equal(file.raw("t.Q8_0"), random_tensor("Q8_0", 3, 512).reshape(-1))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(WeightsError, match=r"m-00002-of-00002\.gguf is missing"):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


# ------------------------------------------------------------------------------------------------ hostile files


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def hostile(tensors: int = 0, values: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + body


def entry(dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text("w") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset) + bytes(64)


HUGE = 2**63
BAD = {
    "empty": (b"", "header"),
    "magic": (b"ABCD" + bytes(40), "magic"),
    "big endian": (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(40), "version: a big-endian"),
    "version": (hostile(version=9), "version 9"),
    "tensor count": (hostile(tensors=HUGE), "tensor_count"),
    "value count": (hostile(values=HUGE), "metadata_kv_count"),
    "key length": (hostile(values=1, body=struct.pack("<Q", HUGE) + bytes(40)), "metadata key 0"),
    "value type": (hostile(values=1, body=text("k") + struct.pack("<I", 99) + bytes(40)), "k: unknown value type 99"),
    "array count": (hostile(values=1, body=text("k") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(40)), "k: needs"),
    "strings": (hostile(values=1, body=text("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(40)), "k: an array of"),
    "string end": (hostile(values=1, body=text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE) + bytes(40)), "k: entry 0"),
    "nested": (hostile(values=1, body=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50), "nested"),
    "twice": (hostile(values=2, body=(text("k") + struct.pack("<IB", 0, 1)) * 2 + bytes(40)), "k: the key appears"),
    "alignment": (
        hostile(values=1, body=text("general.alignment") + struct.pack("<II", 4, 0) + bytes(40)),
        "general.alignment",
    ),
    "dims": (hostile(tensors=1, body=entry([1] * 9)), "w: has 9 dimensions"),
    "zero dim": (hostile(tensors=1, body=entry([0, 4])), "w: dimensions"),
    "overflow": (hostile(tensors=1, body=entry([2**32, 2**32])), "w: dimensions"),
    "part of a block": (hostile(tensors=1, body=entry([31], kind=8)), "w: dimensions"),
    "tensor type": (hostile(tensors=1, body=entry([4], kind=77)), "w: unknown tensor type 77"),
    "offset": (hostile(tensors=1, body=entry([4], offset=HUGE)), "w: data ends at"),
    "odd offset": (hostile(tensors=1, body=entry([4], offset=7)), "w: offset 7"),
    "same tensor": (hostile(tensors=2, body=entry([4])[:-64] * 2 + bytes(64)), "w: the tensor appears twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_error_names_file_and_field(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    assert "bad.gguf" in str(caught.value)
    assert message in str(caught.value)


def test_missing_file_is_a_clean_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere\.gguf"):
        GGUFFile(tmp_path / "nowhere.gguf")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf", ["F32", "Q4_K"])
    return path, path.read_bytes()


def test_every_truncation_fails_cleanly(good: tuple[Path, bytes], tmp_path: Path) -> None:
    data = good[1]
    end = max(t.offset + t.nbytes for t in GGUFFile(good[0]).tensors.values())
    path = tmp_path / "short.gguf"
    for size in [*range(0, 700, 7), *range(700, end, 911), end - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(WeightsError, match=r"short\.gguf"):
            GGUFFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=12))
def test_corrupt_bytes_never_crash(good: tuple[Path, bytes], tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(good[1])
    for at, value in changes:
        data[at] = value
    path = tmp_path / "corrupt.gguf"
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
    except ModelError as error:
        message = str(error)
        assert "corrupt.gguf" in message  # a good file is possible too
        return
    for key in file.metadata:
        file.metadata[key]
    for tensor in file.tensors.values():
        assert file.raw(tensor.name).size == tensor.nbytes <= len(data)
