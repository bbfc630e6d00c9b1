// Attention over the int8 cache where the level has integer dot products (VNNI, and AMX where many rows meet a tile).
//
// The other side keeps 16 bits. A query row is q = scale * code with codes of 16 bits, the weights of one tile are
// p * value scale = factor * code: rounded to 1/65,278 of the largest of the row, 1/65,532 of the largest value scale,
// far below the cache's own rounding (1/254). A code is split in two bytes, 256 * high + low, whose products with the
// cache's bytes are summed in int32. Integers make every path exact: which one computes a row cannot change a bit.
//
// Weights are relative to (a little more than) the largest score of their own tile, so that a tile far below the maximum keeps
// its precision; `gain` brings a tile's sums to the level of the rows' maximum.
#pragma once
#include "kernels/attention_tile.h"
#include "kernels/quantise.h"

#if defined(__AVX512VNNI__)
#define NORIA_INTEGER_ATTENTION 1

namespace noria::NORIA_ISA {

static constexpr int kIntegerRows = 3, kIntegerVectors = 4;  // two accumulators each: 24 registers
static constexpr int kBlockRows = 16;                        // rows whose softmax is computed together: a vector, a tile
static constexpr int kWeightCodes = 65532;  // not 65,535: an exponential may exceed 1 by its error
static constexpr int kTileVectors = kAttentionTile / kLanes;

// sum += the four products of unsigned bytes with signed bytes. Inline assembly, because GCC 12 keeps the accumulator of
// the intrinsic on the stack.
static inline void dot_bytes(Vi& sum, Vi bytes, Vi codes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(codes));
}

// One register for a pointer, with constant displacements from it: left to itself, the compiler keeps a register per address,
// and those that it runs out of in vector registers, whose moves take the place of products.
template <class T> static inline void keep(T*& pointer) { asm("" : "+r"(pointer)); }

static inline Vi broadcast_bytes(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return set1_int(word);
}

// 256 * high + low. |sums of codes| < 2^31 for 256 dims and for 64 tokens.
static inline Vi join_bytes(Vi high, Vi low) { return add_int(shift_left<8>(high), low); }

// Query rows in bytes.
struct ByteQueries {
  int8_t *high, *low;  // [rows][stride], zero beyond head_dim
  int64_t stride;      // a multiple of 64
  int32_t* offset;     // [rows] -128 * sum of codes: keys are stored as code + 128
  float* scale;        // [rows]
};

static inline void split_query(const float* q, int dim, int row, const ByteQueries& out) {
  Vf most = zero();
  for (int i = 0; i < dim; i += kLanes) most = max(abs(dim - i >= kLanes ? load(q + i) : load_partial(q + i, dim - i)), most);
  const float largest = reduce_max(most);
  const bool usable = largest > 1e-30f;
  const Vf inverse = set1(usable ? 32639.0f / largest : 0.0f);  // 127 * 256 + 127
  Vi sum = set1_int(0);
  int8_t *to_high = out.high + row * out.stride, *to_low = out.low + row * out.stride;
  for (int i = 0; i < out.stride; i += 64) {
    Vi high[4], low[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const int left = dim - i - v * kLanes;
      const Vf x = left >= kLanes ? load(q + i + v * kLanes) : load_partial(q + i + v * kLanes, left > 0 ? left : 0);
      const Vi code = to_int(mul(x, inverse));
      high[v] = _mm512_srai_epi32(add_int(code, set1_int(128)), 8);
      low[v] = _mm512_sub_epi32(code, shift_left<8>(high[v]));
      sum = add_int(sum, code);
    }
    _mm512_storeu_si512(to_high + i, pack_codes(high[0], high[1], high[2], high[3]));
    _mm512_storeu_si512(to_low + i, pack_codes(low[0], low[1], low[2], low[3]));
  }
  out.offset[row] = -128 * reduce_add_int(sum);
  out.scale[row] = usable ? largest / 32639.0f : 0.0f;
}

