// Attention over the int8 cache with AMX: 16 query rows meet a tile of keys or values in a few instructions. The softmax in
// between is what takes the time; the tile unit works meanwhile: on the next rows' scores while these rows' weights are
// made, on these rows' values while the next rows' scores are scaled.
#pragma once
#include "kernels/attention_int8.h"
#include "kernels/tiles.h"

#if defined(__AMX_INT8__)
#define NORIA_AMX_ATTENTION 1

namespace noria::NORIA_ISA {

// From so many rows on, AMX takes over from VNNI. The results are the same.
static constexpr int kLeastAmxRows = 12;
static constexpr int kTileInts = kTileBytes / 4;
static constexpr int kSegmentTiles = kAttentionSegment / kAttentionTile;

// Registers: 0, 1 bytes of q or of weights, high and low; 2, 3 keys or values in turn; 4 … 7 two pairs of sums in turn.

// A segment's tile. Its values are copied once for all rows.
struct StagedTile {
  int first, tokens;
  TileScales scales;
  const char* keys[kTileVectors];  // [stride / 4][16] words
  char* values;                    // [16][padded head_dim] words, in the order of weight_quad
};

struct TileWork {
  int32_t* offsets;   // [rows][16] ByteQueries::offset in every column
  int32_t* sums;      // [kTileVectors][high, low][16][16] of the tile that comes next
  float* scaled;      // [16][kAttentionTile] of a tile: what scale_sums makes of its sums
  int32_t* products;  // [2][high, low][16][16] of values
  char* staged;       // room for a segment's tiles
  float* scales;
};

// What sums begin with. Loading it takes a fraction of the time that tilezero keeps a product waiting.
alignas(64) static const char kZeroTile[kTileBytes] = {};

struct TileJob {
  const AttentionJob& job;
  const ByteQueries& q;
  const ByteWeights& weights;
  const TileWork& work;
};

static inline void configure_tiles(int rows) {
  const int most = rows < kTileRows ? rows : kTileRows;
  TileShapes shapes;
  for (int t : {0, 1, 4, 5, 6, 7}) shapes.set(t, most);
  for (int t : {2, 3}) shapes.set(t, kTileRows);
  tiles_configure(shapes);
}

// Sums of q · keys of the block of rows at `row`, one vector of tokens after the other. A product takes long to come; so
// loads, products and stores are told apart, to be spread over other work.
struct KeySums {
  const TileJob& tiles;
  const char* const* keys;  // of a staged tile; null: there is none
  int row;
  int32_t* sums;

  bool one_step() const { return tiles.q.stride == 64; }
  template <int v> void load() const {
    if (!keys) return;
    constexpr int b = 2 + v % 2, c = 4 + v % 2 * 2;
    tile_load<c>(kZeroTile, 64);
    tile_load<c + 1>(tiles.work.offsets + row * 16, 64);
    if (!one_step()) return;
    if (v == 0) load_queries(0);
    tile_load<b>(keys[v], 64);
  }
  template <int v> void multiply() const {
    if (!keys) return;
    constexpr int b = 2 + v % 2, c = 4 + v % 2 * 2;
    for (int64_t at = 0; at < tiles.q.stride; at += 64) {
      if (!one_step()) {
        load_queries(at);
        tile_load<b>(keys[v] + at * 16, 64);
      }
      tile_dot_su<c, 0, b>();
      tile_dot_su<c + 1, 1, b>();
    }
  }
  template <int v> void put() const {
    if (!keys) return;
    constexpr int c = 4 + v % 2 * 2;
    tile_store<c>(sums + v * 2 * kTileInts, 64);
    tile_store<c + 1>(sums + (v * 2 + 1) * kTileInts, 64);
  }
  // The work in eight parts, and what is then left.
  void part(int index) const {
    switch (index) {
      case 0: return load<0>();
      case 1: return multiply<0>();
      case 2: return load<1>();
      case 3: multiply<1>(); return put<0>();
      case 4: return load<2>();
      case 5: multiply<2>(); return put<1>();
      case 6: return load<3>();
      case 7: multiply<3>(); return put<2>();
      default: return put<3>();
    }
  }
  void all() const {
    for (int i = 0; i <= 8; ++i) part(i);
  }

 private:
  void load_queries(int64_t at) const {
    tile_load<0>(tiles.q.high + row * tiles.q.stride + at, tiles.q.stride);
    tile_load<1>(tiles.q.low + row * tiles.q.stride + at, tiles.q.stride);
  }
};

// ---- softmax

// Up to 16 rows against one tile.
struct RowBlock {
  int row, rows;  // in the job
  int lowest, highest;  // position of a row
  const StagedTile* tile;
  BlockState state;
  Vf most[kBlockRows];

