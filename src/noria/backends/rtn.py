"""Round-to-nearest quantisation: from float weights to codes, scales and minimums, and back.

Plain NumPy that every backend's `pack` and every loader may call. Owns the arithmetic of the schemes' number formats
(`Scheme` in `base`); knows nothing of packing, kernels or files. Works through a weight in row chunks that fit the
processor's cache, so that a conversion needs little memory beside its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from noria.backends.base import GroupedSource, WeightSource
from noria.errors import BackendError
from noria.plan import Float32

CHUNK_VALUES = 1 << 17  # values per row chunk: half a megabyte of float32
MOST_WIDE = 32384  # largest code of a 16-bit activation: 254 * 127 + 126, two bytes
INT4_SHRINKS = (1.0, 0.92, 0.84)  # shares of a group's range that quantise_int4 tries


def round_bf16(values: NDArray[Any]) -> Float32:
    """Float32 values rounded to bfloat16 (nearest, ties to even), as float32 of the same shape."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def quantise_int8(values: NDArray[Any], group: int) -> GroupedSource:
    """Symmetric int8: per row and group of `group` columns, scale = max|x| / 127 and code = rint(x * (127 / max|x|)).

    Args:
        values: any float type [n, k].
        group: columns per scale; the last group may be short. k or more: one scale per row.

    Returns:
        codes int8 [n, k] in -127…127, scales float32 [n, ceil(k / group)]; a group of zeros has scale 0.

    Raises:
        BackendError: not a matrix, a group below 1, or values that are not finite.
    """
    n, k, group = _checked(values, group)
    codes = np.empty((n, k), np.int8)
    scales = np.empty((n, -(-k // group)), np.float32)
    for rows, columns, first, x in _blocks(values, group):
        largest = np.abs(x).max(axis=2, keepdims=True)
        _check_finite(largest)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(127.0) / largest
        # A group of zeros, or of numbers so small that 127 / max is infinite, is held as zeros.
        inverse[~np.isfinite(inverse)] = 0.0
        np.multiply(x, inverse, out=x)
        np.rint(x, out=x)
        codes[rows, columns] = x.reshape(x.shape[0], -1)
        scales[rows, first : first + x.shape[1]] = np.where(inverse > 0, largest / np.float32(127.0), 0)[:, :, 0]
    return GroupedSource(8, codes, scales, None, group)


def round_wide(values: NDArray[Any]) -> Float32:
    """Rows [rows, k] rounded as activations of wide int8 are: scale * rint(x / scale), scale = max|x| / 32384."""
    x = np.asarray(values, np.float32)
    largest = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(MOST_WIDE) / largest
    inverse[~np.isfinite(inverse)] = 0.0  # held as zeros
    return np.asarray(np.rint(x * inverse) * (largest / np.float32(MOST_WIDE)), np.float32)


def quantise_int4(values: NDArray[Any], group: int) -> GroupedSource:
    """Asymmetric int4: x ≈ scale * code + minimum per row and group, codes 0…15.

    The range of a group is narrowed a little where that lowers the group's squared error: outliers then saturate and
    everything else is held more finely. Scale and minimum are refitted to the codes by least squares.

    Args:
        values: any float type [n, k].
        group: columns per scale; the last group may be short. k or more: one group per row.

    Returns:
        codes uint8 [n, k], scales and minimums float32 [n, ceil(k / group)]; a constant group has scale 0.

    Raises:
        BackendError: not a matrix, a group below 1, or values that are not finite.
    """
    n, k, group = _checked(values, group)
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, -(-k // group)), np.float32)
    minimums = np.empty_like(scales)
    for rows, columns, first, x in _blocks(values, group):
        groups = slice(first, first + x.shape[1])
        best, scale, minimum = _fit_int4(x)
        codes[rows, columns] = best.reshape(x.shape[0], -1)
        scales[rows, groups] = scale[:, :, 0]
        minimums[rows, groups] = minimum[:, :, 0]
    return GroupedSource(4, codes, scales, minimums, group)


def dequantise_source(source: WeightSource) -> Float32:
    """The weight's values as float32 [n, k]: what a product with unquantised activations would see."""
    if not isinstance(source, GroupedSource):
        return np.ascontiguousarray(source.values, np.float32)
    n, k = source.shape
    out = np.empty((n, k), np.float32)
    step = max(1, CHUNK_VALUES // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        np.multiply(source.codes[rows], _spread(source.scales[rows], source.group, k), out=out[rows], casting="unsafe")
        if source.minimums is not None:
            out[rows] += _spread(source.minimums[rows], source.group, k)
    return out


def regroup(source: WeightSource, bits: int, group: int) -> GroupedSource:
    """The weight in `bits` (4 or 8) and groups of `group`: kept exactly if it is so already, else quantised anew."""
    quantise: Callable[[NDArray[Any], int], GroupedSource] = quantise_int4 if bits == 4 else quantise_int8
    if not isinstance(source, GroupedSource):
        return quantise(source.values, group)
    k = source.shape[1]
    if source.bits == bits and min(source.group, k) == min(group, k):
        return source
    # A chunk of rows at a time: the float32 form of a large vocabulary's head would take most of the memory of loading.
    n, group = source.shape[0], min(group, k)
    codes = np.empty((n, k), np.uint8 if bits == 4 else np.int8)
    scales = np.empty((n, -(-k // group)), np.float32)
    minimums = np.empty_like(scales) if bits == 4 else None
    step = max(1, CHUNK_VALUES // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        part = quantise(dequantise_source(_rows(source, rows)), group)
        codes[rows], scales[rows] = part.codes, part.scales
        if minimums is not None and part.minimums is not None:
            minimums[rows] = part.minimums
    return GroupedSource(4 if bits == 4 else 8, codes, scales, minimums, group)


def _rows(source: GroupedSource, rows: slice) -> GroupedSource:
    minimums = None if source.minimums is None else source.minimums[rows]
    return GroupedSource(source.bits, source.codes[rows], source.scales[rows], minimums, source.group)


def _checked(values: NDArray[Any], group: int) -> tuple[int, int, int]:
    if values.ndim != 2 or 0 in values.shape:
        raise BackendError(f"a weight must be a matrix that is not empty, got shape {values.shape}")
    if group < 1:
        raise BackendError(f"a quantisation group must hold at least 1 value, got {group}")
    n, k = values.shape
    return n, k, min(group, k)


def _check_finite(extremes: Float32) -> None:
    if not np.isfinite(extremes).all():
        raise BackendError("a weight holds values that are not finite")


def _blocks(values: NDArray[Any], group: int) -> Iterator[tuple[slice, slice, int, Float32]]:
    """Row chunks as (rows, columns, first group, float32 copy [rows, groups, group]); a short last group apart."""
    n, k = values.shape
    whole = k // group * group
    step = max(1, CHUNK_VALUES // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        chunk = np.array(values[rows], np.float32, order="C")
        if whole == k:
            yield rows, slice(0, k), 0, chunk.reshape(len(chunk), -1, group)
            continue
        if whole:
            yield rows, slice(0, whole), 0, chunk[:, :whole].reshape(len(chunk), -1, group)
        yield rows, slice(whole, k), whole // group, chunk[:, whole:].reshape(len(chunk), 1, -1)


def _fit_int4(x: Float32) -> tuple[Float32, Float32, Float32]:
    """Codes [rows, groups, group] and scale, minimum [rows, groups, 1] of least squared error among a few ranges."""
    low, high = x.min(axis=2, keepdims=True), x.max(axis=2, keepdims=True)
    _check_finite(low)
    _check_finite(high)
    centre, half = (high + low) * np.float32(0.5), (high - low) * np.float32(0.5)
    best: tuple[Float32, Float32, Float32] | None = None
    error: Float32 | None = None
    for shrink in INT4_SHRINKS:
        start = centre - half * np.float32(shrink)
        codes, scale, minimum = _refit(x, _codes(x, half * np.float32(2 * shrink / 15), start), centre)
        residual = codes * scale
        residual += minimum
        residual -= x
        squared = np.einsum("rgc,rgc->rg", residual, residual)[:, :, None]
        if best is None or error is None:
            best, error = (codes, scale, minimum), squared
            continue
        better = squared < error
        error = np.where(better, squared, error)
        best = (
            np.where(better, codes, best[0]),
            np.where(better, scale, best[1]),
            np.where(better, minimum, best[2]),
        )
    assert best is not None
    return best


def _codes(x: Float32, scale: Float32, minimum: Float32) -> Float32:
    inverse = np.divide(np.float32(1.0), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = x - minimum
    codes *= inverse
    np.rint(codes, out=codes)
    return np.clip(codes, 0, 15, out=codes)


def _refit(x: Float32, codes: Float32, constant: Float32) -> tuple[Float32, Float32, Float32]:
    """Least-squares scale and minimum for given codes. A group whose codes are all equal is held as `constant`."""
    mean_code = codes.mean(axis=2, keepdims=True)
    mean = x.mean(axis=2, keepdims=True)
    spread = codes - mean_code
    variance = np.einsum("rgc,rgc->rg", spread, spread)[:, :, None]
    covariance = np.einsum("rgc,rgc->rg", spread, x)[:, :, None]
    scale = np.divide(covariance, variance, out=np.zeros_like(variance), where=variance > 0)
    minimum = np.where(variance > 0, mean - scale * mean_code, constant)
    return codes, scale, minimum


def _spread(per_group: Float32, group: int, k: int) -> Float32:
    """[rows, groups] → [rows, k]."""
    return np.repeat(per_group, group, axis=1)[:, :k]