// sums[r] = codes of q · codes of the keys.
template <int R, int V, bool kAhead>
static void dot_integer(const ByteQueries& q, int row, int dim, const char* const* keys, const char* const* next,
                        int32_t* sums) {
  Vi high[R][V], low[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      high[r][v] = set1_int(0);
      low[r][v] = set1_int(q.offset[row + r]);
    }
  const char *key[V], *ahead[V];
  for (int v = 0; v < V; ++v) key[v] = keys[v];
  if constexpr (kAhead)
    for (int v = 0; v < V; ++v) ahead[v] = next[v];
  const int8_t *q_high = q.high + row * q.stride, *q_low = q.low + row * q.stride;
  for (int64_t i = 0; i < dim; i += 4) {
    Vi h[R], l[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      h[r] = broadcast_bytes(q_high + r * q.stride + i);
      l[r] = broadcast_bytes(q_low + r * q.stride + i);
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Vi word = load_words(key[v] + i * 16);
      if constexpr (kAhead) fetch<kAhead>(ahead[v] + i * 16);
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
      _mm512_storeu_si512(sums + r * kAttentionTile + v * kLanes, join_bytes(high[r][v], low[r][v]));
}

// ---- softmax of a block of rows: raw sums → weights in bytes

// What a tile's tokens have in common for all rows.
struct TileScales {
  float *keys, *values;  // [kAttentionTile], zero for tokens that do not exist
  float* weights;        // [kAttentionTile] value scales in codes, for rows that see the whole tile
  float factor;          // of those: value of a code
};

// Weights of a tile in bytes, as rows of AMX tiles. Packing leaves the four tokens of quad q (4 q … 4 q + 3) at
// weight_quad(q). Its own inverse.
static inline int weight_quad(int q) { return q % 4 * 4 + q / 4; }
struct ByteWeights {
  uint8_t *high, *low;  // [rows][kAttentionTile]

  void put(int row, const Vi* codes) const {
    const Vi half = set1_int(0xffff), byte = set1_int(0x00ff00ff);
    const Vi a = _mm512_packus_epi32(and_int(codes[0], half), and_int(codes[1], half));
    const Vi b = _mm512_packus_epi32(and_int(codes[2], half), and_int(codes[3], half));
    _mm512_storeu_si512(high + row * kAttentionTile, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
    _mm512_storeu_si512(low + row * kAttentionTile, _mm512_packus_epi16(and_int(a, byte), and_int(b, byte)));
  }
};

// The same for VNNI, which takes them quad by quad: a shuffle per vector leaves the high bytes of quad q at quad_weights(q)
// and the low ones four bytes on.
static constexpr int quad_weights(int q) { return q / 8 * 64 + q / 4 % 2 * 8 + q % 4 * 16; }
struct QuadWeights {
  uint8_t* bytes;  // [rows][2 * kAttentionTile]

  uint8_t* at(int row) const { return bytes + row * 2 * kAttentionTile; }
  void put(int row, const Vi* codes) const {
    const Vi first = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1));
    const Vi second = _mm512_broadcast_i32x4(_mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 1, 5, 9, 13, 0, 4, 8, 12));
    const __mmask64 upper = 0xff00ff00ff00ff00;
    for (int i = 0; i < kAttentionTile / kLanes; i += 2)
      _mm512_storeu_si512(at(row) + i * 32, _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(codes[i], first), upper,
                                                                     codes[i + 1], second));
  }
};

// Of the rows of a block.
struct alignas(64) BlockState {
  float most[kBlockRows];    // largest key-scaled sum that the row sees, -inf if it sees none
  float scale[kBlockRows];   // of those, to powers of two
  float level[kBlockRows];   // a little above the largest score of the tile
  float gain[kBlockRows];    // 2^(level - maximum)
  float decay[kBlockRows];   // 2^(maximum before - maximum)
  float factor[kBlockRows];  // of the sums of weights · values
  uint64_t seen[kBlockRows];
};

// 2^x for x <= 0 within 3e-6; a row's vectors at once, step by step, so that they overlap. What scalef takes of x is its
// floor. Powers below 2^-100 become that: their code is 0 anyway, and subnormal numbers are slow.
static inline void weight_powers(Vf* x, Vf* p) {
  Vf r[kTileVectors];
#define NORIA_STEP(statement) _Pragma("GCC unroll 4") for (int v = 0; v < kTileVectors; ++v) statement
  NORIA_STEP(x[v] = max(x[v], set1(-100.0f));)
  NORIA_STEP(r[v] = _mm512_reduce_ps(x[v], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);)
  NORIA_STEP(p[v] = fma(set1(1.3534167996e-2f), r[v], set1(5.2011461076e-2f));)
  NORIA_STEP(p[v] = fma(p[v], r[v], set1(2.4144275611e-1f));)
  NORIA_STEP(p[v] = fma(p[v], r[v], set1(6.9300383479e-1f));)
  NORIA_STEP(p[v] = fma(p[v], r[v], set1(1.0000025933f));)
  NORIA_STEP(p[v] = _mm512_scalef_ps(p[v], x[v]);)
#undef NORIA_STEP
}

