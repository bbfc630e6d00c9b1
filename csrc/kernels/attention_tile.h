// Micro-kernels of attention: q·k of a few query rows with one tile of keys, and p·v with one tile of values.
// Every score and every output lane has its own chain of fused multiply-adds in a fixed order, so that how many rows and
// lanes are computed at once (R, V) cannot change a bit.
#pragma once
#include "kernels/attention.h"
#include "kernels/power_of_two.h"
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

#if defined(__AVX512VNNI__) || defined(NORIA_ISA_neon) || defined(NORIA_ISA_neon_i8mm)
static constexpr int kMaxRows = 4, kMaxVectors = 4;  // 32 registers
#else
static constexpr int kMaxRows = 3, kMaxVectors = 2;  // 16 registers
#endif

static inline Vi load_words(const char* p) { return as_int(load(reinterpret_cast<const float*>(p))); }

// Arithmetic shift right by 24: the sign-extended top byte.
static inline Vi sign_top(Vi v) {
#if defined(__AVX512VNNI__)
  return _mm512_srai_epi32(v, 24);
#elif defined(NORIA_ISA_avx2)
  return _mm256_srai_epi32(v, 24);
#elif defined(NORIA_ISA_neon) || defined(NORIA_ISA_neon_i8mm)
  return vshrq_n_s32(v, 24);
#elif defined(__SSE4_1__)
  return _mm_srai_epi32(v, 24);
#else
  Vi out = v;
  int32_t lanes[kLanes];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int i = 0; i < kLanes; ++i) lanes[i] >>= 24;
  std::memcpy(&out, lanes, sizeof lanes);
  return out;
#endif
}

// Whether a lane exceeds the level.
static inline bool exceeds(Vf v, float level) {
#if defined(__AVX512VNNI__)
  return _mm512_cmp_ps_mask(v, set1(level), _CMP_GT_OQ) != 0;
#elif defined(NORIA_ISA_avx2)
  return _mm256_movemask_ps(_mm256_cmp_ps(v, set1(level), _CMP_GT_OQ)) != 0;
#else
  return reduce_max(v) > level;
#endif
}

// Elements of a word of keys or values as floats. kPack elements per word; part<j> is element j.
struct F32 {
  static constexpr int kPack = 1;
  template <int j> static inline Vf key(Vi w) { return as_float(w); }
  template <int j> static inline Vf value(Vi w) { return as_float(w); }
};
struct Bf16 {
  static constexpr int kPack = 2;
  template <int j> static inline Vf key(Vi w) {
    return as_float(j ? and_int(w, set1_int(static_cast<int>(0xffff0000u))) : shift_left<16>(w));
  }
  template <int j> static inline Vf value(Vi w) { return key<j>(w); }
};
struct Int8 {
  static constexpr int kPack = 4;
  template <int j> static inline Vf key(Vi w) {  // stored as code + 128
    const Vi byte = j == 3 ? shift_right<24>(w) : and_int(shift_right<8 * j>(w), set1_int(0xff));
    return to_float(add_int(byte, set1_int(-128)));
  }
  template <int j> static inline Vf value(Vi w) { return to_float(sign_top(j == 3 ? w : shift_left<24 - 8 * j>(w))); }
};

// A line of the next tile for each line of this one (kAhead): spread over the loop, fetches overlap with arithmetic, where
// a burst of them would wait for free line buffers.
template <bool kAhead> static inline void fetch(const char* p) {
  if constexpr (kAhead) __builtin_prefetch(p, 0, 2);
}

