"""Reader of GGUF files, versions 2 and 3 (format: docs/gguf.md of the ggml project).

Owns the container: metadata, tensor directory, memory map. It does not know what keys mean nor how blocks are decoded
(`blocks`). A file is not trusted: every count, length, offset and type is checked against the file's size before it is
used, and nothing is allocated from a number that has not been checked.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from noria.errors import UnsupportedModelError, WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_NAME = 65535  # bytes of a key or tensor name
MAX_ARRAY_DEPTH = 4
MAX_SPLITS = 1024

# Metadata value types: id → NumPy dtype of a scalar. 8 is a string, 9 an array.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Tensor types: id → (name, elements of a block, bytes of a block). Types that `blocks` does not decode are listed too,
# so that the error comes when such a tensor is used and names the type.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor directory.

    Attributes:
        shape: in NumPy order: the file's dimensions reversed, rows first.
        type: "F32", "Q4_1" …, the names of ggml.
        offset: bytes from the start of `path`. nbytes: length there. Both have been checked against the file.
        path: the file that holds the data (a model may be split over several).
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class _StringArray:
    """An array of strings whose bounds have been checked, decoded when it is asked for."""

    start: int
    count: int


class GGUFMetadata(Mapping[str, Any]):
    """Decoded metadata: int, float, bool, str, ndarray (arrays of numbers) or list.

    Arrays of strings (vocabularies of a quarter of a million entries) are decoded on first use: the process that only
    loads weights never pays for them.
    """

    def __init__(self, data: mmap.mmap | bytes, values: dict[str, Any]) -> None:
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _StringArray):
            value = self._values[key] = _decode_strings(self._data, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class GGUFFile:
    """A GGUF model, memory-mapped. A model split over several files (`…-00001-of-00003.gguf`) is opened as one.

    Attributes:
        metadata: key → value, see `GGUFMetadata`.
        tensors: name → `GGUFTensor`, in the file's order.

    Raises:
        WeightsError: the file is damaged or is no GGUF; names the file and the field.
        UnsupportedModelError: a version or tensor type that Noria does not know.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        first = _Parser(self.path)
        self.metadata = GGUFMetadata(first.data, first.values)
        self.tensors: dict[str, GGUFTensor] = dict(first.tensors)
        self.version = first.version
        self._maps: dict[Path, NDArray[np.uint8]] = {self.path: np.frombuffer(first.data, np.uint8)}
        for part in self._other_parts():
            self._add_part(part)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor: a read-only view [nbytes] of the memory map.

        Raises:
            WeightsError: no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise WeightsError(f"{self.path}: no tensor {name!r}")
        return self._maps[tensor.path][tensor.offset : tensor.offset + tensor.nbytes]

    def _other_parts(self) -> list[Path]:
        count = self.metadata.get("split.count", 0)
        if not isinstance(count, int) or count <= 1:
            return []
        match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", self.path.name)
        if match is None or int(match[3]) != count or count > MAX_SPLITS:
            raise WeightsError(
                f"{self.path}: split.count is {count}, but the name does not end in -N-of-{count:05}.gguf"
            )
        return [
            part
            for i in range(1, count + 1)
            if (part := self.path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf")) != self.path
        ]

    def _add_part(self, path: Path) -> None:
        if not path.is_file():
            raise WeightsError(f"{self.path}: its part {path.name} is missing")
        part = _Parser(path)
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise WeightsError(f"{path}: tensor {name!r} is also in another part")
            self.tensors[name] = tensor
        for key, value in part.values.items():
            if key not in self.metadata and not isinstance(value, _StringArray):
                self.metadata._values[key] = value
        self._maps[path] = np.frombuffer(part.data, np.uint8)


class _Parser:
    """Walks one file from its start. `pos` is the next byte to read; `_need` guards every step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _map(path)
        self.size = len(self.data)
        self.pos = 0
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self.version = 0
        tensor_count, value_count = self._header()
        for i in range(value_count):
            self._value(i)
        self.alignment = self._alignment()
        self._directory(tensor_count)

    def fail(self, field: str, why: str) -> NoReturn:
        raise WeightsError(f"{self.path}: {_shown(field)}: {why}")

    def _need(self, count: int, field: str) -> None:
        if count > self.size - self.pos:
            self.fail(field, f"needs {count} bytes at offset {self.pos}, but the file has {self.size} (truncated?)")

    def _uint(self, width: int, field: str) -> int:
        self._need(width, field)
        value = int.from_bytes(self.data[self.pos : self.pos + width], "little")
        self.pos += width
        return value

    def _text(self, field: str, limit: int | None = None) -> str:
        length = self._uint(8, field)
        if limit is not None and length > limit:
            self.fail(field, f"length {length} is over the limit of {limit}")
        self._need(length, field)
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        return raw.decode("utf-8", "replace")

    def _header(self) -> tuple[int, int]:
        self._need(24, "header")
        if self.data[:4] != MAGIC:
            self.fail("magic", f"is {bytes(self.data[:4])!r}, not {MAGIC!r}: this is not a GGUF file")
        self.pos = 4
        self.version = self._uint(4, "version")
        if self.version not in VERSIONS:
            big_endian = self.version & 0xFFFF == 0 and self.version != 0
            what = "a big-endian file" if big_endian else f"GGUF version {self.version}"
            raise UnsupportedModelError(f"{self.path}: version: {what}; Noria reads little-endian versions 2 and 3")
        tensor_count = self._uint(8, "tensor_count")
        value_count = self._uint(8, "metadata_kv_count")
        # The smallest value takes 13 bytes, the smallest tensor entry 24.
        if value_count > (self.size - self.pos) // 13:
            self.fail("metadata_kv_count", f"{value_count} entries cannot fit in {self.size} bytes")
        if tensor_count > (self.size - self.pos) // 24:
            self.fail("tensor_count", f"{tensor_count} entries cannot fit in {self.size} bytes")
        return tensor_count, value_count

    def _value(self, index: int) -> None:
        key = self._text(f"metadata key {index}", MAX_NAME)
        if key in self.values:
            self.fail(key, "the key appears twice")
        self.values[key] = self._typed(self._uint(4, key), key, 0)

    def _typed(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key, depth + 1)
        dtype = _SCALARS.get(kind)
        if dtype is None:
            self.fail(key, f"unknown value type {kind}")
        return self._numbers(dtype, 1, key)[0].item()

    def _array(self, key: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(key, f"arrays nested more than {MAX_ARRAY_DEPTH} deep")
        kind = self._uint(4, key)
        count = self._uint(8, key)
        if (dtype := _SCALARS.get(kind)) is not None:
            return self._numbers(dtype, count, key)
        if count > (self.size - self.pos) // 8:
            self.fail(key, f"an array of {count} entries cannot fit in {self.size} bytes")
        if kind == _STRING:
            start = self.pos
            self._skip_strings(count, key)
            array = _StringArray(start, count)
            return array if depth == 1 else _decode_strings(self.data, array)
        if kind != _ARRAY:
            self.fail(key, f"unknown value type {kind} of an array")
        return [self._array(key, depth + 1) for _ in range(count)]

    def _numbers(self, dtype: np.dtype[Any], count: int, key: str) -> NDArray[Any]:
        self._need(count * dtype.itemsize, key)
        raw = np.frombuffer(self.data, np.uint8, count * dtype.itemsize, self.pos)
        self.pos += count * dtype.itemsize
        # A bool is a byte that may hold anything; NumPy wants 0 or 1. Copied: the map need not stay open for it.
        values: NDArray[Any] = raw != 0 if dtype.kind == "b" else raw.view(dtype).copy()
        return values

    def _skip_strings(self, count: int, key: str) -> None:
        data, pos, size, number = self.data, self.pos, self.size, int.from_bytes
        for i in range(count):
            # A slice that ends behind the file is shorter, so a wrong length shows at the next turn or at the end.
            pos += 8 + number(data[pos : pos + 8], "little")
            if pos > size:
                self.fail(key, f"entry {i} ends behind the file's {size} bytes (truncated?)")
        self.pos = pos

    def _alignment(self) -> int:
        alignment = self.values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail("general.alignment", f"must be a power of two up to {MAX_ALIGNMENT}, is {alignment!r}")
        return alignment

    def _directory(self, count: int) -> None:
        entries = [self._entry(i) for i in range(count)]
        start = -(-self.pos // self.alignment) * self.alignment
        for name, shape, kind, nbytes, offset in entries:
            if name in self.tensors:
                self.fail(name, "the tensor appears twice")
            if offset % self.alignment:
                self.fail(name, f"offset {offset} is not a multiple of the alignment {self.alignment}")
            if start + offset + nbytes > self.size:
                self.fail(name, f"data ends at {start + offset + nbytes}, the file at {self.size} (truncated?)")
            self.tensors[name] = GGUFTensor(name, shape, kind, start + offset, nbytes, self.path)

    def _entry(self, index: int) -> tuple[str, tuple[int, ...], str, int, int]:
        name = self._text(f"tensor name {index}", MAX_NAME)
        dims = self._uint(4, name)
        if not 1 <= dims <= MAX_DIMS:
            self.fail(name, f"has {dims} dimensions, 1 to {MAX_DIMS} are possible")
        sizes = [self._uint(8, name) for _ in range(dims)]
        type_id = self._uint(4, name)
        if type_id not in TENSOR_TYPES:
            raise UnsupportedModelError(f"{self.path}: {_shown(name)}: unknown tensor type {type_id}")
        kind, block, block_bytes = TENSOR_TYPES[type_id]
        if min(sizes) < 1 or sizes[0] % block:
            self.fail(name, f"dimensions {sizes} do not suit type {kind}, whose blocks hold {block}")
        nbytes = prod(sizes) // block * block_bytes
        if nbytes > self.size:
            self.fail(name, f"dimensions {sizes} of {kind} need {nbytes} bytes, the file has {self.size}")
        return name, tuple(reversed(sizes)), kind, nbytes, self._uint(8, name)


def _shown(name: str) -> str:
    """A name as messages show it: in a damaged file it may be thousands of bytes that were never a name."""
    return name if len(name) <= 100 else f"{name[:100]}…"


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error


def _decode_strings(data: mmap.mmap | bytes, array: _StringArray) -> list[str]:
    out: list[str] = []
    pos, number = array.start, int.from_bytes
    for _ in range(array.count):
        end = pos + 8 + number(data[pos : pos + 8], "little")
        out.append(data[pos + 8 : end].decode("utf-8", "replace"))
        pos = end
    return out


def open_gguf(path: str | Path) -> GGUFFile:
    """A GGUF file that several readers of one process share: parsed once per version of the file on disk.

    Raises:
        WeightsError, UnsupportedModelError: as `GGUFFile`.
    """
    path = Path(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    return _open_cached(path.absolute(), stat.st_mtime_ns, stat.st_size)


def close_shared() -> None:
    """Forgets the files that are open. Each is unmapped when the last who uses it lets go of it; until then what was
    read of it stays in memory."""
    _open_cached.cache_clear()


@lru_cache(maxsize=4)
def _open_cached(path: Path, modified: int, size: int) -> GGUFFile:
    return GGUFFile(path)