// A product of at most kWeightCodes, rounded to an integer: the low 16 bits of a sum whose floats are as far apart as those.
static inline Vi weight_code(Vf power, Vf factor) { return as_int(fma(power, factor, set1(0x1p23f))); }

static inline void smallest_factor(float largest, float& inverse, float& factor) {
  const bool usable = largest > 1e-30f;
  inverse = usable ? kWeightCodes / largest : 0.0f;
  factor = usable ? largest / kWeightCodes : 0.0f;
}

static inline void prepare_scales(TileScales& scales) {
  Vf most = zero();
  for (int i = 0; i < kAttentionTile; i += kLanes) most = max(most, load(scales.values + i));
  float inverse;
  smallest_factor(reduce_max(most), inverse, scales.factor);
  for (int i = 0; i < kAttentionTile; i += kLanes) store(scales.weights + i, mul(load(scales.values + i), set1(inverse)));
}

// The positions of a tile that a row sees, one bit each.
static inline uint64_t seen_positions(const AttentionJob& job, int row, int first, int tokens) {
  const int position = job.positions[row] - first;
  const int low = job.window && position - job.window + 1 > 0 ? position - job.window + 1 : 0;
  const int high = position + 1 < tokens ? position + 1 : tokens;
  if (low >= high) return 0;
  return (high < 64 ? (uint64_t{1} << high) - 1 : ~uint64_t{0}) & ~uint64_t{0} << low;
}

static inline __mmask16 lanes_of(uint64_t seen, int v) { return static_cast<__mmask16>(seen >> (v * kLanes)); }

// Sums of one row → sums times key scales (or, with a soft cap, scores), -inf where hidden; returns their largest.
// sums(v): the v-th vector of sums.
template <bool kSome, class Sums>
static inline Vf scale_sums(const AttentionJob& job, float query_scale, const TileScales& scales, uint64_t seen, Sums sums,
                            float* out) {
  Vf most = set1(-__builtin_inff());
  const bool capped = job.softcap != 0;
  const Vf scale = set1(capped ? query_scale * (job.scale / job.softcap) : 1.0f), cap = set1(job.softcap * kLog2E);
#pragma GCC unroll 4
  for (int v = 0; v < kTileVectors; ++v) {
    Vf x = mul(to_float(sums(v)), load(scales.keys + v * kLanes));
    if (capped) x = mul(tanh(mul(x, scale)), cap);
    if (kSome) x = _mm512_mask_blend_ps(lanes_of(seen, v), set1(-__builtin_inff()), x);
    store(out + v * kLanes, x);
    most = max(most, x);
  }
  return most;
}

