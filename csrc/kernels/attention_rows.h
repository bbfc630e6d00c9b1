// Attention over the int8 cache with VNNI where many rows meet a tile: strips of four rows by four vectors, first the high
// bytes of the rows, then the low ones, so that 16 accumulators suffice; the scales are applied while sums are in registers.
#pragma once
#include "kernels/attention_int8.h"

#if defined(NORIA_INTEGER_ATTENTION)

namespace noria::NORIA_ISA {

static constexpr int kStripRows = 4, kStripVectors = 4;

template <int V> using StripSums = Vi[kStripRows][V];

#define NORIA_STRIP(V)                                  \
  _Pragma("GCC unroll 4") for (int r = 0; r < kStripRows; ++r) \
      _Pragma("GCC unroll 4") for (int v = 0; v < V; ++v)

// sums += bytes of q · keys. `q`: of the strip's first row.
template <int V>
static inline __attribute__((always_inline)) void add_keys(const int8_t* q, int64_t stride, int64_t dim,
                                                           const char* const* keys, StripSums<V>& sums) {
  const char* key[V];
  for (int v = 0; v < V; ++v) key[v] = keys[v];
  for (int64_t i = 0; i < dim; i += 4) {
    Vi word[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) word[v] = load_words(key[v] + i * 16);
#pragma GCC unroll 4
    for (int r = 0; r < kStripRows; ++r) {
      const Vi x = broadcast_bytes(q + r * stride + i);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dot_bytes(sums[r][v], word[v], x);
    }
  }
}

// What scale_sums makes of a strip's sums. seen: of the strip's rows, if they do not see all.
template <int V, bool kSome>
static void score_strip(const ByteQueries& q, int row, int dim, const char* const* keys, const float* key_scales,
                        const uint64_t* seen, float* scaled, Vf* most) {
  StripSums<V> sums;
  NORIA_STRIP(V) sums[r][v] = set1_int(0);
  add_keys<V>(q.high + row * q.stride, q.stride, dim, keys, sums);
  NORIA_STRIP(V) sums[r][v] = join_bytes(sums[r][v], set1_int(q.offset[row + r]));
  add_keys<V>(q.low + row * q.stride, q.stride, dim, keys, sums);
#pragma GCC unroll 4
  for (int r = 0; r < kStripRows; ++r) {
    Vf largest = set1(-__builtin_inff());
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Vf x = mul(to_float(sums[r][v]), load(key_scales + v * kLanes));
      if (kSome) x = _mm512_mask_blend_ps(lanes_of(seen[r], v), set1(-__builtin_inff()), x);
      store(scaled + r * kAttentionTile + v * kLanes, x);
      largest = v == 0 && !kSome ? x : max(largest, x);
    }
    most[r] = largest;
  }
}

static constexpr int kRunWeights[] = {quad_weights(0), quad_weights(2),  quad_weights(4),  quad_weights(6),
                                      quad_weights(8), quad_weights(10), quad_weights(12), quad_weights(14)};

// sums += bytes of weights · values, for V vectors of dims from `words` on in each run. `bytes`: high or low ones.
template <int V>
static inline __attribute__((always_inline)) void add_runs(const uint8_t* bytes, const ValueTile& tile, int dim, int runs,
                                                           StripSums<V>& sums) {
  const int64_t stride = static_cast<int64_t>(tile.head_dim) * 4;
  for (int run = 0; run < runs; ++run) {
    const char* words = tile.runs[run] + dim * 4;
    const uint8_t* quad = bytes + kRunWeights[run];
    keep(quad);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, words += stride) {
      keep(words);
      Vi word[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) word[v] = load_words(words + v * 64);
#pragma GCC unroll 4
      for (int r = 0; r < kStripRows; ++r) {
        const Vi x = broadcast_bytes(quad + r * 2 * kAttentionTile + i * quad_weights(1));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) dot_bytes(sums[r][v], x, word[v]);
      }
    }
  }
}

