"""Products with packed weights against float64, on every ISA level, and the equalities that the engine relies on.

Inputs are chosen so that converting them loses nothing (int8: small codes times powers of two, each group holding a
127), so that what is tested is the product. Error bounds: a float32 sum of t terms is within (t + 3) * 2^-23 of the sum
of their magnitudes, with t = k for f32 and bf16 and t = 3 * groups for int8 and int4 (sums within a group are exact).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

native = pytest.importorskip("noria._native")
ml_dtypes = pytest.importorskip("ml_dtypes")

Floats = NDArray[np.float32]
SCHEMES = [
    ("f32", 0),
    ("bf16", 0),
    *(("int8", group) for group in (32, 64, 192, 12, 4096)),
    *(("int4", group) for group in (16, 32, 128)),
    ("symmetric", 32),  # int4 whose minimums are -8 scales, and are not held
    ("wide", 4096),  # int8 with one scale per row, times activations of 16 bits
]
MOST_WIDE = 32384
IDS = [f"{name}-{group}" for name, group in SCHEMES]


@pytest.fixture(params=native.available_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)


@pytest.fixture(scope="module")
def pool() -> Any:
    return native.Pool(1)


@pytest.fixture(scope="module")
def two_threads() -> Any:
    return native.Pool(2)


def per_column(values: NDArray[Any], group: int, k: int) -> NDArray[Any]:
    """[n, groups] → [n, k]."""
    return np.repeat(values, group, axis=1)[:, :k]


def make_weight(scheme: str, group: int, n: int, k: int, seed: int = 0) -> tuple[Any, NDArray[np.float64]]:
    """A packed weight and its exact values [n, k]."""
    rng = np.random.default_rng(seed)
    if scheme == "f32":
        values = rng.standard_normal((n, k), dtype=np.float32)
        return native.pack_f32(values), values.astype(np.float64)
    if scheme == "bf16":
        rounded = rng.standard_normal((n, k), dtype=np.float32).astype(ml_dtypes.bfloat16)
        return native.pack_bf16(rounded.view(np.uint16)), rounded.astype(np.float64)
    groups = -(-k // group)
    scales = rng.uniform(0.001, 0.02, (n, groups)).astype(np.float32)
    if scheme in ("int8", "wide"):
        codes = rng.integers(-127, 128, (n, k), dtype=np.int8)
        return native.pack_int8(codes, scales, group, scheme == "wide"), codes * per_column(scales, group, k).astype(
            np.float64
        )
    nibbles = rng.integers(0, 16, (n, k), dtype=np.uint8)
    minimums = -8 * scales if scheme == "symmetric" else rng.uniform(-0.2, 0.05, (n, groups)).astype(np.float32)
    exact = nibbles * per_column(scales, group, k).astype(np.float64) + per_column(minimums, group, k)
    return native.pack_int4(nibbles, scales, minimums, group), exact


def make_rows(scheme: str, group: int, rows: int, k: int, seed: int = 1) -> Floats:
    """Float32 rows [rows, k] that the scheme's form of activations holds exactly."""
    rng = np.random.default_rng(seed)
    if scheme == "f32":
        return rng.standard_normal((rows, k), dtype=np.float32)
    if scheme == "bf16":
        return rng.standard_normal((rows, k), dtype=np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    most = MOST_WIDE if scheme == "wide" else 127
    codes = rng.integers(-most, most + 1, (rows, k)).astype(np.float32)
    codes[:, ::group] = most
    scales = 2.0 ** rng.integers(-9, -3, (rows, -(-k // group)))
    return (codes * per_column(scales, group, k)).astype(np.float32)


def terms(scheme: str, group: int, k: int) -> int:
    return 3 * -(-k // group) if group else k


def bound(scheme: str, group: int, x: Floats, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(exact).T
    if scheme == "int4":  # codes and minimums are added apart and may cancel
        magnitude *= 4
    return (terms(scheme, group, x.shape[1]) + 3) * 2.0**-23 * magnitude


def assert_within(got: Floats, expected: NDArray[np.float64], limit: NDArray[np.float64]) -> None:
    assert got.shape == expected.shape
    worst = np.max(np.abs(got - expected) - limit)
    assert worst <= 0, f"exceeds the bound by {worst}"


def normal(*shape: int, seed: int = 2) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("scheme", "group"), SCHEMES, ids=IDS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 192), (3, 70, 200), (8, 1, 5), (13, 130, 333), (2, 65, 1)])
def test_product_is_within_its_bound(pool: Any, scheme: str, group: int, rows: int, n: int, k: int) -> None:
    weight, exact = make_weight(scheme, group, n, k)
    x = make_rows(scheme, group, rows, k)
    assert_within(native.linear(pool, x, [weight]), x.astype(np.float64) @ exact.T, bound(scheme, group, x, exact))


@pytest.mark.parametrize(("scheme", "group"), SCHEMES, ids=IDS)
def test_a_row_is_the_same_alone_and_among_others(pool: Any, two_threads: Any, scheme: str, group: int) -> None:
    rows, n, k = 45, 200, 420
    weight, _ = make_weight(scheme, group, n, k)
    x = normal(rows, k)
    together = native.linear(pool, x, [weight])
    for start in range(rows):
        np.testing.assert_array_equal(native.linear(pool, x[start : start + 1], [weight])[0], together[start])
    for count in range(2, 41):  # every height of tile, at another offset each
        start = (count * 7) % (rows - count + 1)
        np.testing.assert_array_equal(native.linear(two_threads, x[start:][:count], [weight]), together[start:][:count])


@pytest.mark.parametrize(("scheme", "group"), SCHEMES, ids=IDS)
def test_a_row_is_the_same_wherever_many_are_cut(pool: Any, scheme: str, group: int) -> None:
    weight, _ = make_weight(scheme, group, 130, 420)
    x = normal(210, 420)
    together = native.linear(pool, x, [weight])
    for count in (48, 49, 63, 64, 65, 72, 80, 97, 127, 129, 138):
        start = count % 7
        np.testing.assert_array_equal(native.linear(pool, x[start:][:count], [weight]), together[start:][:count])


@pytest.mark.parametrize(("scheme", "group"), SCHEMES, ids=IDS)
def test_threads_change_nothing(pool: Any, two_threads: Any, scheme: str, group: int) -> None:
    weight, _ = make_weight(scheme, group, 640, 512)
    for rows in (1, 64, 150):
        x = normal(rows, 512, seed=rows)
        np.testing.assert_array_equal(native.linear(two_threads, x, [weight]), native.linear(pool, x, [weight]))


def test_parts_of_different_schemes_with_bias_and_residual(two_threads: Any) -> None:
    rows, k, widths = 9, 260, (70, 64, 3, 129, 64)
    kinds = [("f32", 0), ("bf16", 0), ("int8", 64), ("int4", 64), ("int8", 32)]
    made = [make_weight(s, g, n, k, seed=n + i) for i, ((s, g), n) in enumerate(zip(kinds, widths, strict=True))]
    codes = np.random.default_rng(7).integers(-127, 128, (rows, k)).astype(np.float32)
    codes[:, ::32] = 127  # exact in every form: one scale for all groups
    x = codes / 8
    bias, residual = normal(sum(widths)), normal(rows, sum(widths), seed=3)
    got = native.linear(two_threads, x, [packed for packed, _ in made], bias=bias, residual=residual)
    exact = np.concatenate([values for _, values in made])
    limit = np.concatenate([bound(s, g, x, v) for (s, g), (_, v) in zip(kinds, made, strict=True)], axis=1)
    expected = x.astype(np.float64) @ exact.T + bias + residual
    assert_within(got, expected, limit + 2.0**-22 * (np.abs(expected) + np.abs(bias) + np.abs(residual)))


@pytest.mark.parametrize("scheme", ["f32", "int8"])
def test_logits_are_scaled_then_capped(two_threads: Any, scheme: str) -> None:
    group = 64 if scheme == "int8" else 0
    weight, exact = make_weight(scheme, group, 150, 128)
    x = make_rows(scheme, group, 7, 128)
    product = x.astype(np.float64) @ exact.T
    limit = bound(scheme, group, x, exact)
    scaled = native.linear(two_threads, x, [weight], scale=0.25)
    assert_within(scaled, 0.25 * product, limit)
    capped = native.linear(two_threads, x, [weight], scale=0.25, softcap=30.0)
    assert_within(capped, 30 * np.tanh(0.25 * product / 30), limit + 30 * 2.0**-18)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-np.clip(x, -700, None)))


def gelu_tanh(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "kinds", [("f32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int8"), ("f32", "int8"), ("wide", "wide")]
)
def test_gated_product(two_threads: Any, activation: str, kinds: tuple[str, str]) -> None:
    rows, n, k = 11, 100, 192
    groups = [{"int8": 64, "int4": 64, "wide": k}.get(kind, 0) for kind in kinds]
    gate, gate_exact = make_weight(kinds[0], groups[0], n, k, seed=5)
    up, up_exact = make_weight(kinds[1], groups[1], n, k, seed=6)
    x = make_rows(kinds[1], groups[1], rows, k) / 64
    gate_bias, up_bias = normal(n), normal(n, seed=8)
    g = x.astype(np.float64) @ gate_exact.T + gate_bias
    u = x.astype(np.float64) @ up_exact.T + up_bias
    got = native.gated_linear(two_threads, x, gate, up, activation, gate_bias, up_bias)
    act = silu if activation == "silu" else gelu_tanh
    g_limit = bound(kinds[0], groups[0], x, gate_exact) + 2.0**-22 * np.abs(g)
    u_limit = bound(kinds[1], groups[1], x, up_exact) + 2.0**-22 * np.abs(u)
    limit = 1.2 * g_limit * np.abs(u) + (np.abs(act(g)) + g_limit) * u_limit + 2.0**-17 * np.abs(g * u) + 1e-6
    assert_within(got, act(g) * u, limit)
    without = native.gated_linear(two_threads, x, gate, up, activation)
    np.testing.assert_array_equal(without[4], native.gated_linear(two_threads, x[4:5], gate, up, activation)[0])


def test_gated_parts_whose_groups_differ_in_size() -> None:
    """What a thread unpacks the one into has to grow for the other."""
    rows, n, k = 20, 64, 4096
    gate, _ = make_weight("int8", 32, n, k)
    up, _ = make_weight("int8", k, n, k)
    x = make_rows("int8", k, rows, k)
    got: list[Floats] = []
    new = threading.Thread(target=lambda: got.append(native.gated_linear(native.Pool(1), x, gate, up, "silu")))
    new.start()
    new.join()
    alone = [native.gated_linear(native.Pool(1), x[i : i + 1], gate, up, "silu") for i in range(rows)]
    np.testing.assert_array_equal(got[0], np.concatenate(alone))


def test_extreme_codes_do_not_saturate(pool: Any) -> None:
    k = 256
    x = np.full((2, k), 127, np.float32)
    x[1] *= -1
    for sign in (-127, 127):
        weight = native.pack_int8(np.full((64, k), sign, np.int8), np.ones((64, 1), np.float32), k)
        np.testing.assert_array_equal(native.linear(pool, x, [weight]), np.outer([1, -1], np.full(64, 127 * sign * k)))
    wide = np.float32(MOST_WIDE) * x / 127
    for sign in (-127, 127):
        weight = native.pack_int8(np.full((64, k), sign, np.int8), np.ones((64, 1), np.float32), k, True)
        exact = np.outer([1, -1], np.full(64, MOST_WIDE * sign * k))
        np.testing.assert_allclose(native.linear(pool, wide, [weight]), exact, rtol=2.0**-22)
    nibbles = np.full((64, k), 15, np.uint8)
    weight = native.pack_int4(nibbles, np.ones((64, 1), np.float32), np.full((64, 1), -1, np.float32), k)
    np.testing.assert_array_equal(native.linear(pool, x, [weight]), np.outer([1, -1], np.full(64, 127 * 14 * k)))


def test_rows_of_zeros_and_no_rows(pool: Any) -> None:
    for scheme, group in SCHEMES:
        weight, _ = make_weight(scheme, group, 70, 100)
        assert not native.linear(pool, np.zeros((3, 100), np.float32), [weight]).any()
        assert native.linear(pool, np.zeros((0, 100), np.float32), [weight]).shape == (0, 70)


def test_float_weights_are_rounded_to_bf16_when_packed(pool: Any) -> None:
    values = normal(70, 33)
    rounded = values.astype(ml_dtypes.bfloat16)
    x = make_rows("bf16", 0, 4, 33)
    direct = native.linear(pool, x, [native.pack_bf16(values)])
    np.testing.assert_array_equal(direct, native.linear(pool, x, [native.pack_bf16(rounded.view(np.uint16))]))


def test_symmetric_int4_holds_no_minimums() -> None:
    held, _ = make_weight("symmetric", 32, 64, 128)
    asymmetric, _ = make_weight("int4", 32, 64, 128)
    assert held.nbytes == asymmetric.nbytes - 64 * 4 * 4


def test_packed_weight_describes_itself() -> None:
    weight, _ = make_weight("int8", 64, 130, 192)
    assert (weight.scheme, weight.n, weight.k, weight.group) == ("int8", 130, 192, 64)
    assert weight.nbytes == 192 * 192 + 192 * 3 * 4  # three panels of codes, a float scale per group


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_scales_that_fit_float16_are_held_so_and_change_nothing(pool: Any, scheme: str) -> None:
    n, k, group = 70, 130, 32
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = rng.uniform(-0.02, 0.02, (n, 5)).astype(np.float16).astype(np.float32)
    scales[0, :3] = [0.0, 65504.0, 2.0**-14]

    def packed(values: Floats) -> Any:
        if scheme == "int8":
            return native.pack_int8(codes.astype(np.int8), values, group)
        return native.pack_int4(codes, values, scales[::-1].copy(), group)

    inexact = scales.copy()
    inexact[-1, -1] = 0.1  # no float16: all are held as float32
    half, full = packed(scales), packed(inexact)
    assert full.nbytes - half.nbytes == 2 * 2 * 64 * 5 * (2 if scheme == "int4" else 1)
    for rows in (1, 7, 20):
        x = normal(rows, k)
        np.testing.assert_array_equal(native.linear(pool, x, [half])[:, :-1], native.linear(pool, x, [full])[:, :-1])


def test_what_cannot_be_packed_is_refused(pool: Any) -> None:
    codes, scales = np.zeros((2, 64), np.int8), np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="scales must be"):
        native.pack_int8(codes, scales, 64)
    with pytest.raises(ValueError, match="group"):
        native.pack_int8(codes, np.ones((2, 64 // 6 + 1), np.float32), 6)
    with pytest.raises(ValueError, match="-128"):
        native.pack_int8(np.full((2, 64), -128, np.int8), scales, 32)
    with pytest.raises(ValueError, match="above 15"):
        native.pack_int4(np.full((2, 64), 16, np.uint8), scales, scales, 32)
    with pytest.raises(ValueError, match="x must be"):
        native.linear(pool, np.zeros((1, 63), np.float32), [native.pack_int8(codes, scales, 32)])