// The largest lane of each of 16 vectors.
static inline Vf reduce_max_rows(Vf* rows) {
  for (int i = 0; i < 8; ++i)
    rows[i] = max(_mm512_shuffle_f32x4(rows[i], rows[i + 8], 0x44), _mm512_shuffle_f32x4(rows[i], rows[i + 8], 0xee));
  for (int i = 0; i < 4; ++i)
    rows[i] = max(_mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88), _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd));
  // Each quarter of rows[i] now holds four candidates of row i, i + 8, i + 4 and i + 12.
  const Vf a = max(_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
  const Vf b = max(_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
  const Vf c = max(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  return _mm512_shuffle_f32x4(c, c, 0xd8);  // quarters: rows 0…, 4…, 8…, 12…
}

// From what scale_sums makes of a row to powers of two.
static inline float score_scale(const AttentionJob& job, float query_scale) {
  return job.softcap ? 1.0f : query_scale * (job.scale * kLog2E);
}

// From the block's largest sums: levels, gains and decays; new maxima. A level is a little more than the largest score, so
// that no rounding makes a power exceed 1, however large the scores.
static inline void update_maxima(const AttentionJob& job, const TileScales& scales, int row, int rows, BlockState& block) {
  const __mmask16 valid = first_lanes(rows);
  const Vf most = load(block.most);
  const __mmask16 sees = _mm512_cmp_ps_mask(most, set1(-__builtin_inff()), _CMP_GT_OQ);
  const Vf largest = _mm512_maskz_mul_ps(sees, most, load(block.scale)), level = fma(abs(largest), set1(0x1p-22f), largest);
  const Vf before = load_partial(job.maximum + row, rows);
  const Vf now = _mm512_mask_max_ps(before, sees, level, before);
  store(block.level, level);
  const Vf below = sub(level, now);  // a tile that far below the maximum adds nothing, and slowly
  const __mmask16 counts = sees & _mm512_cmp_ps_mask(below, set1(-64.0f), _CMP_GT_OQ);
  const Vf gain = _mm512_maskz_mov_ps(counts, power_of_two(below));
  store(block.gain, gain);
  store(block.factor, mul(gain, set1(scales.factor)));
  store(block.decay, power_of_two(sub(before, now)));
  _mm512_mask_storeu_ps(job.maximum + row, valid, now);
}

// Scaled sums of one row of the block → weights in bytes, and the row's sum.
template <bool kSome, class Weights>
static inline void weigh_row(const TileScales& scales, const float* scaled, int r, BlockState& block, float* sum,
                             const Weights& weights, int row) {
  static_assert(kTileVectors == 4);
  const uint64_t seen = block.seen[r];
  float inverse = 0, factor = 0;
  if (kSome) {  // later tokens must not matter, neither do their scales
    Vf most = zero();
    for (int v = 0; v < kTileVectors; ++v)
      most = max(most, _mm512_maskz_loadu_ps(lanes_of(seen, v), scales.values + v * kLanes));
    smallest_factor(reduce_max(most), inverse, factor);
    block.factor[r] = factor * block.gain[r];
  }
  const Vf scale = set1(block.scale[r]), level = set1(-block.level[r]);
  Vf x[kTileVectors], p[kTileVectors];
  Vi codes[kTileVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kTileVectors; ++v) x[v] = fma(load(scaled + v * kLanes), scale, level);
  weight_powers(x, p);
#pragma GCC unroll 4
  for (int v = 0; v < kTileVectors; ++v) {
    if (kSome) p[v] = _mm512_maskz_mov_ps(lanes_of(seen, v), p[v]);
    const Vf factors = kSome ? mul(load(scales.values + v * kLanes), set1(inverse)) : load(scales.weights + v * kLanes);
    codes[v] = weight_code(p[v], factors);
  }
  const Vf total = add(add(p[0], p[1]), add(p[2], p[3]));
  weights.put(row, codes);
  store(sum, fma(total, set1(block.gain[r]), mul(load(sum), set1(block.decay[r]))));
}

template <class Weights>
static inline void weigh_seen(const TileScales& scales, const float* scaled, int r, BlockState& block,
                              float* sum, const Weights& weights, int row) {
  if (block.seen[r] == ~uint64_t{0}) return weigh_row<false>(scales, scaled, r, block, sum, weights, row);
  if (block.seen[r]) return weigh_row<true>(scales, scaled, r, block, sum, weights, row);
  const Vi none[kTileVectors] = {set1_int(0), set1_int(0), set1_int(0), set1_int(0)};
  weights.put(row, none);
  block.factor[r] = 0;
}

// accumulated = accumulated * decay + sums of weights · values.
static inline void add_values(Vi sums, Vf decay, Vf factor, float* at) {
  store(at, fma(to_float(sums), factor, mul(decay, load(at))));
}

template <int R, int V, bool kAhead>
static void accumulate_integer(const QuadWeights& weights, int row, const BlockState& block, int block_row,
                               const ValueTile& tile, const ValueTile& next, int dim, float* accumulated) {
  Vi high[R][V], low[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) high[r][v] = low[r][v] = set1_int(0);
  const uint8_t* bytes = weights.at(row);
  const int64_t stride = static_cast<int64_t>(tile.head_dim) * 4;
  for (int first = 0; first < tile.tokens; first += 8) {
    const char* words = tile.runs[first / 8] + dim * 4;
    const char* ahead = kAhead ? next.runs[first / 8] + dim * 4 : nullptr;
    for (int t = first; t < first + 8 && t < tile.tokens; t += 4, words += stride) {
      const uint8_t* quad = bytes + quad_weights(t / 4);
      keep(quad);
      Vi h[R], l[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        h[r] = broadcast_bytes(quad + r * 2 * kAttentionTile);
        l[r] = broadcast_bytes(quad + r * 2 * kAttentionTile + 4);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Vi word = load_words(words + v * 64);
        if constexpr (kAhead) fetch<kAhead>(ahead + v * 64);
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
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      add_values(join_bytes(high[r][v], low[r][v]), set1(block.decay[block_row + r]), set1(block.factor[block_row + r]),
                 accumulated + r * tile.stride + v * kLanes);
}

using DotIntegerFn = void (*)(const ByteQueries&, int, int, const char* const*, const char* const*, int32_t*);
using AccumulateIntegerFn = void (*)(const QuadWeights&, int, const BlockState&, int, const ValueTile&, const ValueTile&, int,
                                     float*);

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
