"""Round-to-nearest quantisation and the choice of schemes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.backends.base import DenseSource, GroupedSource, Scheme
from noria.backends.rtn import dequantise_source, quantise_int4, quantise_int8, regroup, round_bf16, round_wide
from noria.config import ModelOptions
from noria.errors import BackendError
from noria.quantize.schemes import choose_cache_type, choose_scheme, default_int4_group, default_int8


def weight(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(5, size=(n, k)).astype(np.float32)


def per_value(source: GroupedSource, per_group: np.ndarray) -> np.ndarray:
    return np.repeat(per_group, source.group, axis=1)[:, : source.shape[1]]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), k=st.integers(1, 200), group=st.integers(1, 220), seed=st.integers(0, 100))
def test_int8_is_within_half_a_step_and_reaches_127(n: int, k: int, group: int, seed: int) -> None:
    w = weight(n, k, seed)
    source = quantise_int8(w, group)
    assert source.codes.dtype == np.int8
    assert source.scales.shape == (n, -(-k // source.group))
    assert np.abs(dequantise_source(source) - w).max() <= (0.5001 * source.scales.max())
    assert (np.abs(dequantise_source(source) - w) <= 0.5001 * per_value(source, source.scales)).all()
    starts = np.arange(0, k, source.group)
    assert (np.maximum.reduceat(np.abs(source.codes.astype(int)), starts, axis=1) == 127).all()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), k=st.integers(1, 200), group=st.integers(1, 220), seed=st.integers(0, 100))
def test_int4_is_no_worse_than_the_plain_range(n: int, k: int, group: int, seed: int) -> None:
    w = weight(n, k, seed)
    source = quantise_int4(w, group)
    assert source.codes.dtype == np.uint8
    assert source.codes.max() <= 15
    assert source.minimums is not None
    error = (dequantise_source(source) - w) ** 2
    starts = np.arange(0, k, source.group)
    low, high = np.minimum.reduceat(w, starts, axis=1), np.maximum.reduceat(w, starts, axis=1)
    step = per_value(source, (high - low) / 15)
    low = per_value(source, low)
    plain = (np.rint((w - low) / np.where(step > 0, step, 1)) * step + low - w) ** 2
    assert (np.add.reduceat(error, starts, axis=1) <= np.add.reduceat(plain, starts, axis=1) * 1.001 + 1e-10).all()


def test_int4_search_pays_on_weights_with_outliers() -> None:
    w = weight(512, 64)
    low, high = w.min(axis=1, keepdims=True), w.max(axis=1, keepdims=True)
    step = (high - low) / 15
    plain = np.mean((np.rint((w - low) / step) * step + low - w) ** 2)
    assert np.mean((dequantise_source(quantise_int4(w, 64)) - w) ** 2) < 0.93 * plain


def test_a_weight_larger_than_a_chunk_is_the_same_as_its_rows() -> None:
    w = weight(3000, 130)
    whole, part = quantise_int4(w, 32), quantise_int4(w[2950:], 32)
    assert (whole.codes[2950:] == part.codes).all()
    assert (whole.scales[2950:] == part.scales).all()
    assert (dequantise_source(whole)[2950:] == dequantise_source(part)).all()


def test_zero_and_constant_groups_are_exact() -> None:
    w = np.zeros((2, 64), np.float32)
    w[1, 32:] = 0.7
    assert (dequantise_source(quantise_int4(w, 32)) == w).all()
    assert (dequantise_source(quantise_int8(w, 32)) == w).all()
    tiny = np.full((1, 32), 1e-44, np.float32)
    assert np.isfinite(dequantise_source(quantise_int8(tiny, 32))).all()


def test_bf16_rounds_to_nearest_even() -> None:
    one = np.float32(1.0)
    step = np.float32(2.0**-7)
    assert round_bf16(np.array([one + step / 2, one + step * 1.5, one + step * 0.51])).tolist() == [
        1.0,
        1.0 + 2 * step,
        1.0 + step,
    ]


def test_bad_weights_are_refused() -> None:
    bad = np.ones((2, 4), np.float32)
    bad[1, 1] = np.nan
    for quantise in (quantise_int8, quantise_int4):
        with pytest.raises(BackendError, match="finite"):
            quantise(bad, 4)
        with pytest.raises(BackendError, match="matrix"):
            quantise(np.ones(4, np.float32), 4)
        with pytest.raises(BackendError, match="at least 1"):
            quantise(np.ones((2, 4), np.float32), 0)


def test_regroup_keeps_what_fits_exactly() -> None:
    source = quantise_int4(weight(4, 96), 32)
    assert regroup(source, 4, 32) is source
    assert regroup(source, 8, 32).codes.dtype == np.int8
    assert regroup(source, 4, 96).group == 96


DENSE = DenseSource(weight(4, 96).astype(ml_dtypes.bfloat16))
DEQUANTISED = DenseSource(weight(4, 96))
FOUR = quantise_int4(weight(4, 96), 16)
EIGHT = quantise_int8(weight(4, 96), 32)
INT8 = default_int8(96)
INT4 = Scheme("int4", default_int4_group(96))


@pytest.mark.parametrize(
    ("source", "stored", "flags", "scheme"),
    [
        (DENSE, "bf16", {}, Scheme("bf16")),
        (DEQUANTISED, "f32", {}, Scheme("bf16")),
        (DENSE, "bf16", {"dtype": "f32"}, Scheme("f32")),
        (DENSE, "bf16", {"quantization": "int8"}, INT8),
        (DENSE, "bf16", {"quantization": "int4"}, INT4),
        (FOUR, "Q4_1", {}, Scheme("int4", 16)),
        (FOUR, "Q4_1", {"quantization": "int4"}, Scheme("int4", 16)),
        (FOUR, "Q4_1", {"quantization": "int8"}, INT8),
        (FOUR, "Q4_1", {"quantization": "none"}, Scheme("bf16")),
        (FOUR, "Q4_1", {"dtype": "bf16"}, Scheme("int4", 16)),
        (FOUR, "Q4_1", {"dtype": "f32"}, Scheme("f32")),
        (FOUR, "Q4_1", {"dtype": "f32", "quantization": "int8"}, INT8),
        (EIGHT, "Q8_0", {}, Scheme("int8", 32)),
        (EIGHT, "Q8_0", {"quantization": "int8"}, INT8),
        (EIGHT, "Q8_0", {"quantization": "int4"}, INT4),
        (DEQUANTISED, "Q6_K", {}, INT8),
        (DENSE, "Q6_K", {}, Scheme("bf16")),
        (DEQUANTISED, "Q6_K", {"quantization": "none", "dtype": "f32"}, Scheme("f32")),
    ],
)
def test_choice_of_scheme(source, stored, flags, scheme) -> None:
    assert choose_scheme(source, ModelOptions(model="m", **flags), stored) == scheme


@pytest.mark.parametrize("bits", [4, 8])
def test_regrouping_in_chunks_is_regrouping_at_once(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).standard_normal((50, 96)).astype(np.float32)
    stored = quantise_int8(values, 32)
    quantise = quantise_int4 if bits == 4 else quantise_int8
    at_once = quantise(dequantise_source(stored), 64)
    monkeypatch.setattr("noria.backends.rtn.CHUNK_VALUES", 7 * 96)
    chunked = regroup(stored, bits, 64)
    assert chunked.group == 64
    np.testing.assert_array_equal(chunked.codes, at_once.codes)
    np.testing.assert_array_equal(chunked.scales, at_once.scales)
    if bits == 4:
        np.testing.assert_array_equal(chunked.minimums, at_once.minimums)


def test_products_of_gated_activations_have_finer_groups() -> None:
    options = ModelOptions(model="m", quantization="int8")
    assert default_int8(1536, gated=True).group < default_int8(1536).group
    for name, group in (("mlp.down_proj", 32), ("mlp.up_proj", 64), ("self_attn.o_proj", 64)):
        assert choose_scheme(DENSE, options, "bf16", f"model.layers.3.{name}.weight") == Scheme("int8", group)


def test_wide_int8_has_one_scale_per_row_where_the_backend_prefers_it() -> None:
    options = ModelOptions(model="m", quantization="int8")
    for name in ("mlp.down_proj", "mlp.up_proj"):
        scheme = choose_scheme(DENSE, options, "bf16", f"model.layers.3.{name}.weight", wide_int8=True)
        assert scheme == Scheme("int8", 96, wide=True)
        assert str(scheme) == "int8/a16"
    assert choose_scheme(EIGHT, ModelOptions(model="m"), "Q8_0", wide_int8=True) == Scheme("int8", 32)
    assert not default_int8((1 << 16) + 1, wide=True).wide  # its sums might not fit 32 bits


def test_wide_rounding_keeps_sixteen_bits() -> None:
    x = weight(5, 300) * np.float32(3.7)
    x[2] = 0
    error = np.abs(round_wide(x) - x)
    assert (error <= np.abs(x).max(axis=1, keepdims=True) / 32384 * 0.51).all()
    assert error.max() > 0
    np.testing.assert_array_equal(round_wide(np.zeros((1, 4), np.float32)), 0)


def test_the_cache_is_int8_unless_asked_otherwise() -> None:
    assert choose_cache_type("auto", "auto", 64) == "int8"
    assert choose_cache_type("auto", "auto", 256) == "bf16"
    assert choose_cache_type("int8", "auto", 256) == "int8"
    assert choose_cache_type("auto", "f32", 64) == "f32"
    assert choose_cache_type("bf16", "f32", 64) == "bf16"