  // Whether every row sees the whole tile.
  bool sees_all(const AttentionJob& job) const {
    return tile->tokens == kAttentionTile && lowest >= tile->first + kAttentionTile - 1 &&
           (!job.window || highest - job.window < tile->first);
  }
};

template <bool kAll> static inline void scale_row(const TileJob& tiles, int r, RowBlock& block) {
  const int32_t* sums = tiles.work.sums + r * 16;
  const auto sum = [&](int v) {
    const int32_t* at = sums + v * 2 * kTileInts;
    return join_bytes(_mm512_loadu_si512(at), _mm512_loadu_si512(at + kTileInts));
  };
  const AttentionJob& job = tiles.job;
  const float query_scale = tiles.q.scale[block.row + r];
  const uint64_t seen = kAll ? ~uint64_t{0} : seen_positions(job, block.row + r, block.tile->first, block.tile->tokens);
  block.state.seen[r] = seen;
  block.most[r] = scale_sums<!kAll>(job, query_scale, block.tile->scales, seen, sum,
                                    tiles.work.scaled + r * kAttentionTile);
}

static inline void scale_rows(const TileJob& tiles, bool all, int from, int to, RowBlock& block) {
  if (all) {
    for (int r = from; r < to; ++r) scale_row<true>(tiles, r, block);
  } else {
    for (int r = from; r < to; ++r) scale_row<false>(tiles, r, block);
  }
}

static inline void finish_scaling(const TileJob& tiles, RowBlock& block) {
  for (int r = block.rows; r < kBlockRows; ++r) block.most[r] = set1(-__builtin_inff());
  store(block.state.most, reduce_max_rows(block.most));
  update_maxima(tiles.job, block.tile->scales, block.row, block.rows, block.state);
}

static inline void weigh_block_row(const TileJob& tiles, int r, RowBlock& block) {
  weigh_seen(block.tile->scales, tiles.work.scaled + r * kAttentionTile, r, block.state,
             tiles.job.sum + (block.row + r) * kSumLanes, tiles.weights, r);
}

// ---- weights · values

// accumulated = accumulated * decay + weights · values, for a block of rows and one vector of dims after the other.
struct ValueSums {
  const TileJob& tiles;
  const char* values;  // of a staged tile
  int64_t stride;      // padded head_dim

  int vectors() const { return static_cast<int>(stride / 16); }
  void load_weights() const {
    tile_load<0>(tiles.weights.high, kAttentionTile);
    tile_load<1>(tiles.weights.low, kAttentionTile);
  }
  void multiply(int v) const { v % 2 ? multiply_turn<1>(v) : multiply_turn<0>(v); }
  void put(int v) const { v % 2 ? put_turn<1>() : put_turn<0>(); }
  void add(int v, const RowBlock& block) const {
    const int32_t* high = tiles.work.products + v % 2 * 2 * kTileInts;
    float* to = tiles.job.accumulated + block.row * stride + v * 16;
    for (int r = 0; r < block.rows; ++r)
      add_values(join_bytes(_mm512_loadu_si512(high + r * 16), _mm512_loadu_si512(high + kTileInts + r * 16)),
                 set1(block.state.decay[r]), set1(block.state.factor[r]), to + r * stride);
  }

 private:
  template <int turn> void multiply_turn(int v) const {
    constexpr int b = 2 + turn, c = 4 + turn * 2;
    tile_load<c>(kZeroTile, 64);
    tile_load<c + 1>(kZeroTile, 64);
    tile_load<b>(values + v * 64, stride * 4);
    tile_dot_us<c, 0, b>();
    tile_dot_us<c + 1, 1, b>();
  }
  template <int turn> void put_turn() const {
    constexpr int c = 4 + turn * 2;
    tile_store<c>(tiles.work.products + turn * 2 * kTileInts, 64);
    tile_store<c + 1>(tiles.work.products + (turn * 2 + 1) * kTileInts, 64);
  }
};

// Weights of this tile and sums of the next; then values of this tile and scores of the next.
static inline void advance(const TileJob& tiles, const KeySums& sums, RowBlock& block, RowBlock& next) {
  for (int r = 0; r < kBlockRows; ++r) {
    if (r < block.rows) weigh_block_row(tiles, r, block);
    if (r % 2) sums.part(r / 2);
  }
  sums.part(8);
  const ValueSums values{tiles, block.tile->values, padded_dim(tiles.job.cache.head_dim)};
  const int vectors = values.vectors(), each = (kBlockRows + vectors) / (vectors + 1);
  const int next_rows = sums.keys ? next.rows : 0;
  const bool all = next_rows && next.sees_all(tiles.job);
  int r = 0;
  const auto scale_some = [&](int end) {
    if (end > next_rows) end = next_rows;
    scale_rows(tiles, all, r, end, next);
    r = end > r ? end : r;
  };
  scale_some(each);  // until the weights are on their way from the store buffer
  values.load_weights();
  for (int v = 0; v < vectors; ++v) {
    values.multiply(v);
    if (v) values.put(v - 1);
    scale_some(r + each);
    if (v) values.add(v - 1, block);
  }
  values.put(vectors - 1);
  if (next_rows) finish_scaling(tiles, next);
  values.add(vectors - 1, block);
}

// A block of rows against staged tiles. meanwhile(i) is called with each tile's index.
template <class F>
static inline void attend_rows(const TileJob& tiles, int row, int rows, const StagedTile* staged, int count, F meanwhile) {
  RowBlock blocks[2];
  const AttentionJob& job = tiles.job;
  for (int i = 0; i < 2; ++i) {
    RowBlock& block = blocks[i];
    block.row = row, block.rows = rows;
    block.lowest = block.highest = job.positions[row];
    for (int r = 0; r < rows; ++r) {
      const int position = job.positions[row + r];
      block.lowest = position < block.lowest ? position : block.lowest;
      block.highest = position > block.highest ? position : block.highest;
      block.state.scale[r] = score_scale(job, tiles.q.scale[row + r]);
    }
  }
  blocks[0].tile = staged;
  KeySums{tiles, staged->keys, row, tiles.work.sums}.all();
  scale_rows(tiles, blocks[0].sees_all(job), 0, rows, blocks[0]);
  finish_scaling(tiles, blocks[0]);
  for (int i = 0; i < count; ++i) {
    RowBlock &block = blocks[i % 2], &next = blocks[(i + 1) % 2];
    next.tile = staged + i + 1;
    meanwhile(i);
    advance(tiles, {tiles, i + 1 < count ? next.tile->keys : nullptr, row, tiles.work.sums}, block, next);
  }
}

}  // namespace noria::NORIA_ISA

#endif