// scores[r][v * kLanes …] = q[r] · key, summed in ascending dim. keys[v]: first word of the vector; rows of 16 words.
template <class T, int R, int V, bool kAhead>
static void dot(const float* q, int head_dim, const char* const* keys, const char* const* next, float* scores) {
  Vf sum[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = zero();
  const char *key[V], *ahead[V];
  for (int v = 0; v < V; ++v) key[v] = keys[v];
  if constexpr (kAhead)
    for (int v = 0; v < V; ++v) ahead[v] = next[v];
  const int words = head_dim / T::kPack;
  for (int64_t i = 0; i < words; ++i) {
    Vi word[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      word[v] = load_words(key[v] + i * 64);
      if (v * kLanes % 16 == 0) fetch<kAhead>(ahead[v] + i * 64);
    }
    const float* x = q + i * T::kPack;
#define NORIA_PART(j)                                                                    \
  if constexpr (j < T::kPack) {                                                          \
    Vf k[V];                                                                             \
    _Pragma("GCC unroll 4") for (int v = 0; v < V; ++v) k[v] = T::template key<j>(word[v]); \
    _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) {                                \
      const Vf factor = set1(x[r * head_dim + j]);                                       \
      _Pragma("GCC unroll 4") for (int v = 0; v < V; ++v) sum[r][v] = fma(factor, k[v], sum[r][v]); \
    }                                                                                    \
  }
    NORIA_PART(0) NORIA_PART(1) NORIA_PART(2) NORIA_PART(3)
#undef NORIA_PART
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(scores + r * kAttentionTile + v * kLanes, sum[r][v]);
}

// The values of a tile, in runs of 8 tokens.
struct ValueTile {
  const char* runs[kAttentionTile / 8];
  int tokens;      // valid ones; weights beyond are zero
  int head_dim;
  int64_t stride;  // floats from a row of `accumulated` to the next
};

// accumulated[r] = accumulated[r] * decay[r] + sum over tokens of weights[r][t] * value[t], for V vectors of dims from
// `dim` on. A tile's last word may hold tokens that do not exist: of bf16 they are left out (a stale NaN times zero is
// NaN), int8 codes are always finite.
template <class T, int R, int V, bool kAhead>
static void accumulate(const float* weights, const float* decay, const ValueTile& tile, const ValueTile& next, int dim,
                       float* accumulated) {
  Vf sum[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Vf factor = set1(decay[r]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = mul(factor, load(accumulated + r * tile.stride + v * kLanes));
  }
  const int64_t row = static_cast<int64_t>(tile.head_dim) * 4;
  for (int first = 0; first < tile.tokens; first += 8) {
    const char* words = tile.runs[first / 8] + dim * 4;
    const char* ahead = kAhead ? next.runs[first / 8] + dim * 4 : nullptr;
    const float* x = weights + first;
    const int count = tile.tokens - first < 8 ? tile.tokens - first : 8;
    int t = 0;
#define NORIA_PART(j)                                                                      \
  if constexpr (j < T::kPack) {                                                            \
    Vf value[V];                                                                           \
    _Pragma("GCC unroll 4") for (int v = 0; v < V; ++v) value[v] = T::template value<j>(word[v]); \
    _Pragma("GCC unroll 4") for (int r = 0; r < R; ++r) {                                  \
      const Vf factor = set1(x[r * kAttentionTile + t + j]);                               \
      _Pragma("GCC unroll 4") for (int v = 0; v < V; ++v) sum[r][v] = fma(factor, value[v], sum[r][v]); \
    }                                                                                      \
  }
    for (; t + T::kPack <= count; t += T::kPack, words += row) {
      Vi word[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        word[v] = load_words(words + v * kLanes * 4);
        if (v * kLanes % 16 == 0) fetch<kAhead>(ahead + v * kLanes * 4);
      }
      if constexpr (kAhead) ahead += row;
      NORIA_PART(0) NORIA_PART(1) NORIA_PART(2) NORIA_PART(3)
    }
    if (T::kPack > 1 && t < count) {
      Vi word[V];
      for (int v = 0; v < V; ++v) word[v] = load_words(words + v * kLanes * 4);
      NORIA_PART(0)
      if constexpr (T::kPack == 4) {
        NORIA_PART(1) NORIA_PART(2) NORIA_PART(3)
      }
    }
#undef NORIA_PART
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(accumulated + r * tile.stride + v * kLanes, sum[r][v]);
}

using DotFn = void (*)(const float*, int, const char* const*, const char* const*, float*);
using AccumulateFn = void (*)(const float*, const float*, const ValueTile&, const ValueTile&, int, float*);

// [rows - 1][vectors - 1] of a cache type.
template <class T, bool kAhead> struct TileKernels {
  DotFn dots[kMaxRows][kMaxVectors];
  AccumulateFn sums[kMaxRows][kMaxVectors];
  template <int R> constexpr void fill_row() {
    dots[R - 1][0] = dot<T, R, 1, kAhead>;
    dots[R - 1][1] = dot<T, R, 2, kAhead>;
    sums[R - 1][0] = accumulate<T, R, 1, kAhead>;
    sums[R - 1][1] = accumulate<T, R, 2, kAhead>;
    if constexpr (kMaxVectors == 4) {
      dots[R - 1][2] = dot<T, R, 3, kAhead>;
      dots[R - 1][3] = dot<T, R, 4, kAhead>;
      sums[R - 1][2] = accumulate<T, R, 3, kAhead>;
      sums[R - 1][3] = accumulate<T, R, 4, kAhead>;
    }
  }
  constexpr TileKernels() : dots(), sums() {
    fill_row<1>();
    fill_row<2>();
    fill_row<3>();
    if constexpr (kMaxRows == 4) fill_row<kMaxRows>();
  }
};

// Calls visit(first row, rows, first vector, vectors) for strips of at most `most_rows` rows and `most_vectors` vectors.
template <class F> static inline void strips(int rows, int vectors, int most_rows, int most_vectors, F visit) {
  for (int r = 0; r < rows;) {
    // Four rows go in two pairs where three is the most: a strip of one row would use a third of the registers.
    const int left = rows - r;
    const int count = left <= most_rows ? left : left == most_rows + 1 ? (left + 1) / 2 : most_rows;
    for (int v = 0; v < vectors; v += most_vectors)
      visit(r, count, v, vectors - v < most_vectors ? vectors - v : most_vectors);
    r += count;
  }
}

}  // namespace noria::NORIA_ISA
