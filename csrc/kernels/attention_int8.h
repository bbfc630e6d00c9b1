// q·k and p·v over the int8 cache with VNNI: exact integer products and sums.
//
// The other side keeps 16 bits. A query row is q = factor * (256 * high + low) with signed bytes, a row of weights of one
// tile is p = factor * (256 * high + low) with unsigned ones: rounded to 1/65,278 of the largest of the row, 1/65,535 of the
// largest of the tile, far below the cache's own rounding (1/254). Two byte products with exact int32 sums then stand for
// one in float, at a quarter of its cost.
#pragma once
#include "kernels/attention_tile.h"

#if defined(__AVX512VNNI__)
#define NORIA_INTEGER_ATTENTION 1

namespace noria::NORIA_ISA {

static constexpr int kIntegerRows = 3, kIntegerVectors = 4;  // two accumulators each: 24 registers

// sum += the four products of unsigned bytes with signed bytes. Inline assembly, because GCC 12 keeps the accumulator of
// the intrinsic on the stack.
static inline void dot_bytes(Vi& sum, Vi bytes, Vi codes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(codes));
}

static inline Vi broadcast_bytes(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return set1_int(word);
}

// Query rows in bytes.
struct ByteQueries {
  int8_t *high, *low;          // [rows][head_dim]
  int32_t *high_sum, *low_sum;  // [rows] -128 * sum: keys are stored as code + 128
  float* factor;               // [rows]
};

static void split_query(const float* q, int dim, int row, const ByteQueries& out) {
  Vf most = zero();
  for (int i = 0; i < dim; i += kLanes) most = max(abs(dim - i >= kLanes ? load(q + i) : load_partial(q + i, dim - i)), most);
  const float largest = reduce_max(most);
  const bool usable = largest > 1e-30f;
  const Vf inverse = set1(usable ? 32639.0f / largest : 0.0f);  // 127 * 256 + 127
  Vi high_sum = set1_int(0), low_sum = high_sum;
  for (int i = 0; i < dim; i += kLanes) {
    const int n = dim - i < kLanes ? dim - i : kLanes;
    const Vi code = to_int(mul(load_partial(q + i, n), inverse));
    const Vi high = _mm512_srai_epi32(add_int(code, set1_int(128)), 8);
    const Vi low = _mm512_sub_epi32(code, shift_left<8>(high));
    store_low8_partial(out.high + row * dim + i, high, n);
    store_low8_partial(out.low + row * dim + i, low, n);
    high_sum = add_int(high_sum, high);
    low_sum = add_int(low_sum, low);
  }
  out.high_sum[row] = -128 * reduce_add_int(high_sum);
  out.low_sum[row] = -128 * reduce_add_int(low_sum);
  out.factor[row] = usable ? largest / 32639.0f : 0.0f;
}

// scores[r] = (256 * high + low) · key codes. |high sums| < 2^22 for 256 dims, so that their conversion is exact.
template <int R, int V, bool kAhead>
static void dot_integer(const ByteQueries& q, int row, int dim, const char* const* keys, const char* const* next,
                        float* scores) {
  Vi high[R][V], low[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      high[r][v] = set1_int(q.high_sum[row + r]);
      low[r][v] = set1_int(q.low_sum[row + r]);
    }
  const char *key[V], *ahead[V];
  for (int v = 0; v < V; ++v) key[v] = keys[v];
  if constexpr (kAhead)
    for (int v = 0; v < V; ++v) ahead[v] = next[v];
  const int8_t *q_high = q.high + static_cast<int64_t>(row) * dim, *q_low = q.low + static_cast<int64_t>(row) * dim;
  for (int64_t i = 0; i < dim; i += 4) {
    Vi h[R], l[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      h[r] = broadcast_bytes(q_high + r * dim + i);
      l[r] = broadcast_bytes(q_low + r * dim + i);
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Vi word = load_words(key[v] + i * 16);
      fetch<kAhead>(ahead[v] + i * 16);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        dot_bytes(high[r][v], word, h[r]);
        dot_bytes(low[r][v], word, l[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      store(scores + r * kAttentionTile + v * kLanes, fma(set1(256.0f), to_float(high[r][v]), to_float(low[r][v])));
}

// Weights of a tile in bytes.
struct ByteWeights {
  uint8_t *high, *low;  // [rows][kAttentionTile]
  float* factor;        // [rows]
};

// weights: [kAttentionTile], none negative; the largest of them.
static inline void split_weights(const float* weights, float largest, int row, const ByteWeights& out) {
  const bool usable = largest > 1e-30f;
  const Vf inverse = set1(usable ? 65535.0f / largest : 0.0f);
#pragma GCC unroll 4
  for (int i = 0; i < kAttentionTile; i += kLanes) {
    const Vi code = to_int(mul(load(weights + i), inverse));
    store_low8(out.high + row * kAttentionTile + i, shift_right<8>(code));
    store_low8(out.low + row * kAttentionTile + i, code);
  }
  out.factor[row] = usable ? largest / 65535.0f : 0.0f;
}

template <int R, int V, bool kAhead>
static void accumulate_integer(const ByteWeights& weights, int row, const float* decay, const ValueTile& tile,
                               const ValueTile& next, int dim, float* accumulated) {
  Vi high[R][V], low[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) high[r][v] = low[r][v] = set1_int(0);
  const uint8_t *w_high = weights.high + row * kAttentionTile, *w_low = weights.low + row * kAttentionTile;
  const int64_t stride = static_cast<int64_t>(tile.head_dim) * 4;
  for (int first = 0; first < tile.tokens; first += 8) {
    const char* words = tile.runs[first / 8] + dim * 4;
    const char* ahead = kAhead ? next.runs[first / 8] + dim * 4 : nullptr;
    for (int t = first; t < first + 8 && t < tile.tokens; t += 4, words += stride) {
      Vi h[R], l[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        h[r] = broadcast_bytes(w_high + r * kAttentionTile + t);
        l[r] = broadcast_bytes(w_low + r * kAttentionTile + t);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Vi word = load_words(words + v * 64);
        fetch<kAhead>(ahead + v * 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          dot_bytes(high[r][v], h[r], word);
          dot_bytes(low[r][v], l[r], word);
        }
      }
      if constexpr (kAhead) ahead += stride;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Vf keep = set1(decay[r]), factor = set1(weights.factor[row + r]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* at = accumulated + r * tile.stride + v * kLanes;
      const Vf sum = fma(set1(256.0f), to_float(high[r][v]), to_float(low[r][v]));
      store(at, fma(sum, factor, mul(keep, load(at))));
    }
  }
}

using DotIntegerFn = void (*)(const ByteQueries&, int, int, const char* const*, const char* const*, float*);
using AccumulateIntegerFn = void (*)(const ByteWeights&, int, const float*, const ValueTile&, const ValueTile&, int, float*);

template <bool kAhead> struct IntegerKernels {  // [rows - 1][vectors - 1]
  DotIntegerFn dots[kIntegerRows][kIntegerVectors];
  AccumulateIntegerFn sums[kIntegerRows][kIntegerVectors];
  template <int R, int V> constexpr void fill() {
    dots[R - 1][V - 1] = dot_integer<R, V, kAhead>;
    sums[R - 1][V - 1] = accumulate_integer<R, V, kAhead>;
    if constexpr (V > 1) fill<R, V - 1>();
    else if constexpr (R > 1) fill<R - 1, kIntegerVectors>();
  }
  constexpr IntegerKernels() : dots(), sums() { fill<kIntegerRows, kIntegerVectors>(); }
};

}  // namespace noria::NORIA_ISA

#endif
