"""Norm, conversion, embedding and selection against NumPy at every ISA level, and independence of rows and threads.

Bounds: conversion is exact but for ties (a code may differ by one where x / scale is within 1e-4 of a half). The norm
is within 1e-6 of the row's largest result, relative: a sum of squares in float32, a root and two products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from noria import _native

POOLS = {threads: _native.Pool(threads) for threads in (1, 2)}
WIDTHS = [1, 3, 16, 63, 64, 65, 192, 576, 640, 1000]
FORMATS = [("f32", 0), ("bf16", 0), ("s8", 32), ("s8", 64), ("s8", 192), ("s8", 4096)]


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.select_isa(request.param)
    yield request.param
    _native.select_isa(before)


def rows_of(count: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, width)) * np.exp(rng.standard_normal((count, 1)))).astype(np.float32)


def stride(width: int, element_bytes: int) -> int:
    """Elements per row: a multiple of 64, and then, except in float32, an odd number of cache lines."""
    padded = -(-width // 64) * 64
    even = element_bytes < 4 and padded * element_bytes // 64 % 2 == 0
    return padded + (64 // element_bytes if even else 0)


def expect_codes(x: NDArray[np.float32], group: int, data: Any, scales: Any, sums: Any) -> None:
    rows, width = x.shape
    codes = data.astype(np.int32)
    assert not codes[:, width:].any(), "the padding is zero"
    assert scales.shape == sums.shape == (rows, -(-width // group))
    for g, start in enumerate(range(0, width, group)):
        part = x[:, start : start + group]
        scale = np.abs(part).max(axis=1) / np.float32(127)
        np.testing.assert_allclose(scales[:, g], scale, rtol=1e-6, atol=0)
        exact = np.divide(part, scale[:, None], out=np.zeros_like(part), where=scale[:, None] > 0)
        found = codes[:, start : min(start + group, width)]
        assert np.abs(found).max(initial=0) <= 127
        assert (np.abs(found - exact) <= 0.5 + 1e-4).all()
        np.testing.assert_array_equal(sums[:, g], found.sum(axis=1))


def expect_format(x: NDArray[np.float32], name: str, group: int, converted: Any) -> None:
    data, scales, sums = converted
    rows, width = x.shape
    assert data.shape == (rows, stride(width, data.itemsize))
    if name == "f32":
        np.testing.assert_array_equal(data[:, :width], x)
        assert not data[:, width:].any()
    elif name == "bf16":
        np.testing.assert_array_equal(data[:, :width], x.astype(ml_dtypes.bfloat16).view(np.uint16))
        assert not data[:, width:].any()
    else:
        expect_codes(x, group, data, scales, sums)


@pytest.mark.parametrize("width", WIDTHS)
def test_convert(isa: str, width: int) -> None:
    x = rows_of(5, width)
    x[3] = 0
    for (name, group), converted in zip(FORMATS, _native.convert(POOLS[1], x, FORMATS), strict=True):
        expect_format(x, name, group, converted)


def test_quantisation_rounds_ties_to_even(isa: str) -> None:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49]], np.float32)
    data, scales, _ = _native.convert(POOLS[1], x, [("s8", 8)])[0]
    np.testing.assert_array_equal(data[0, :8], [127, 0, 2, 2, 0, -2, -2, 3])
    assert scales[0, 0] == 1


def test_bf16_rounds_to_nearest_even(isa: str) -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x7F7FFFFF, 0x00000001]], np.uint32)
    data, _, _ = _native.convert(POOLS[1], bits.view(np.float32), [("bf16", 0)])[0]
    np.testing.assert_array_equal(data[0, :7], [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x7F80, 0x0000])


@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e30, 3e38])
def test_extreme_sizes_stay_finite(isa: str, value: float) -> None:
    x = np.full((1, 40), value, np.float32)
    data, scales, sums = _native.convert(POOLS[1], x, [("s8", 32)])[0]
    assert np.isfinite(scales).all()
    back = data[0, :40] * np.repeat(scales[0], 32)[:40]
    np.testing.assert_allclose(back, x[0], rtol=1e-6, atol=1e-35)
    assert sums.sum() == data.sum()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(isa: str, width: int, with_residual: bool) -> None:
    x, residual = rows_of(4, width), rows_of(4, width, 1) if with_residual else None
    weight = rows_of(1, width, 2)[0]
    out, converted = _native.norm(POOLS[1], x, weight, 1e-5, residual, FORMATS)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + np.float32(1e-5)) * weight
    exact = exact + residual if residual is not None else exact
    bound = 1e-6 * np.abs(exact).max(axis=1, keepdims=True)
    assert (np.abs(out - exact) <= bound).all()
    for (name, group), made in zip(FORMATS, converted, strict=True):
        expect_format(out, name, group, made)


def test_norm_without_floats_yields_the_same_codes(isa: str) -> None:
    x, weight = rows_of(7, 576), rows_of(1, 576, 2)[0]
    _, with_floats = _native.norm(POOLS[1], x, weight, 1e-5, None, FORMATS)
    nothing, without = _native.norm(POOLS[2], x, weight, 1e-5, None, FORMATS, floats=False)
    assert nothing is None
    for a, b in zip(with_floats, without, strict=True):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("width", [63, 64, 320, 576, 600])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_straight_into_one_format_is_the_same(isa: str, width: int, with_residual: bool) -> None:
    x, weight = rows_of(7, width), rows_of(1, width, 2)[0]
    residual = rows_of(7, width, 1) if with_residual else None
    x[2] = 0
    forms = [*FORMATS, ("s16", width)]
    _, through_floats = _native.norm(POOLS[1], x, weight, 1e-5, residual, forms)
    for index, form in enumerate(forms):
        _, (straight,) = _native.norm(POOLS[1], x, weight, 1e-5, residual, [form], floats=False)
        for a, b in zip(straight, through_floats[index], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("width", [65, 576, 9000])
def test_a_row_is_the_same_alone_and_among_many_on_any_threads(isa: str, width: int) -> None:
    x, residual, weight = rows_of(50, width), rows_of(50, width, 1), rows_of(1, width, 2)[0]
    forms = [*FORMATS, ("s16", width)]
    many = {threads: _native.norm(pool, x, weight, 1e-6, residual, forms) for threads, pool in POOLS.items()}
    for row in (0, 17, 49):
        pick = slice(row, row + 1)
        alone, converted = _native.norm(POOLS[1], x[pick], weight, 1e-6, residual[pick], forms)
        for out, made in many.values():
            np.testing.assert_array_equal(out[pick], alone)
            for ours, theirs in zip(made, converted, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    np.testing.assert_array_equal(a[pick], b)


@pytest.mark.parametrize("width", [1, 64, 577])
@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embed(isa: str, width: int, scale: float) -> None:
    values = rows_of(100, width)
    ids = np.array([99, 0, 5, 5, 42], np.int32)
    exact = _native.embed(POOLS[2], _native.table_f32(values), ids, scale)
    np.testing.assert_array_equal(exact, values[ids] * np.float32(scale))
    halves = values.astype(ml_dtypes.bfloat16)
    rounded = _native.embed(POOLS[2], _native.table_bf16(halves.view(np.uint16)), ids, scale)
    np.testing.assert_array_equal(rounded, halves[ids].astype(np.float32) * np.float32(scale))


def test_select(isa: str) -> None:
    x = rows_of(20, 577)
    rows = np.array([19, 0, 0, 7], np.int32)
    np.testing.assert_array_equal(_native.select(POOLS[2], x, rows), x[rows])


GRID = np.concatenate([np.linspace(-87, 88, 200_003), np.geomspace(1e-30, 80, 5003), -np.geomspace(1e-30, 80, 5003)])
FUNCTIONS: dict[str, tuple[Any, float]] = {  # exact value, and the relative error that simd.h states
    "exp": (np.exp, 2**-22),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 2**-21),
    "tanh": (np.tanh, 2**-20),
    "silu": (lambda x: x / (1 + np.exp(-x)), 2**-20),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_their_stated_error(isa: str, name: str) -> None:
    x = GRID.astype(np.float32)
    function, bound = FUNCTIONS[name]
    exact = function(x.astype(np.float64))
    assert (np.abs(_native.evaluate(name, x) - exact) <= bound * np.abs(exact)).all()


def test_gelu_tanh(isa: str) -> None:
    x = np.linspace(-30, 30, 100_001).astype(np.float32)
    wide = x.astype(np.float64)
    exact = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(_native.evaluate("gelu_tanh", x), exact, rtol=0, atol=4e-7 * np.abs(x).max())
    np.testing.assert_allclose(_native.evaluate("gelu_tanh", x[x > -3]), exact[x > -3], rtol=1e-5, atol=0)


def test_functions_at_the_edges(isa: str) -> None:
    edges = np.array([-np.inf, -1e4, 0, 1e4, np.inf, np.nan], np.float32)
    exp = _native.evaluate("exp", edges)
    np.testing.assert_array_equal(exp[:3], [0, 0, 1])
    assert np.isfinite(exp[3:5]).all()
    assert (exp[3:5] > 2e38).all()
    np.testing.assert_array_equal(_native.evaluate("tanh", edges)[:5], [-1, -1, 0, 1, 1])
    for name in FUNCTIONS:
        assert np.isnan(_native.evaluate(name, edges)[5])
    large = np.append(np.geomspace(1e2, 3e38, 1001), np.inf).astype(np.float32)
    np.testing.assert_array_equal(_native.evaluate("sigmoid", large), np.ones_like(large))
    for name in ("silu", "gelu_tanh"):  # a gate's outlier is no NaN
        np.testing.assert_array_equal(_native.evaluate(name, large), large)
        assert (np.abs(_native.evaluate(name, -large[large < 1e12])) < 1e-20).all()


def test_ids_and_rows_outside_are_refused() -> None:
    table = _native.table_f32(rows_of(10, 8))
    for bad in (-1, 10):
        with pytest.raises(ValueError, match="vocabulary"):
            _native.embed(POOLS[1], table, np.array([bad], np.int32), 1.0)
        with pytest.raises(ValueError, match="row"):
            _native.select(POOLS[1], rows_of(10, 8), np.array([bad], np.int32))


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_codes_are_two_bytes_each(isa: str, width: int) -> None:
    x = rows_of(5, width)
    x[3] = 0
    x[4] = 1e-38  # below what 16 bits can be scaled from: held as zeros
    data, scales, sums = _native.convert(POOLS[1], x, [("s16", width)])[0]
    digits = data.reshape(5, 2, stride(width, 1)).astype(np.int64)
    assert not digits[:, :, width:].any(), "the padding is zero"
    assert np.abs(digits).max() <= 127
    np.testing.assert_array_equal(sums, digits.sum(axis=2))
    largest = np.abs(x).max(axis=1)
    np.testing.assert_allclose(scales[:3, 0], largest[:3] / 32384, rtol=1e-6)
    assert not scales[3:].any()
    codes = 254 * digits[:, 0, :width] + digits[:, 1, :width]
    back = codes * scales.astype(np.float64)
    assert (np.abs(back - x) <= np.maximum(0.502 * largest / 32384, 1e-37)[:, None]).all()


def test_every_wide_code_has_bytes(isa: str) -> None:
    codes = np.arange(-32384, 32385, dtype=np.float32)[None]
    data, scales, _ = _native.convert(POOLS[1], codes, [("s16", codes.size)])[0]
    digits = data.reshape(2, stride(codes.size, 1)).astype(np.int64)[:, : codes.size]
    assert scales[0, 0] == 1
    np.testing.assert_array_equal(254 * digits[0] + digits[1], codes[0])
