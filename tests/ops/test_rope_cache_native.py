"""Native rope_cache: norm, rotation and what the cache keeps, against NumPy; block copies."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

native: Any = pytest.importorskip("noria._native")

TYPES = ("f32", "bf16", "int8")


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def kept(x: np.ndarray, type: str) -> tuple[np.ndarray, np.ndarray]:
    """What the cache type keeps of heads [..., head_dim], and by how much it may be off for rounding at a tie."""
    if type == "f32":
        return x, np.abs(x) * 2e-6 + 1e-6
    if type == "bf16":
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64), np.abs(x) * 2**-7 + 1e-6
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(scale, scale, 1)) * scale, 1.001 * scale + 1e-6


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary", "norm"),
    [(64, 64, False), (80, 32, True), (128, 128, True), (256, 256, True), (72, 0, False)],
)
@pytest.mark.parametrize("block_size", [8, 16])
def test_matches_reference(isa: str, type: str, head_dim: int, rotary: int, norm: bool, block_size: int) -> None:
    random = np.random.default_rng(1)
    heads, kv_heads, tokens, eps = 3, 2, 37, 1e-5
    qkv = random.standard_normal((tokens, (heads + 2 * kv_heads) * head_dim)).astype(np.float32)
    qkv[3] = 0
    positions = random.integers(0, 50, tokens).astype(np.int32)
    kv_positions = random.permutation(12 * block_size if block_size == 8 else 96)[:tokens].astype(np.int32)
    angles = random.uniform(0, 6, (50, rotary // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    weights = [random.uniform(0.5, 1.5, head_dim).astype(np.float32) if norm else None for _ in range(2)]
    cache = native.KvCache(2, type, kv_heads, head_dim, block_size, 12)
    tables = (cos, sin) if rotary else (None, None)
    arguments = (qkv, positions, kv_positions, cache, 1, heads, *tables, *weights, eps)
    q = native.rope_cache(native.Pool(1), *arguments)

    split = qkv.astype(np.float64).reshape(tokens, heads + 2 * kv_heads, head_dim)
    want_q, want_k, want_v = split[:, :heads], split[:, heads:-kv_heads], split[:, -kv_heads:]
    if norm:
        want_q, want_k = rms(want_q, weights[0], eps), rms(want_k, weights[1], eps)
    want_q, want_k = (rotate(x, cos[positions], sin[positions]) for x in (want_q, want_k))
    assert np.abs(q.reshape(want_q.shape) - want_q).max() <= 5e-6
    got_k, got_v = cache.read(1, kv_positions)
    for got, want in ((got_k, want_k), (got_v, want_v)):
        stored, slack = kept(want, type)
        off = np.abs(got - stored)
        assert (off <= slack).all()
        # Ties apart, it is the nearest code.
        assert np.mean(off <= np.abs(want) * 2e-6 + 1e-6) >= 0.99
    untouched = np.setdiff1d(np.arange(12 * block_size, dtype=np.int32), kv_positions).astype(np.int32)
    assert all(not x.any() for x in cache.read(1, untouched))
    assert all(not x.any() for x in cache.read(0, kv_positions))

    other = native.KvCache(2, type, kv_heads, head_dim, block_size, 12)
    arguments = (qkv, positions, kv_positions, other, 1, heads, *tables, *weights, eps)
    assert np.array_equal(native.rope_cache(native.Pool(3), *arguments), q)
    assert all(np.array_equal(a, b) for a, b in zip(other.read(1, kv_positions), (got_k, got_v), strict=True))


@pytest.mark.parametrize("type", TYPES)
def test_copied_blocks_hold_the_same(type: str) -> None:
    cache = native.KvCache(3, type, 2, 64, 16, 6)
    random = np.random.default_rng(2)
    every = np.arange(96, dtype=np.int32)
    for layer in range(3):
        qkv = random.standard_normal((96, 6 * 64)).astype(np.float32)
        native.rope_cache(native.Pool(1), qkv, every, every, cache, layer, 2, None, None)
    before = [cache.read(layer, every) for layer in range(3)]
    cache.copy_blocks(np.array([[0, 5], [2, 3], [1, 1]], np.int32))
    source = np.array([0, 1, 2, 2, 4, 0])
    moved = (source[:, None] * 16 + np.arange(16)).reshape(-1)
    for layer in range(3):
        for got, want in zip(cache.read(layer, every), before[layer], strict=True):
            assert np.array_equal(got, want[moved])
    with pytest.raises(ValueError):
        cache.copy_blocks(np.array([[0, 6]], np.int32))
