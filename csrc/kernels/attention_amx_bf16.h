// Attention over the bf16 cache with AMX, for any number of rows: float products have an order, which is the tile unit's, so
// that a row alone has to take the same way as a row among many.
//
// Queries and weights keep 16 bits: two bfloat16, high and low, whose products are added to the same float. Scores are
// summed in ascending dim, values in ascending token, the high part of 32 first and then the low one.
#pragma once
#include "kernels/attention_tile.h"
#include "kernels/tiles.h"

#if defined(__AMX_BF16__)
#define NORIA_AMX_BF16_ATTENTION 1

namespace noria::NORIA_ISA {

// Registers: 0, 1 queries or weights, high and low; 2, 3 keys or values in turn; 4 … 7 sums.

// [rows][width] each.
struct HalfRows {
  uint16_t *high, *low;
};

static inline void configure_half_tiles(int rows) {
  TileShapes shapes;
  for (int t : {0, 1, 4, 5, 6, 7}) shapes.set(t, rows);
  for (int t : {2, 3}) shapes.set(t, kTileRows);
  tiles_configure(shapes);
}

// count: a multiple of 16.
static inline void split_halves(const float* x, int count, uint16_t* high, uint16_t* low) {
  for (int i = 0; i < count; i += kLanes) {
    const Vf v = load(x + i), rounded = round_bf16(v);
    store_low16(high + i, shift_right<16>(as_int(rounded)));
    store_bf16(low + i, sub(v, rounded));
  }
}

template <int t> static inline void multiply_half(const char* b, int64_t stride) {
  constexpr int turn = 2 + t % 2;
  tile_load<turn>(b, stride);
  tile_dot_bf16<t, 0, turn>();
  tile_dot_bf16<t, 1, turn>();
}

alignas(64) static const char kZeroHalves[kTileBytes] = {};

// scores [rows][kAttentionTile] of a block of rows; of positions that do not exist they may be anything. keys, next: per
// vector of 16 tokens; next (or null) is fetched on the way.
static inline void score_halves(const HalfRows& q, int row, int dim, const char* const* keys, int vectors,
                                const char* const* next, float* scores) {
  const int64_t stride = int64_t{dim} * 2;
  tile_load<4>(kZeroHalves, 64);
  tile_load<5>(kZeroHalves, 64);
  tile_load<6>(kZeroHalves, 64);
  tile_load<7>(kZeroHalves, 64);
  for (int64_t d = 0; d < dim; d += 32) {
    tile_load<0>(q.high + row * dim + d, stride);
    tile_load<1>(q.low + row * dim + d, stride);
    multiply_half<4>(keys[0] + d * 32, 64);
    if (vectors > 1) multiply_half<5>(keys[1] + d * 32, 64);
    if (vectors > 2) multiply_half<6>(keys[2] + d * 32, 64);
    if (vectors > 3) multiply_half<7>(keys[3] + d * 32, 64);
    if (!next) continue;
    for (int v = 0; v < 4; ++v)
      for (int i = 0; i < kTileBytes; i += 64) __builtin_prefetch(next[v] + d * 32 + i, 0, 2);
  }
  tile_store<4>(scores, kAttentionTile * 4);
  tile_store<5>(scores + 16, kAttentionTile * 4);
  tile_store<6>(scores + 32, kAttentionTile * 4);
  tile_store<7>(scores + 48, kAttentionTile * 4);
}

// Pairs of tokens [kAttentionTile / 2][head_dim], zero where tokens do not exist: what is left there might be a NaN. next:
// the values to be fetched on the way, or null.
static inline void copy_half_values(const ValueTile& tile, const ValueTile* next, char* out) {
  const int64_t row = static_cast<int64_t>(tile.head_dim) * 4;
  for (int pair = 0; pair < kAttentionTile / 2; ++pair, out += row) {
    const int left = tile.tokens - pair * 2;
    const Vi mask = set1_int(left >= 2 ? -1 : left == 1 ? 0xffff : 0);
    const char* from = left > 0 ? tile.runs[pair / 4] + pair % 4 * row : nullptr;
    for (int64_t i = 0; i < row; i += 64) {
      const Vi word = from ? and_int(load_words(from + i), mask) : mask;
      store(reinterpret_cast<float*>(out + i), as_float(word));
      if (next) __builtin_prefetch(next->runs[pair / 4] + pair % 4 * row + i, 0, 2);
    }
  }
}

// accumulated += weights · values of `kCount` vectors of dims.
template <int kCount>
static inline void add_half_vectors(const HalfRows& weights, const char* values, int64_t row, float* accumulated) {
  tile_load<4>(accumulated, row);
  tile_load<5>(accumulated + 16, row);
  if (kCount > 2) tile_load<6>(accumulated + 32, row);
  if (kCount > 2) tile_load<7>(accumulated + 48, row);
  for (int half = 0; half < 2; ++half, values += 16 * row) {
    tile_load<0>(weights.high + half * 32, kAttentionTile * 2);
    tile_load<1>(weights.low + half * 32, kAttentionTile * 2);
    multiply_half<4>(values, row);
    multiply_half<5>(values + 64, row);
    if (kCount > 2) multiply_half<6>(values + 128, row);
    if (kCount > 2) multiply_half<7>(values + 192, row);
  }
  tile_store<4>(accumulated, row);
  tile_store<5>(accumulated + 16, row);
  if (kCount > 2) tile_store<6>(accumulated + 32, row);
  if (kCount > 2) tile_store<7>(accumulated + 48, row);
}

// accumulated += weights · values, for a block of rows.
static inline void add_half_values(const HalfRows& weights, int dim, const char* values, float* accumulated) {
  const int64_t row = int64_t{dim} * 4;  // of values and of accumulated
  int d = 0;
  for (; dim - d >= 64; d += 64) add_half_vectors<4>(weights, values + d * 4, row, accumulated + d);
  if (d < dim) add_half_vectors<2>(weights, values + d * 4, row, accumulated + d);
}

}  // namespace noria::NORIA_ISA

#endif
