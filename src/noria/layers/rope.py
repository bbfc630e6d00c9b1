"""Rotary embeddings (Su et al. 2021): tables of cos and sin, fixed once from the longest context.

The formulas are those of transformers (`modeling_rope_utils`), and so is the rounding: frequencies and angles are
float32, because checkpoints were trained with those. What transformers recomputes as a sequence grows (dynamic NTK,
LongRoPE's choice of factors) is decided here once, from `length`, so that a token's rotation never depends on when it
was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.backends.base import RopeTable
from noria.errors import ModelError, UnsupportedModelError

Scaling = Mapping[str, Any]
_LONGEST = 2**31 - 1  # positions are int32
_CHUNK = 4096  # positions whose angles are held in float64 at a time


def rope_table(
    theta: float,
    rotary_dim: int,
    scaling: Scaling | None,
    max_position: int,
    length: int,
    positions: int | None = None,
) -> RopeTable:
    """Rotations by position.

    Args:
        theta: base of the frequencies.
        rotary_dim: dimensions of a head that are rotated; even.
        scaling: None, or `RopeConfig.scaling`.
        max_position: `max_position_embeddings` of the checkpoint.
        length: the longest context that will be served, from which the rotations are fixed.
        positions: how many are tabulated; None: `length`.

    Raises:
        UnsupportedModelError: a scaling of unknown type. ModelError: its keys are missing or wrong.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(f"rotary dimension must be even and at least 2, is {rotary_dim}")
    # Numbers at the ends of their range overflow; what comes of that is refused as a whole.
    with np.errstate(all="ignore"):
        frequencies, factor = inverse_frequencies(theta, rotary_dim, scaling, max_position, length)
        reach = frequencies * np.float32(length)
    if not (np.isfinite(reach).all() and 0.0 < factor < float(np.finfo(np.float32).max)):
        raise ModelError(f"rope_theta {theta:g} and its scaling give rotations that are not finite")
    rows = length if positions is None else positions
    cos = np.empty((rows, rotary_dim // 2), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, rows, _CHUNK):
        places = np.arange(start, min(start + _CHUNK, rows), dtype=np.float32)
        angles = np.outer(places, frequencies).astype(np.float64)  # rounded to float32, then widened
        cos[start : start + _CHUNK] = np.cos(angles) * factor
        sin[start : start + _CHUNK] = np.sin(angles) * factor
    return RopeTable(cos, sin)


def inverse_frequencies(
    theta: float, rotary_dim: int, scaling: Scaling | None, max_position: int, length: int
) -> tuple[NDArray[np.float32], float]:
    """Frequencies [rotary_dim // 2] and the attention factor that multiplies cos and sin. Arguments: `rope_table`."""
    if scaling is None:
        return _frequencies(theta, rotary_dim).astype(np.float32), 1.0
    kind = scaling.get("rope_type")
    method = _METHODS.get(str(kind))
    if method is None:
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(_METHODS)}")
    try:
        frequencies, factor = method(scaling, theta, rotary_dim, max_position, length)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise ModelError(f"rope_scaling of type {kind} has no meaning with its numbers: {error}") from error
    return frequencies.astype(np.float32), factor


def covered_length(scaling: Scaling | None, max_position: int) -> int:
    """The longest context that the checkpoint covers: `max_position`, or what its scaling stretches it to."""
    if scaling is None:
        return max_position
    original = float(scaling.get("original_max_position_embeddings") or max_position)
    factor = float(scaling.get("factor") or 1.0)
    return max(max_position, int(min(original * factor, _LONGEST)))


def _frequencies(theta: float, dim: int) -> NDArray[np.float64]:
    return 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def _linear(
    scaling: Scaling, theta: float, dim: int, max_position: int, length: int
) -> tuple[NDArray[np.float64], float]:
    return _frequencies(theta, dim) / _number(scaling, "factor"), 1.0


def _dynamic(
    scaling: Scaling, theta: float, dim: int, max_position: int, length: int
) -> tuple[NDArray[np.float64], float]:
    """NTK-aware scaling of the base, at the full `length` from the first token on."""
    factor = _number(scaling, "factor")
    if dim < 4:
        raise ModelError(f"rope_scaling dynamic needs a rotary dimension of at least 4, has {dim}")
    stretch = factor * max(length, max_position) / max_position - (factor - 1.0)
    return _frequencies(theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(
    scaling: Scaling, theta: float, dim: int, max_position: int, length: int
) -> tuple[NDArray[np.float64], float]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage between."""
    frequencies = _frequencies(theta, dim)
    if "freq_factors" in scaling:  # a GGUF holds the divisors themselves
        return frequencies / _numbers(scaling, "freq_factors", dim // 2), 1.0
    factor, low, high = (_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise ModelError(f"rope_scaling: high_freq_factor ({high:g}) must exceed low_freq_factor ({low:g})")
    original = _number(scaling, "original_max_position_embeddings", float(max_position))
    wavelengths = 2.0 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    passage = (1.0 - smooth) * frequencies / factor + smooth * frequencies
    out = np.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return np.where(between, passage, out), 1.0


def _yarn(
    scaling: Scaling, theta: float, dim: int, max_position: int, length: int
) -> tuple[NDArray[np.float64], float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, a ramp between."""
    original = _number(scaling, "original_max_position_embeddings", float(max_position))
    factor = _number(scaling, "factor", max_position / original)
    fast = _number(scaling, "beta_fast", 32.0)
    slow = _number(scaling, "beta_slow", 1.0)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2.0 * math.pi)) / (2.0 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # no division by zero
    kept = 1.0 - np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
    frequencies = _frequencies(theta, dim)
    return frequencies / factor * (1.0 - kept) + frequencies * kept, _yarn_factor(scaling, factor)


def _yarn_factor(scaling: Scaling, factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(_number(scaling, "mscale")) / temperature(_number(scaling, "mscale_all_dim"))
    return temperature(1.0)


def _longrope(
    scaling: Scaling, theta: float, dim: int, max_position: int, length: int
) -> tuple[NDArray[np.float64], float]:
    """LongRoPE (Ding et al. 2024): a divisor per dimension, of one set up to the original length, of another above."""
    original = _number(scaling, "original_max_position_embeddings", float(max_position))
    short, long = _numbers(scaling, "short_factor", dim // 2), _numbers(scaling, "long_factor", dim // 2)
    factor = _number(scaling, "factor", max_position / original)
    if scaling.get("attention_factor") is not None:
        attention = _number(scaling, "attention_factor")
    else:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return _frequencies(theta, dim) / (long if length > original else short), attention


_METHODS: dict[str, Callable[[Scaling, float, int, int, int], tuple[NDArray[np.float64], float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _number(scaling: Scaling, key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ModelError(f"rope_scaling of type {scaling['rope_type']} lacks {key!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"rope_scaling: {key} must be a number above 0, is {value!r}")
    return float(value)


def _numbers(scaling: Scaling, key: str, count: int) -> NDArray[np.float64]:
    if scaling.get(key) is None:
        raise ModelError(f"rope_scaling of type {scaling['rope_type']} lacks {key!r}")
    try:
        values = np.asarray(scaling[key], np.float64)
    except (TypeError, ValueError):
        raise ModelError(f"rope_scaling: {key} must be a list of numbers") from None
    if values.shape != (count,) or not np.all(np.isfinite(values) & (values > 0)):
        raise ModelError(f"rope_scaling: {key} must be {count} numbers above 0, has shape {values.shape}")
    return values
