"""Checkpoints in safetensors files: a directory as Hugging Face lays it out, or a single file.

Owns finding, checking and mapping the files; it does not know what the tensors mean. The `safetensors` library checks
each header (bounds, overlaps, gaps); arrays are views of memory maps, so that reading one costs no copy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from noria.errors import UnsupportedModelError, WeightsError

INDEX = "model.safetensors.index.json"
MAX_JSON = 64 << 20  # bytes of a configuration or index

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("<i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("<u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsCheckpoint:
    """A model's tensors and its `config.json`.

    Args:
        path: a directory (with an index or without), or one `.safetensors` file, whose `config.json` lies beside it.

    Attributes:
        config: `config.json`, {} if there is none beside a single file.
        names: tensor names in the order of the files.

    Raises:
        WeightsError: a file is missing or damaged, or the index names what they do not hold; names file and tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = self.path if self.path.is_dir() else self.path.parent
        config = folder / "config.json"
        if not config.is_file() and self.path.is_dir():
            raise WeightsError(f"{folder}: config.json is missing: this is not a model's directory")
        self.config: dict[str, Any] = read_json(config) if config.is_file() else {}
        self._maps: dict[Path, NDArray[np.uint8]] = {}
        self._entries: dict[str, _Entry] = {}
        for file in weight_files(self.path):
            for name, entry in _directory(file).items():
                if name in self._entries:
                    raise WeightsError(f"{file}: tensor {name!r} is also in {self._entries[name].file.name}")
                self._entries[name] = entry
        self._check_index(folder)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """As the file writes it: "BF16", "F32", "I32" …"""
        return self._entry(name).dtype

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as a read-only view of the memory map (a copy where the file does not align it).

        Raises:
            WeightsError: no such tensor. UnsupportedModelError: an element type that NumPy cannot hold.
        """
        entry = self._entry(name)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedModelError(f"{entry.file}: {name}: element type {entry.dtype} is not supported")
        if entry.nbytes == 0:
            return np.empty(entry.shape, dtype)
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, "r")
        raw = np.asarray(self._maps[entry.file][entry.offset : entry.offset + entry.nbytes])
        if entry.offset % dtype.itemsize:
            raw = raw.copy()
        return raw.view(dtype).reshape(entry.shape)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise WeightsError(f"{self.path}: no tensor {name!r}")
        return entry

    def _check_index(self, folder: Path) -> None:
        if not self.path.is_dir() or not (folder / INDEX).is_file():
            return
        for name, file in _weight_map(folder / INDEX).items():
            entry = self._entries.get(name)
            if entry is None or entry.file.name != file:
                raise WeightsError(f"{folder / INDEX}: says that {file} holds {name!r}, but it does not")


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a directory, or the file itself.

    With an index exactly those that it names; otherwise `model.safetensors`, otherwise all but the ones that repeat the
    weights in another naming (`consolidated*`) or hold adapters.

    Raises:
        WeightsError: none, or one that the index names is missing.
    """
    if path.is_file():
        return (path,)
    if (path / INDEX).is_file():
        files = sorted(set(_weight_map(path / INDEX).values()))
        missing = [file for file in files if not (path / file).is_file()]
        if missing:
            raise WeightsError(f"{path}: {missing[0]} is missing ({len(missing)} of {len(files)} files of {INDEX})")
        return tuple(path / file for file in files)
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    found = [f for f in sorted(path.glob("*.safetensors")) if not f.name.startswith(("consolidated", "adapter"))]
    if not found:
        raise WeightsError(f"{path}: no safetensors file")
    return tuple(found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        WeightsError: not readable, too long, no JSON or no object; names the file.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise WeightsError(f"{path}: longer than {MAX_JSON >> 20} MiB")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise WeightsError(f"{index}: weight_map: missing or empty")
    for name, file in names.items():
        # A file name, not a path: an index must not reach outside its directory.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise WeightsError(f"{index}: weight_map: {name}: {file!r} is no name of a safetensors file")
    return names


def _directory(file: Path) -> dict[str, _Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            names = list(opened.offset_keys())
            slices = [opened.get_slice(name) for name in names]
            described = [(str(s.get_dtype()), tuple(int(n) for n in s.get_shape())) for s in slices]
        with file.open("rb") as handle:
            start = 8 + int.from_bytes(handle.read(8), "little")
        size = file.stat().st_size
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{file}: damaged or no safetensors file: {error}") from error
    # The library has checked that tensors follow one another without gap or overlap up to the end of the file.
    entries: dict[str, _Entry] = {}
    for name, (dtype, shape) in zip(names, described, strict=True):
        if dtype not in _DTYPES:
            raise UnsupportedModelError(f"{file}: {name}: element type {dtype} is not supported")
        nbytes = prod(shape) * _DTYPES[dtype].itemsize
        entries[name] = _Entry(file, dtype, shape, start, nbytes)
        start += nbytes
    if start != size:
        raise WeightsError(f"{file}: tensors end at {start}, the file at {size}")
    return entries
