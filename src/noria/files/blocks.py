"""Block formats of ggml: stored bytes → float32, or → codes, scales and minimums for the kernels.

Owns the bit layouts (src/ggml-common.h of the ggml project). Vectorised, a few thousand blocks
at a time, so that the work space stays in the processor's cache whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from noria.errors import UnsupportedModelError, WeightsError

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
_CHUNK = 1 << 16  # elements decoded at a time


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix as it is stored: w[n, k] = scales[n, k // group] * codes[n, k] + minimums[n, k // group], exactly.

    bits 4: uint8 codes 0…15 (narrower types fit); bits 8: int8 codes -127…127, no minimums.
    """

    bits: Literal[4, 8]
    codes: NDArray[Any]  # [n, k] uint8 or int8
    scales: Float32  # [n, k / group]
    minimums: Float32 | None  # [n, k / group]
    group: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """Some decoded blocks. `codes` [blocks, elements], signed or not; `scales`, `minimums` [blocks, groups] or None.

    value = scale * code + minimum, with one rounding at most: scale * code is exact in float32 for every format.
    """

    codes: NDArray[Any]
    scales: Float32
    minimums: Float32 | None


@dataclass(frozen=True, slots=True)
class _Format:
    block: int  # elements
    nbytes: int  # of a block
    group: int  # elements that share a scale
    bits: Literal[4, 8, 0]  # of `grouped`; 0: no kernel holds this format exactly
    unpack: Callable[[Bytes], _Parts]  # [blocks, nbytes] → parts
    offset: int = 0  # added to signed codes of 4 bits or fewer to make them 0…15


