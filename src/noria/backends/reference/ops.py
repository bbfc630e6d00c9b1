"""The ops, one function each: float32 in, float32 out, float64 in between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.backends.base import Attention, Batch, GatedLinear, RopeCache, RopeTable, Scheme, Table, Weight
from noria.backends.reference.cache import ReferenceCache
from noria.backends.rtn import dequantise_source, quantise_int8, round_bf16, round_wide
from noria.plan import Float32, Int32

Float64 = NDArray[np.float64]

PRODUCT_ROWS = 4096  # rows of a weight that are widened to float64 at once


def embed(table: Table, input_ids: Int32, scale: float) -> Float32:
    """[tokens] → [tokens, width]."""
    held: NDArray[Any] = table.data
    rows: Float32 = held[input_ids].astype(np.float32) * np.float32(scale)
    return rows


def norm(x: Float32, weight: Float32, eps: float, residual: Float32 | None) -> Float32:
    """RMS norm over the last axis (Zhang and Sennrich, 2019)."""
    wide = x.astype(np.float64)
    out = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight
    return narrow(out if residual is None else out + residual)


def operand(x: Float32, scheme: Scheme) -> Float32:
    """The left operand [rows, k] that a product in this scheme sees."""
    if scheme.name == "f32" or not x.size:
        return x
    if scheme.name == "bf16":
        return round_bf16(x)
    if scheme.wide:
        return round_wide(x)
    return dequantise_source(quantise_int8(x, scheme.group))


def product(x: Float32, weight: Weight) -> Float64:
    """x [rows, k] @ weight.T → [rows, n], in the weight's scheme."""
    left = operand(x, weight.scheme).astype(np.float64)
    out = np.empty((len(x), weight.n))
    for start in range(0, weight.n, PRODUCT_ROWS):
        rows = slice(start, start + PRODUCT_ROWS)
        np.matmul(left, weight.data[rows].T.astype(np.float64), out=out[:, rows])
    return out


def linear(x: Float32, parts: tuple[Weight, ...], bias: Float32 | None, residual: Float32 | None) -> Float32:
    """Products side by side, then bias and residual."""
    out = np.concatenate([product(x, part) for part in parts], axis=1)
    for addend in (bias, residual):
        if addend is not None:
            out += addend
    return narrow(out)


def gated_linear(op: GatedLinear, x: Float32) -> Float32:
    """activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)."""
    gate, up = product(x, op.gate), product(x, op.up)
    if op.gate_bias is not None:
        gate += op.gate_bias
    if op.up_bias is not None:
        up += op.up_bias
    return narrow({"silu": silu, "gelu_tanh": gelu_tanh}[op.activation](gate) * up)


def silu(x: Float64) -> Float64:
    """x * sigmoid(x), without overflow for large negative x."""
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def gelu_tanh(x: Float64) -> Float64:
    """GELU in its tanh form (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def rope_cache(op: RopeCache, qkv: Float32, batch: Batch, cache: ReferenceCache) -> Float32:
    """Head norms, rotation, cache write; yields the queries [tokens, heads * head_dim]."""
    heads = qkv.reshape(len(qkv), -1, op.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
    q, k, v = np.split(heads, [op.heads, op.heads + op.kv_heads], axis=1)
    q = q if op.q_norm is None else norm(q, op.q_norm, op.eps, None)
    k = k if op.k_norm is None else norm(k, op.k_norm, op.eps, None)
    if op.rope is not None:
        q, k = rotate(q, op.rope, batch.positions), rotate(k, op.rope, batch.positions)
    cache.write(op.layer, batch.kv_positions, k, v)
    return q.reshape(len(q), -1)


def rotate(x: Float32, rope: RopeTable, positions: Int32) -> Float32:
    """Turns the pairs (i, i + rotary_dim / 2) of x [tokens, heads, head_dim] by position; further dims are kept."""
    half = rope.rotary_dim // 2
    cos = rope.cos[positions][:, None, :].astype(np.float64)  # [tokens, 1, half]
    sin = rope.sin[positions][:, None, :].astype(np.float64)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([narrow(a * cos - b * sin), narrow(b * cos + a * sin), x[..., 2 * half :]], axis=-1)


def attention(op: Attention, q: Float32, batch: Batch, cache: ReferenceCache) -> Float32:
    """Causal attention of each sequence over its own blocks."""
    out = np.empty_like(q)
    block_size = cache.layout.block_size
    for index, (start, stop) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        key_positions = np.arange(batch.kv_lengths[index])
        blocks = batch.block_tables[batch.slots[index]]
        keys, values = cache.read(
            op.layer, blocks[key_positions // block_size] * block_size + key_positions % block_size
        )
        queries = q[start:stop].reshape(-1, op.heads, op.head_dim)
        seen = visible(batch.positions[start:stop], key_positions, op.window)
        out[start:stop] = attend(op, queries, keys, values, seen)
    return out


def visible(positions: Int32, key_positions: NDArray[np.int64], window: int) -> NDArray[np.bool_]:
    """[queries, keys]: position p sees p - window + 1 … p (window 0: 0 … p)."""
    distance = positions[:, None] - key_positions[None, :]
    seen: NDArray[np.bool_] = distance >= 0
    return seen & (distance < window) if window else seen


def attend(op: Attention, queries: Float32, keys: Float32, values: Float32, seen: NDArray[np.bool_]) -> Float32:
    """queries [q, heads, d], keys and values [keys, kv_heads, d], seen [q, keys] → [q, heads * d]."""
    shared = op.heads // op.kv_heads  # query heads of one KV head
    grouped = queries.reshape(len(queries), op.kv_heads, shared, op.head_dim).transpose(1, 2, 0, 3)
    per_head = keys.transpose(1, 2, 0)[:, None].astype(np.float64)  # [kv_heads, 1, d, keys]
    scores = np.matmul(grouped.astype(np.float64), per_head) * op.scale  # [kv_heads, shared, q, keys]
    if op.softcap:
        scores = op.softcap * np.tanh(scores / op.softcap)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.matmul(weights, values.transpose(1, 0, 2)[:, None].astype(np.float64))  # [kv_heads, shared, q, d]
    return narrow(out.transpose(2, 0, 1, 3).reshape(len(queries), -1))


def narrow(values: Float64) -> Float32:
    """Rounds to float32."""
    return values.astype(np.float32)