template <int V>
static void value_strip(const QuadWeights& weights, int row, const BlockState& block, const ValueTile& tile, int dim, int runs,
                        float* accumulated) {
  StripSums<V> sums;
  NORIA_STRIP(V) sums[r][v] = set1_int(0);
  add_runs<V>(weights.at(row), tile, dim, runs, sums);
  NORIA_STRIP(V) sums[r][v] = shift_left<8>(sums[r][v]);
  add_runs<V>(weights.at(row) + 4, tile, dim, runs, sums);
  NORIA_STRIP(V)
  add_values(sums[r][v], set1(block.decay[row + r]), set1(block.factor[row + r]),
             accumulated + r * tile.stride + v * kLanes);
}
#undef NORIA_STRIP

using ScoreStripFn = void (*)(const ByteQueries&, int, int, const char* const*, const float*, const uint64_t*, float*, Vf*);
using ValueStripFn = void (*)(const QuadWeights&, int, const BlockState&, const ValueTile&, int, int, float*);

// The positions of a block of 16 rows.
struct RowSpan {
  int lowest, highest;
  RowSpan(const AttentionJob& job, int row) {
    const __m512i positions = _mm512_loadu_si512(job.positions + row);
    lowest = _mm512_reduce_min_epi32(positions);
    highest = _mm512_reduce_max_epi32(positions);
  }
};

struct RowWork {
  const ByteQueries& q;
  const TileScales& scales;  // of the tile
  const QuadWeights& weights;  // of 16 rows
  float* scaled;               // [16][kAttentionTile]
};

// A block of 16 rows against a tile whose first token is at position `first`.
static void attend_whole_block(const AttentionJob& job, int row, int first, const char* const* keys, const ValueTile& tile,
                               const RowWork& work) {
  static constexpr ScoreStripFn some[] = {score_strip<1, true>, score_strip<2, true>, score_strip<3, true>,
                                          score_strip<4, true>};
  static constexpr ValueStripFn add[] = {value_strip<1>, value_strip<2>, value_strip<3>, value_strip<4>};
  const RowSpan span(job, row);
  const int tokens = span.highest + 1 - first < tile.tokens ? span.highest + 1 - first : tile.tokens;
  if (tokens <= 0) return;
  const int dim = job.cache.head_dim;
  const bool all = tokens == kAttentionTile && span.lowest >= first + kAttentionTile - 1 &&
                   (!job.window || span.highest - job.window < first);
  const ScoreStripFn score = all ? score_strip<kStripVectors, false> : some[(tokens - 1) / kLanes];
  BlockState block;
  Vf most[kBlockRows];
  for (int r = 0; r < kBlockRows; ++r) block.seen[r] = all ? ~uint64_t{0} : seen_positions(job, row + r, first, tile.tokens);
  for (int r = 0; r < kBlockRows; r += kStripRows)
    score(work.q, row + r, dim, keys, work.scales.keys, block.seen + r, work.scaled + r * kAttentionTile, most + r);
  store(block.scale, mul(load(work.q.scale + row), set1(job.scale * kLog2E)));
  store(block.most, reduce_max_rows(most));
  update_maxima(job, work.scales, row, kBlockRows, block);
  for (int r = 0; r < kBlockRows; ++r)
    weigh_seen(work.scales, work.scaled + r * kAttentionTile, r, block, job.sum + (row + r) * kSumLanes, work.weights, r);
  const int runs = (tokens + 7) / 8;
  strips(kBlockRows, (dim + kLanes - 1) / kLanes, kStripRows, kStripVectors, [&](int r, int, int v, int vectors) {
    add[vectors - 1](work.weights, r, block, tile, v * kLanes, runs, job.accumulated + (row + r) * tile.stride + v * kLanes);
  });
}

// Whole blocks of rows, from the first on; returns the row that remains. Soft caps are rare: they take the way of few rows.
static inline int attend_whole_blocks(const AttentionJob& job, int first, const char* const* keys, const ValueTile& tile,
                                      const RowWork& work) {
  int row = 0;
  for (; row + kBlockRows <= job.rows && !job.softcap; row += kBlockRows)
    attend_whole_block(job, row, first, keys, tile, work);
  return row;
}

}  // namespace noria::NORIA_ISA

#endif