def dequantise(type: str, raw: Bytes, shape: tuple[int, ...]) -> Float32:
    """Decodes a tensor, bit for bit as ggml does.

    Args:
        type: "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K" … "Q6_K".
        raw: stored bytes, one-dimensional.
        shape: in NumPy order; the last dimension is made of whole blocks.

    Returns:
        float32 [shape], always a fresh array.

    Raises:
        UnsupportedModelError: another type. WeightsError: `raw` has not the length that type and shape ask for.
    """
    if type in ("F32", "F16", "BF16"):
        return _decode_floats(type, raw, shape)
    form = _format(type)
    blocks = _as_blocks(type, raw, shape, form.block, form.nbytes)
    out = np.empty((len(blocks), form.block // form.group, form.group), np.float32)
    for rows in _chunks(len(blocks), form.block):
        parts = form.unpack(blocks[rows])
        target = out[rows]
        target[...] = parts.codes.reshape(target.shape)
        target *= parts.scales[..., None]
        if parts.minimums is not None:
            target += parts.minimums[..., None]
    return out.reshape(shape)


def grouped(type: str, raw: Bytes, shape: tuple[int, ...]) -> Grouped | None:
    """The stored codes of a matrix, for kernels that multiply them directly.

    Q4_0, Q4_1, Q4_K (groups of 32), Q2_K, Q3_K (groups of 16) become bits 4, Q8_0 bits 8 in groups of 32.

    Returns:
        None for every other type, for tensors that are not matrices, and for a Q8_0 that holds the code -128, which
        kernels for symmetric codes cannot multiply (ggml itself never writes it).

    Raises:
        WeightsError: `raw` has not the length that type and shape ask for.
    """
    form = _FORMATS.get(type)
    if form is None or form.bits == 0 or len(shape) != 2:
        return None
    blocks = _as_blocks(type, raw, shape, form.block, form.nbytes)
    n, k = shape
    codes = np.empty((len(blocks), form.block), np.int8 if form.bits == 8 else np.uint8)
    scales = np.empty((len(blocks), form.block // form.group), np.float32)
    minimums = None if form.bits == 8 else np.empty_like(scales)
    for rows in _chunks(len(blocks), form.block):
        parts = form.unpack(blocks[rows])
        np.add(parts.codes, form.offset, out=codes[rows], casting="unsafe")
        scales[rows] = parts.scales
        if minimums is not None:
            minimums[rows] = parts.minimums if parts.minimums is not None else -form.offset * parts.scales
    if form.bits == 8 and codes.min(initial=0) < -127:
        return None
    row = (n, k // form.group)
    return Grouped(
        form.bits,
        codes.reshape(n, k),
        scales.reshape(row),
        None if minimums is None else minimums.reshape(row),
        form.group,
    )


def _format(type: str) -> _Format:
    form = _FORMATS.get(type)
    if form is None:
        known = ", ".join(["F32", "F16", "BF16", *_FORMATS])
        raise UnsupportedModelError(f"tensor type {type} is not supported; Noria reads {known}")
    return form


def _as_blocks(type: str, raw: Bytes, shape: tuple[int, ...], block: int, nbytes: int) -> Bytes:
    expected = prod(shape) // block * nbytes
    if not shape or shape[-1] % block or raw.size != expected:
        raise WeightsError(f"{type} of shape {list(shape)} takes {expected} bytes in blocks of {block}, got {raw.size}")
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1, nbytes)


def _chunks(blocks: int, elements: int) -> list[slice]:
    step = _CHUNK // elements
    return [slice(start, min(start + step, blocks)) for start in range(0, blocks, step)]


def _decode_floats(type: str, raw: Bytes, shape: tuple[int, ...]) -> Float32:
    data = _as_blocks(type, raw, shape, 1, 4 if type == "F32" else 2)
    if type == "F32":
        return data.view("<f4").reshape(shape).astype(np.float32)
    if type == "F16":
        return data.view("<f2").reshape(shape).astype(np.float32)
    wide = data.view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32).reshape(shape)


# ------------------------------------------------------------------------------------------------ layouts


def _half(blocks: Bytes, at: int) -> Float32:
    """The float16 at byte `at` of every block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """[blocks, bytes] → [blocks, 2 * bytes]: of each `run` bytes first all low halves, then all high ones."""
    packed = np.ascontiguousarray(packed)
    count, width = packed.shape
    out = np.empty((count, width // run, 2, run), np.uint8)
    source = packed.reshape(count, -1, run)
    np.bitwise_and(source, 0x0F, out=out[:, :, 0])
    np.right_shift(source, 4, out=out[:, :, 1])
    return out.reshape(count, 2 * width)


def _bit_rows(packed: Bytes, run: int, bits: int) -> Bytes:
    """[blocks, bytes] → [blocks, bytes * 8 / bits]: of each `run` bytes first all lowest fields of `bits` bits …"""
    packed = np.ascontiguousarray(packed)
    count, width = packed.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(count, -1, 1, run) >> shifts
    fields &= (1 << bits) - 1
    return fields.reshape(count, width * 8 // bits)


def _high_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 fifth bits of a Q5 block, as 0 or 16 [blocks, 32]."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def _q4_0(b: Bytes) -> _Parts:
    return _Parts(_nibbles(b[:, 2:], 16).view(np.int8) - np.int8(8), _half(b, 0), None)


def _q4_1(b: Bytes) -> _Parts:
    return _Parts(_nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2))


def _q5_0(b: Bytes) -> _Parts:
    codes = (_nibbles(b[:, 6:], 16) | _high_bits(b, 2)).view(np.int8) - np.int8(16)
    return _Parts(codes, _half(b, 0), None)


def _q5_1(b: Bytes) -> _Parts:
    return _Parts(_nibbles(b[:, 8:], 16) | _high_bits(b, 4), _half(b, 0), _half(b, 2))


def _q8_0(b: Bytes) -> _Parts:
    return _Parts(np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b, 0), None)


def _q2_k(b: Bytes) -> _Parts:
    scales = _half(b, 80) * (b[:, :16] & 0x0F)
    return _Parts(_bit_rows(b[:, 16:80], 32, 2), scales, -(_half(b, 82) * (b[:, :16] >> 4)))


def _q3_k(b: Bytes) -> _Parts:
    low = _nibbles(b[:, 96:104], 8)  # [blocks, 16]
    high = _bit_rows(b[:, 104:108], 4, 2)  # [blocks, 16]
    scales = _half(b, 108) * ((low | high << 4).view(np.int8) - np.int8(32))
    # The third bit is stored so that a set bit means no subtraction of 4: plain codes 0…7, less 4.
    codes = _bit_rows(b[:, 32:96], 32, 2) | _bit_rows(b[:, :32], 32, 1) << 2
    return _Parts(codes.view(np.int8) - np.int8(4), scales, None)


def _six_bits(b: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minimums of six bits, packed in the 12 bytes from byte 4 of Q4_K and Q5_K."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, minimums


def _q4_k(b: Bytes) -> _Parts:
    scales, minimums = _six_bits(b)
    return _Parts(_nibbles(b[:, 16:], 32), _half(b, 0) * scales, -(_half(b, 2) * minimums))


def _q5_k(b: Bytes) -> _Parts:
    scales, minimums = _six_bits(b)
    codes = _nibbles(b[:, 48:], 32) | _bit_rows(b[:, 16:48], 32, 1) << 4
    return _Parts(codes, _half(b, 0) * scales, -(_half(b, 2) * minimums))


def _q6_k(b: Bytes) -> _Parts:
    codes = _nibbles(b[:, :128], 64) | _bit_rows(b[:, 128:192], 32, 2) << 4
    scales = _half(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8)
    return _Parts(codes.view(np.int8) - np.int8(32), scales, None)


_FORMATS: dict[str, _Format] = {
    "Q8_0": _Format(32, 34, 32, 8, _q8_0),
    "Q4_0": _Format(32, 18, 32, 4, _q4_0, offset=8),
    "Q4_1": _Format(32, 20, 32, 4, _q4_1),
    "Q5_0": _Format(32, 22, 32, 0, _q5_0),
    "Q5_1": _Format(32, 24, 32, 0, _q5_1),
    "Q2_K": _Format(256, 84, 16, 4, _q2_k),
    "Q3_K": _Format(256, 110, 16, 4, _q3_k, offset=4),
    "Q4_K": _Format(256, 144, 32, 4, _q4_k),
    "Q5_K": _Format(256, 176, 32, 0, _q5_k),
    "Q6_K": _Format(256, 210, 16, 0, _q6_k),
}
