"""Rope tables against values worked out by hand or written out anew, and what a scaling covers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from noria.errors import ConfigError, ModelError, UnsupportedModelError
from noria.layers.rope import covered_length, inverse_frequencies, rope_table
from noria.models.config import ModelConfig, RopeConfig
from noria.models.registry import resolve_max_model_len


def frequencies(scaling: dict[str, Any] | None, theta: float = 10000.0, dim: int = 8, length: int = 64, top: int = 64):
    return inverse_frequencies(theta, dim, scaling, top, length)


def test_plain_table() -> None:
    table = rope_table(10000.0, 4, None, 64, 5)
    assert table.cos.shape == (5, 2)
    assert table.rotary_dim == 4
    assert table.cos.dtype == table.sin.dtype == np.float32
    # Frequencies 1 and 1 / 100.
    np.testing.assert_allclose(table.cos[3], [math.cos(3), math.cos(0.03)], rtol=1e-6)
    np.testing.assert_allclose(table.sin[3], [math.sin(3), math.sin(0.03)], rtol=1e-6)


def test_angles_are_rounded_to_float32_as_models_were_trained() -> None:
    table = rope_table(10000.0, 64, None, 131072, 100_001)
    angle = np.float32(100_000) * np.float32(10000.0 ** (-2 / 64))
    assert table.cos[100_000, 1] == np.float32(math.cos(float(angle)))
    assert abs(math.cos(100_000 * 10000.0 ** (-2 / 64)) - table.cos[100_000, 1]) > 1e-4


def test_fewer_positions_are_the_first_of_the_same_table() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    whole, part = rope_table(10000.0, 8, scaling, 64, 128), rope_table(10000.0, 8, scaling, 64, 128, positions=30)
    assert part.cos.shape == (30, 4)
    np.testing.assert_array_equal(part.cos, whole.cos[:30])


def test_linear_divides_every_frequency() -> None:
    values, factor = frequencies({"rope_type": "linear", "factor": 4.0}, dim=4)
    np.testing.assert_allclose(values, [0.25, 0.0025], rtol=1e-6)
    assert factor == 1.0


def test_dynamic_stretches_the_base_from_the_longest_context() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    within, _ = frequencies(scaling, dim=4, length=64)
    np.testing.assert_allclose(within, [1.0, 0.01], rtol=1e-6)
    # base * (2 * 128 / 64 - 1) ** (4 / 2) = 10000 * 9
    beyond, _ = frequencies(scaling, dim=4, length=128)
    np.testing.assert_allclose(beyond, [1.0, 90000.0**-0.5], rtol=1e-6)


def test_llama3_keeps_short_waves_and_divides_long_ones() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    values, _ = inverse_frequencies(500000.0, 128, scaling, 131072, 131072)
    plain, _ = inverse_frequencies(500000.0, 128, None, 131072, 131072)
    assert values[0] == plain[0] == 1.0
    assert values[-1] == pytest.approx(plain[-1] / 8)
    waves = 2 * math.pi / plain.astype(np.float64)
    (between,) = np.nonzero((waves > 2048) & (waves < 8192))
    assert len(between) > 3
    for i in between:
        smooth = (8192 / waves[i] - 1) / 3
        assert values[i] == pytest.approx((1 - smooth) * plain[i] / 8 + smooth * plain[i], rel=1e-5)


def test_llama3_from_divisors_of_a_gguf() -> None:
    values, _ = frequencies({"rope_type": "llama3", "freq_factors": np.array([1.0, 8.0], np.float32)}, dim=4)
    np.testing.assert_allclose(values, [1.0, 0.00125], rtol=1e-6)


def test_yarn_ramp_and_temperature() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    values, factor = inverse_frequencies(1000000.0, 128, scaling, 131072, 131072)
    plain, _ = inverse_frequencies(1000000.0, 128, None, 131072, 131072)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    # Dimensions that turn 32 times or more within 32,768 tokens are kept, those below one turn are divided.
    low = math.floor(128 * math.log(32768 / (32 * 2 * math.pi)) / (2 * math.log(1e6)))
    high = math.ceil(128 * math.log(32768 / (2 * math.pi)) / (2 * math.log(1e6)))
    assert (low, high) == (23, 40)
    np.testing.assert_allclose(values[: low + 1], plain[: low + 1], rtol=1e-6)
    np.testing.assert_allclose(values[high:], plain[high:] / 4, rtol=1e-6)
    share = (30 - low) / (high - low)
    assert values[30] == pytest.approx(plain[30] / 4 * share + plain[30] * (1 - share), rel=1e-5)


def test_yarn_without_truncation_differs() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    rounded, _ = frequencies(scaling, dim=64)
    exact, _ = frequencies(scaling | {"truncate": False}, dim=64)
    assert not np.allclose(rounded, exact, rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"mscale": 1.0}, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_attention_factor(keys: dict[str, float], expected: float) -> None:
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, **keys}
    assert frequencies(scaling, dim=64)[1] == pytest.approx(expected)
    table = rope_table(10000.0, 64, scaling, 163840, 4)
    assert table.cos[0, 0] == pytest.approx(expected)


def test_longrope_chooses_its_factors_once_from_the_longest_context() -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0, 2.0],
        "long_factor": [4.0, 8.0],
        "original_max_position_embeddings": 32,
    }
    short, factor = frequencies(scaling, dim=4, length=32, top=128)
    long, same = frequencies(scaling, dim=4, length=33, top=128)
    np.testing.assert_allclose(short, [1.0, 0.005], rtol=1e-6)
    np.testing.assert_allclose(long, [0.25, 0.00125], rtol=1e-6)
    assert factor == same == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}, "4 numbers"),
        ({"rope_type": "linear", "factor": -2}, "above 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "above 0"),
    ],
)
def test_wrong_scalings_are_named(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        frequencies(scaling)


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (1e-300, None),
        (10000.0, {"rope_type": "linear", "factor": 1e-300}),
        (
            10000.0,
            {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 1, "attention_factor": 1e300},
        ),
    ],
)
def test_numbers_that_overflow_are_refused(theta: float, scaling: dict[str, Any] | None) -> None:
    with pytest.raises(ModelError, match="not finite"):
        rope_table(theta, 8, scaling, 64, 64)


def test_a_covered_length_is_bounded() -> None:
    assert covered_length({"rope_type": "linear", "factor": 1e308}, 4096) == 2**31 - 1


def test_unknown_scaling_lists_what_runs() -> None:
    with pytest.raises(UnsupportedModelError, match=r"mrope.*linear, dynamic, llama3, yarn, longrope"):
        frequencies({"rope_type": "mrope"})


def config(scaling: dict[str, Any] | None, max_position: int = 4096) -> ModelConfig:
    rope = RopeConfig(10000.0, 64, scaling)
    return ModelConfig("llama", 1, 64, 64, 1, 1, 64, 10, 1e-5, rope, max_position, 0.125, (0,))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def test_longest_context() -> None:
    assert covered_length(None, 4096) == 4096
    assert resolve_max_model_len(config(None), None) == 4096
    assert resolve_max_model_len(config(None), 100) == 100
    assert resolve_max_model_len(config(YARN), None) == 16384
    assert resolve_max_model_len(config({"rope_type": "linear", "factor": 2.0}), None) == 4096
    assert resolve_max_model_len(config({"rope_type": "linear", "factor": 2.0}), 8192) == 8192


@pytest.mark.parametrize(
    ("scaling", "asked", "said"),
    [(None, 4097, "4096 tokens .* no RoPE scaling"), (YARN, 16385, "16384 tokens .*yarn"), (None, 0, "at least 1")],
)
def test_longer_than_covered_is_refused(scaling: dict[str, Any] | None, asked: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--max-model-len: .*{said}"):
        resolve_max_model_len(config(scaling), asked)
