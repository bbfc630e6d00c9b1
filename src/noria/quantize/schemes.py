"""Which scheme a weight is held in: from what the user asked for and what the file stores.

Owns the defaults (grouping of int8 and int4, cache type), settled by measurement: `benchmarks/results/`. The
arithmetic is that of `noria.backends.rtn`, given out here again for the floors above. Knows nothing of packing.
"""

from __future__ import annotations

from noria.backends.base import CacheType, DenseSource, GroupedSource, Scheme, WeightSource
from noria.backends.rtn import dequantise_source, quantise_int4, quantise_int8, regroup, round_bf16
from noria.config import CacheDtype, Dtype, ModelOptions

__all__ = [
    "choose_cache_type",
    "choose_scheme",
    "default_int4_group",
    "default_int8",
    "dequantise_source",
    "quantise_int4",
    "quantise_int8",
    "regroup",
    "round_bf16",
]

INT8_CACHE_HEAD_DIM = 64  # widest head that auto holds as int8
MOST_WIDE_COLUMNS = 1 << 16  # sums of so many products fit 32 bits
GATED_INPUT = ".down_proj.weight"
FLOAT_FILES = frozenset({"f32", "f16", "bf16"})  # ModelConfig.stored_dtype of files that are not quantised


def default_int8(k: int, gated: bool = False, wide: bool = False) -> Scheme:
    """The int8 scheme of a weight with k columns, where the user or the file leaves it open.

    Args:
        gated: the product's input is activation(gate) * up. It has far heavier tails than any other, and one outlier
            coarsens its whole group: groups of 64 there cost more perplexity than in all other products together.
        wide: whether the backend prefers activations of 16 bits (`Backend.wide_int8`). Nearly all that int8 loses, it
            loses in activations: with these, one scale per row of the weight is fine enough.
    """
    if wide and k <= MOST_WIDE_COLUMNS:
        return Scheme("int8", k, wide=True)
    return Scheme("int8", min(32 if gated else 64, k))


def default_int4_group(k: int) -> int:
    """Columns per scale when a weight is converted to int4: as fine as Q4_0 and Q4_1 files are."""
    return min(32, k)


def choose_cache_type(asked: CacheDtype, dtype: Dtype, head_dim: int) -> CacheType:
    """The KV cache's type; auto is the smallest whose cost in perplexity was measured below 0.5 %, and f32 in the exact
    mode (`--dtype f32`).

    An int8 cache has one scale per token and head: over heads of 64 it costs 0.1 % at most, over heads of 256 (Gemma 3)
    0.7 %; in between nothing was measured, so it is not taken unasked.
    """
    if asked != "auto":
        return asked
    if dtype == "f32":
        return "f32"
    return "int8" if head_dim <= INT8_CACHE_HEAD_DIM else "bf16"


def choose_scheme(
    source: WeightSource, options: ModelOptions, stored_dtype: str, name: str = "", wide_int8: bool = False
) -> Scheme:
    """The scheme of one weight of a product.

    Args:
        source: the weight as the loader gives it.
        options: `--quantization` wins; under auto, `--dtype f32` dequantises everything; else the file decides.
        stored_dtype: `ModelConfig.stored_dtype`. In a quantised file a dense float32 source is a type that the schemes
            do not hold as it is (Q5_0, Q6_K …), dequantised by the loader.
        name: the weight's name as Hugging Face writes it for a Llama; tells which products have a gated input.
        wide_int8: `Backend.wide_int8`.

    Returns:
        Dense weights in `--dtype` (auto: bf16), 4-bit groups as int4 and 8-bit groups (Q8_0) as int8 exactly as stored,
        other quantised types as int8 in the default grouping.
    """
    k = source.shape[1]
    int8 = default_int8(k, name.endswith(GATED_INPUT), wide_int8)
    if options.quantization == "none" or (options.quantization == "auto" and options.dtype == "f32"):
        return _dense(options)
    if options.quantization == "int8":
        return int8
    if isinstance(source, GroupedSource) and (source.bits == 4 or options.quantization == "auto"):
        return Scheme("int4" if source.bits == 4 else "int8", min(source.group, k))
    if options.quantization == "int4":
        return Scheme("int4", default_int4_group(k))
    return int8 if _dequantised(source, stored_dtype) else _dense(options)


def _dequantised(source: WeightSource, stored_dtype: str) -> bool:
    """Whether a loader made the values from a quantised type that no scheme holds."""
    dense = isinstance(source, DenseSource) and source.values.dtype == "float32"
    return dense and stored_dtype.lower() not in FLOAT_FILES


def _dense(options: ModelOptions) -> Scheme:
    return Scheme("f32" if options.dtype == "f32" else "bf16")
