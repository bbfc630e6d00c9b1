// Attention of a few query rows of one KV head over one segment of a sequence's paged cache, tile by tile.
#include "kernels/attention.h"

#include <cfloat>

#include "kernels/attention_amx.h"
#include "kernels/attention_amx_bf16.h"
#include "kernels/attention_int8.h"
#include "kernels/attention_rows.h"
#include "kernels/attention_tile.h"
#include "kernels/rope.h"
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

static constexpr int kTile = kAttentionTile;
static constexpr int kRuns = kTile / 8;
// From so many rows on, a tile is turned into floats once instead of in registers at each use. The values are the same.
static constexpr int kWidenRows = 8;

alignas(64) static const float kIndex[kTile] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// 2^x of one number <= 0 by the steps of the vector function.
static float power_of_two_one(float x) {
  float lanes[kLanes];
  store(lanes, power_of_two(set1(x)));
  return lanes[0];
}

// Work space of a job, cut from AttentionJob::work.
struct Work {
  float *scores, *decay, *scales;  // [rows][kTile], [rows], keys' and values' [2][kTile]
  float *keys, *values;            // a tile as floats
#ifdef NORIA_INTEGER_ATTENTION
  ByteQueries q;
  QuadWeights weights;
  TileScales tile_scales;
#endif
#ifdef NORIA_AMX_ATTENTION
  TileWork tile;
#endif
#ifdef NORIA_AMX_BF16_ATTENTION
  HalfRows half_q, half_weights;
#endif
  explicit Work(const AttentionJob& job) : at_(job.work) {
    const int64_t rows = (job.rows + 15) / 16 * 16;
    scores = take<float>(rows * kTile);
    decay = take<float>(rows);
    scales = take<float>(3 * kTile);
    keys = take<float>(kTile * kMaxHeadDim);
    values = take<float>(kTile * kMaxHeadDim);
#ifdef NORIA_INTEGER_ATTENTION
    const int64_t stride = (job.cache.head_dim + 63) / 64 * 64;
    q = {take<int8_t>(rows * stride), take<int8_t>(rows * stride), stride, take<int32_t>(rows), take<float>(rows)};
    weights = {take<uint8_t>(2 * rows * kTile)};
    tile_scales = {scales, scales + kTile, scales + 2 * kTile, 0};
#endif
#ifdef NORIA_AMX_ATTENTION
    tile.offsets = take<int32_t>(rows * 16);
    tile.sums = take<int32_t>(kTileVectors * 2 * kTileInts);
    tile.scaled = take<float>(kBlockRows * kTile);
    tile.products = take<int32_t>(4 * kTileInts);
    tile.scales = take<float>(kSegmentTiles * 3 * kTile);
    tile.staged = take<char>(int64_t{kAttentionSegment} * 2 * stride);
#endif
#ifdef NORIA_AMX_BF16_ATTENTION
    half_q = {take<uint16_t>(rows * job.cache.head_dim), take<uint16_t>(rows * job.cache.head_dim)};
    half_weights = {reinterpret_cast<uint16_t*>(tile.sums), reinterpret_cast<uint16_t*>(tile.sums) + 16 * kTile};
#endif
  }

 private:
  template <class E> E* take(int64_t count) {
    char* at = at_;
    at_ += (count * static_cast<int64_t>(sizeof(E)) + 63) / 64 * 64;
    return reinterpret_cast<E*>(at);
  }
  char* at_;
};

// Where one tile's keys and values are.
struct Tile {
  int first = 0, tokens = 0;
  const char* runs[kRuns];           // keys of 8 tokens each
  const char* keys[kTile / kLanes];  // per vector of tokens
  ValueTile values;
  const char *key_scales[kRuns], *value_scales[kRuns];  // int8 only
};

static void locate(const CacheUnits& cache, int pack, const KeyRange& range, int first, Tile& tile) {
  const int block_size = 1 << cache.block_shift;
  const int64_t token_bytes = static_cast<int64_t>(cache.head_dim) * 4 / pack;
  tile.first = first;
  tile.tokens = tile.values.tokens = range.end - first < kTile ? range.end - first : kTile;
  tile.values.head_dim = cache.head_dim;
  tile.values.stride = padded_dim(cache.head_dim);
  const int runs = (tile.tokens + 7) / 8;
  for (int i = 0; i < kRuns; ++i) {
    const int position = first + (i < runs ? i : runs - 1) * 8;  // runs beyond the last are never read
    const char* unit = range.base + range.blocks[position >> cache.block_shift] * cache.block_stride;
    const int offset = position & (block_size - 1);
    tile.runs[i] = unit + offset * token_bytes;
    tile.values.runs[i] = unit + cache.values + offset * token_bytes;
    tile.key_scales[i] = unit + cache.key_scales + offset * 4;
    tile.value_scales[i] = unit + cache.value_scales + offset * 4;
  }
  for (int v = 0; v < kTile / kLanes; ++v) tile.keys[v] = tile.runs[v * kLanes / 16 * 2] + v * kLanes % 16 * 4;
  if (pack < 4) return;
  for (int i = 0; i < runs; i += 2) {
    __builtin_prefetch(tile.key_scales[i], 0, 3);
    __builtin_prefetch(tile.value_scales[i], 0, 3);
  }
}

// Scales of the tile's tokens. Those of tokens that do not exist may be stale: they meet weights of zero and must be finite.
static void gather_scales(const Tile& tile, float* scales) {
  for (int i = 0; i * 8 < tile.tokens; ++i) {
    std::memcpy(scales + i * 8, tile.key_scales[i], 32);
    std::memcpy(scales + kTile + i * 8, tile.value_scales[i], 32);
  }
  for (int t = tile.tokens; t < kTile; ++t) scales[t] = scales[kTile + t] = 0;
}

// Blocks of 8 tokens have rows of 8 words; the kernels want 16. Copied: such small blocks are rare. `out` may be the work
// space of values: whoever fills that has read the keys before.
static void join_runs(Tile& tile, int words, char* out) {
  for (int i = 0; i * 8 < tile.tokens; ++i)
    for (int w = 0; w < words; ++w) std::memcpy(out + (i / 2) * words * 64 + w * 64 + (i % 2) * 32, tile.runs[i] + w * 32, 32);
  for (int v = 0; v < kTile / kLanes; ++v) tile.keys[v] = out + v * kLanes / 16 * words * 64 + v * kLanes % 16 * 4;
}

// The tile in the layout of an f32 cache.
template <class T> static void widen(Tile& tile, float* keys, float* values) {
  const int dim = tile.values.head_dim, words = dim / T::kPack;
  for (int v = 0; v * kLanes < tile.tokens; ++v) {
    float* to = keys + v * kLanes / 16 * dim * 16 + v * kLanes % 16;
    for (int w = 0; w < words; ++w, to += 16 * T::kPack) {
      const Vi word = load_words(tile.keys[v] + w * 64);
      store(to, T::template key<0>(word));
      if constexpr (T::kPack > 1) store(to + 16, T::template key<1>(word));
      if constexpr (T::kPack > 2) store(to + 32, T::template key<2>(word));
      if constexpr (T::kPack > 2) store(to + 48, T::template key<3>(word));
    }
  }
  // Dims are padded here, so that whole vectors stay within a token's row.
  for (int t = 0; t < tile.tokens; t += T::kPack) {
    const char* words_of = tile.values.runs[t / 8] + static_cast<int64_t>(t % 8) / T::kPack * dim * 4;
    float* to = values + static_cast<int64_t>(t) * dim;
    for (int d = 0; d < dim; d += kLanes) {
      const Vi word = load_words(words_of + d * 4);
      const int n = dim - d;
#define NORIA_PART(j)                                                              \
  if constexpr (j < T::kPack) {                                                    \
    if (n >= kLanes) store(to + j * dim + d, T::template value<j>(word));          \
    else store_partial(to + j * dim + d, T::template value<j>(word), n);           \
  }
      NORIA_PART(0) NORIA_PART(1) NORIA_PART(2) NORIA_PART(3)
#undef NORIA_PART
    }
  }
  for (int v = 0; v < kTile / kLanes; ++v)
    tile.keys[v] = reinterpret_cast<const char*>(keys + v * kLanes / 16 * dim * 16 + v * kLanes % 16);
  for (int i = 0; i < kRuns; ++i) tile.values.runs[i] = reinterpret_cast<const char*>(values + static_cast<int64_t>(i) * 8 * dim);
}

// Fetches runs [first, …) of a tile.
static void fetch_runs(const Tile& tile, int first, int64_t run_bytes, bool keys) {
  for (int i = first; i * 8 < tile.tokens; ++i)
    for (int64_t at = 0; at < run_bytes; at += 64) {
      if (keys) __builtin_prefetch(tile.runs[i] + at, 0, 2);
      __builtin_prefetch(tile.values.runs[i] + at, 0, 2);
    }
}

// Raw products of a row's tile → scores in powers of two, in place; returns the largest. kSome: only positions low … high - 1
// of the tile are seen. kScales: int8.
template <bool kScales, bool kSome>
static Vf scale_scores(const AttentionJob& job, float row_scale, const float* scales, int low, int high, float* scores) {
  const Vf hidden = set1(-__builtin_inff());
  const Vf from = set1(static_cast<float>(low)), to = set1(static_cast<float>(high));
  const Vf scale = set1(row_scale * (job.softcap ? job.scale / job.softcap : job.scale * kLog2E));
  const Vf softcap = set1(job.softcap * kLog2E);
  Vf most = hidden;
#pragma GCC unroll 4
  for (int i = 0; i < kTile; i += kLanes) {
    Vf x = load(scores + i);
    if (kScales) x = mul(x, load(scales + i));
    x = mul(x, scale);
    if (job.softcap) x = mul(tanh(x), softcap);
    if (kSome) {
      const Vf index = load(kIndex + i);
      x = select_less(index, from, hidden, select_less(index, to, x, hidden));
    }
    store(scores + i, x);
    most = max(most, x);
  }
  return most;
}

// Raw products of one row → weights of its values; maximum, sum and decay of the online softmax. Returns the largest
// weight of an int8 tile. A tile that the row does not see at all leaves its state as it is.
template <bool kScales>
static float weigh(const AttentionJob& job, const Tile& tile, int row, float row_scale, const float* scales, float* scores,
                   float* decay) {
  const int position = job.positions[row] - tile.first;  // relative to the tile
  const int low = job.window && position - job.window + 1 > 0 ? position - job.window + 1 : 0;
  const int high = position + 1 < tile.tokens ? position + 1 : tile.tokens;
  if (low >= high) {
    for (int i = 0; i < kTile; i += kLanes) store(scores + i, zero());
    *decay = 1;
    return 0;
  }
  const Vf most = low > 0 || high < kTile ? scale_scores<kScales, true>(job, row_scale, scales, low, high, scores)
                                          : scale_scores<kScales, false>(job, row_scale, scales, low, high, scores);
  const float before = job.maximum[row];
  const float now = exceeds(most, before) ? reduce_max(most) : before;  // it seldom does after the first tiles
  const Vf level = set1(now);
  Vf total = zero(), largest = zero();
#pragma GCC unroll 4
  for (int i = 0; i < kTile; i += kLanes) {
    Vf p = power_of_two(sub(load(scores + i), level));
    total = add(total, p);
    if (kScales) p = mul(p, load(scales + kTile + i));
    if (kScales) largest = max(p, largest);
    store(scores + i, p);
  }
  *decay = now == before ? 1.0f : power_of_two_one(before - now);
  float* sum = job.sum + row * kSumLanes;
  store(sum, add(mul(load(sum), set1(*decay)), total));
  job.maximum[row] = now;
  return kScales ? reduce_max(largest) : 0;
}

// kScales: the cache is int8, whatever T the tile has been turned into.
template <class T, bool kScales> static void attend_tile(const AttentionJob& job, const Tile& tile, const Tile* next, const Work& work) {
  static constexpr TileKernels<T, false> plain;
  static constexpr TileKernels<T, true> ahead;
  const int dim = job.cache.head_dim;
  strips(job.rows, (tile.tokens + kLanes - 1) / kLanes, kMaxRows, kMaxVectors, [&](int r, int rows, int v, int count) {
    const auto& kernels = next && r == 0 ? ahead.dots : plain.dots;
    kernels[rows - 1][count - 1](job.q + r * dim, dim, tile.keys + v, next ? next->keys + v : nullptr,
                                 work.scores + r * kTile + v * kLanes);
  });
  for (int r = 0; r < job.rows; ++r)
    weigh<kScales>(job, tile, r, 1.0f, work.scales, work.scores + r * kTile, work.decay + r);
  strips(job.rows, (dim + kLanes - 1) / kLanes, kMaxRows, kMaxVectors, [&](int r, int rows, int v, int count) {
    const auto& kernels = next && r == 0 ? ahead.sums : plain.sums;
    kernels[rows - 1][count - 1](work.scores + r * kTile, work.decay + r, tile.values, next ? next->values : tile.values,
                                 v * kLanes, job.accumulated + r * tile.values.stride + v * kLanes);
  });
}

#ifdef NORIA_INTEGER_ATTENTION
// A block of at most 16 rows: `ahead` is the tile to be fetched meanwhile, or null.
static void attend_block(const AttentionJob& job, const Tile& tile, const Tile* ahead, const Work& work, int row, int rows) {
  static constexpr IntegerKernels<false> plain;
  static constexpr IntegerKernels<true> fetching;
  const int dim = job.cache.head_dim;
  int32_t* sums = reinterpret_cast<int32_t*>(work.scores);
  strips(rows, (tile.tokens + kLanes - 1) / kLanes, kIntegerRows, kIntegerVectors, [&](int r, int count, int v, int vectors) {
    const auto& kernels = ahead && r == 0 ? fetching.dots : plain.dots;
    kernels[count - 1][vectors - 1](work.q, row + r, dim, tile.keys + v, ahead ? ahead->keys + v : nullptr,
                                    sums + r * kTile + v * kLanes);
  });
  BlockState block;
  for (int r = rows; r < kBlockRows; ++r) block.most[r] = -__builtin_inff(), block.scale[r] = 0;
  for (int r = 0; r < rows; ++r) {
    const auto sum = [&](int v) { return load_words(reinterpret_cast<const char*>(sums + r * kTile + v * kLanes)); };
    const float query_scale = work.q.scale[row + r];
    block.seen[r] = seen_positions(job, row + r, tile.first, tile.tokens);
    block.scale[r] = score_scale(job, query_scale);
    block.most[r] = reduce_max(scale_sums<true>(job, query_scale, work.tile_scales, block.seen[r], sum,
                                             work.scores + r * kTile));
  }
  update_maxima(job, work.tile_scales, row, rows, block);
  for (int r = 0; r < rows; ++r)
    weigh_seen(work.tile_scales, work.scores + r * kTile, r, block, job.sum + (row + r) * kSumLanes, work.weights, r);
  strips(rows, (dim + kLanes - 1) / kLanes, kIntegerRows, kIntegerVectors, [&](int r, int count, int v, int vectors) {
    const auto& kernels = ahead && r == 0 ? fetching.sums : plain.sums;
    kernels[count - 1][vectors - 1](work.weights, r, block, r, tile.values, ahead ? ahead->values : tile.values, v * kLanes,
                                    job.accumulated + (row + r) * tile.values.stride + v * kLanes);
  });
}

static void attend_tile_integer(const AttentionJob& job, const Tile& tile, const Tile* next, Work& work) {
  prepare_scales(work.tile_scales);
  const RowWork rows{work.q, work.tile_scales, work.weights, work.scores};
  for (int row = attend_whole_blocks(job, tile.first, tile.keys, tile.values, rows); row < job.rows; row += kBlockRows)
    attend_block(job, tile, row == 0 ? next : nullptr, work, row, job.rows - row < kBlockRows ? job.rows - row : kBlockRows);
}
#endif

#ifdef NORIA_AMX_BF16_ATTENTION
// Not a matter of rows: the order of sums differs from the other path's. With narrow heads the few rows of a decode would
// lose more to the latency of tiles than the many of a prompt win.
template <class T> static bool in_half_tiles(const AttentionJob& job) {
  return T::kPack == 2 && job.cache.head_dim >= 128 && job.cache.head_dim % 32 == 0;
}

static void attend_tile_halves(const AttentionJob& job, const Tile& tile, const Tile* next, const Work& work) {
  const int dim = job.cache.head_dim;
  char* values = reinterpret_cast<char*>(work.keys);
  copy_half_values(tile.values, next ? &next->values : nullptr, values);
  for (int row = 0; row < job.rows; row += kTileRows) {
    const int rows = job.rows - row < kTileRows ? job.rows - row : kTileRows;
    if (job.rows > kTileRows && job.rows % kTileRows && (row == 0 || rows < kTileRows)) configure_half_tiles(rows);
    const Tile* ahead = row == 0 ? next : nullptr;
    score_halves(work.half_q, row, dim, tile.keys, (tile.tokens + 15) / 16, ahead ? ahead->keys : nullptr, work.scores);
    for (int r = 0; r < rows; ++r) {
      float* scores = work.scores + r * kTile;
      float decay;
      weigh<false>(job, tile, row + r, 1.0f, work.scales, scores, &decay);
      split_halves(scores, kTile, work.half_weights.high + r * kTile, work.half_weights.low + r * kTile);
      if (decay == 1) continue;
      float* accumulated = job.accumulated + static_cast<int64_t>(row + r) * dim;
      for (int d = 0; d < dim; d += kLanes) store(accumulated + d, mul(load(accumulated + d), set1(decay)));
    }
    add_half_values(work.half_weights, dim, values, job.accumulated + static_cast<int64_t>(row) * dim);
  }
}
#endif

template <class T> static void compute_tile(const AttentionJob& job, Tile& tile, const Tile* next, Work& work) {
#ifdef NORIA_INTEGER_ATTENTION
  if constexpr (T::kPack == 4) return attend_tile_integer(job, tile, next, work);
#endif
#ifdef NORIA_AMX_BF16_ATTENTION
  if (in_half_tiles<T>(job)) return attend_tile_halves(job, tile, next, work);
#endif
  if (T::kPack == 1 || job.rows < kWidenRows) return attend_tile<T, T::kPack == 4>(job, tile, next, work);
  widen<T>(tile, work.keys, work.values);
  attend_tile<F32, T::kPack == 4>(job, tile, nullptr, work);
}

// Query rows in the form that products want, and states that begin anew.
template <class T> static void begin_rows(const AttentionJob& job, const Work& work) {
  const int64_t stride = padded_dim(job.cache.head_dim);
  for (int r = 0; r < job.rows; ++r) {
#ifdef NORIA_INTEGER_ATTENTION
    if (T::kPack == 4 && !job.same_rows) split_query(job.q + r * job.cache.head_dim, job.cache.head_dim, r, work.q);
#endif
#ifdef NORIA_AMX_BF16_ATTENTION
    if (T::kPack == 2 && in_half_tiles<T>(job) && !job.same_rows) {
      const int64_t at = static_cast<int64_t>(r) * job.cache.head_dim;
      split_halves(job.q + at, job.cache.head_dim, work.half_q.high + at, work.half_q.low + at);
    }
#endif
    if (job.resume) continue;
    job.maximum[r] = -FLT_MAX;
    store(job.sum + r * kSumLanes, zero());
    for (int64_t i = 0; i < stride; i += kLanes) store(job.accumulated + r * stride + i, zero());
  }
}

#ifdef NORIA_AMX_ATTENTION
// Copies a tile's values to where all rows will read them; keys are read where they lie. Of tokens and dims that do not
// exist anything may be left: they meet zeros.
static void stage(const AttentionJob& job, int first, const Work& work, int index, StagedTile& out) {
  const int dim = job.cache.head_dim, key_words = dim / 4;
  const int64_t key_bytes = work.q.stride * 16, row = int64_t{dim} * 4, stride = padded_dim(dim) * 4;
  Tile tile;
  locate(job.cache, 4, job.keys, first, tile);
  out.first = first;
  out.tokens = tile.tokens;
  float* scales = work.tile.scales + index * 3 * kTile;
  out.scales = {scales, scales + kTile, scales + 2 * kTile, 0};
  gather_scales(tile, scales);
  prepare_scales(out.scales);
  char* keys = work.tile.staged + index * kTile * 2 * work.q.stride;
  out.values = keys + kTileVectors * key_bytes;
  if (job.cache.block_shift == 3) join_runs(tile, key_words, keys);
  for (int v = 0; v < kTileVectors; ++v) out.keys[v] = tile.keys[v];
  for (int quad = 0; quad * 4 < tile.tokens; ++quad)
    for (int64_t at = 0; at < row; at += 64)
      store(reinterpret_cast<float*>(out.values + weight_quad(quad) * stride + at),
            load(reinterpret_cast<const float*>(tile.values.runs[quad / 2] + quad % 2 * row + at)));
}

// Fetches a tile of the next segment.
static void fetch_next(const AttentionJob& job, int index) {
  const int first = job.next.begin + index * kTile;
  if (first >= job.next.end) return;
  Tile tile;
  locate(job.cache, 4, job.next, first, tile);
  fetch_runs(tile, 0, int64_t{job.cache.head_dim} * 8, true);
}

static void attend_segment_amx(const AttentionJob& job) {
  const Work work(job);
  begin_rows<Int8>(job, work);
  for (int r = 0; r < job.rows && !job.same_rows; ++r)
    store(reinterpret_cast<float*>(work.tile.offsets + r * 16), as_float(set1_int(work.q.offset[r])));
  StagedTile staged[kSegmentTiles];
  int count = 0;
  for (int first = job.keys.begin; first < job.keys.end; first += kTile, ++count) stage(job, first, work, count, staged[count]);
  const ByteWeights weights{work.weights.bytes, work.weights.bytes + kBlockRows * kTile};
  const TileJob tiles{job, work.q, weights, work.tile};
  configure_tiles(job.rows);
  const int parts = (job.rows + kBlockRows - 1) / kBlockRows;
  for (int row = 0; row < job.rows; row += kBlockRows) {
    const int rows = job.rows - row < kBlockRows ? job.rows - row : kBlockRows;
    int from = count, to = 0;  // the tiles that one of the rows sees something of
    for (int i = 0; i < count; ++i) {
      uint64_t seen = 0;
      for (int r = row; r < row + rows && !seen; ++r) seen = seen_positions(job, r, staged[i].first, staged[i].tokens);
      if (!seen) continue;
      from = i < from ? i : from;
      to = i + 1;
    }
    if (from < to)
      attend_rows(tiles, row, rows, staged + from, to - from, [&](int i) {
        if (i % parts == row / kBlockRows) fetch_next(job, i);
      });
  }
  tiles_release();
}
#endif

template <class T> static void attend_segment(const AttentionJob& job) {
  const CacheUnits& cache = job.cache;
#ifdef NORIA_AMX_ATTENTION
  if (T::kPack == 4 && job.rows >= kLeastAmxRows) return attend_segment_amx(job);
#endif
  Work work(job);
  begin_rows<T>(job, work);
  const int64_t run_bytes = static_cast<int64_t>(cache.head_dim) * 32 / T::kPack;
  // Few rows fetch the next tile while they compute; many have time for a burst of fetches.
  bool spread = job.rows < kWidenRows && cache.block_shift > 3;
#ifdef NORIA_AMX_BF16_ATTENTION
  if (in_half_tiles<T>(job)) {
    spread = cache.block_shift > 3;
    configure_half_tiles(job.rows < kTileRows ? job.rows : kTileRows);
  }
#endif
  Tile tiles[2];
  locate(cache, T::kPack, job.keys, job.keys.begin, tiles[0]);
  for (int first = job.keys.begin, turn = 0; first < job.keys.end; first += kTile, turn ^= 1) {
    Tile &tile = tiles[turn], &next = tiles[turn ^ 1];
    const bool last = first + kTile >= job.keys.end;
    const bool more = !last || job.next.begin < job.next.end;
    if (T::kPack == 4) gather_scales(tile, work.scales);
    if (more) {
      locate(cache, T::kPack, last ? job.next : job.keys, last ? job.next.begin : first + kTile, next);
      fetch_runs(next, spread ? (tile.tokens + 7) / 8 : 0, run_bytes, true);
    }
    if (cache.block_shift == 3) join_runs(tile, cache.head_dim / T::kPack, reinterpret_cast<char*>(work.values));
    compute_tile<T>(job, tile, more && spread ? &next : nullptr, work);
  }
#ifdef NORIA_AMX_BF16_ATTENTION
  if (in_half_tiles<T>(job)) tiles_release();
#endif
}

static void attend(const AttentionJob& job) {
  switch (job.cache.type) {
    case CacheType::f32: return attend_segment<F32>(job);
    case CacheType::bf16: return attend_segment<Bf16>(job);
    case CacheType::int8: return attend_segment<Int8>(job);
  }
}

static void fold(float* maximum, float* sum, float* accumulated, const float* next_maximum, const float* next_sum,
                 const float* next_accumulated, int head_dim) {
  const float now = *maximum > *next_maximum ? *maximum : *next_maximum;
  const float a = power_of_two_one(*maximum - now), b = power_of_two_one(*next_maximum - now);
  *maximum = now;
  const Vf va = set1(a), vb = set1(b);
  store(sum, fma(vb, load(next_sum), mul(va, load(sum))));
  for (int64_t i = 0; i < padded_dim(head_dim); i += kLanes)
    store(accumulated + i, fma(vb, load(next_accumulated + i), mul(va, load(accumulated + i))));
}

static void finish(const float* accumulated, const float* sum, float* out, int head_dim) {
  const Vf inverse = set1(1.0f / reduce_add(load(sum)));
  for (int i = 0; i < head_dim; i += kLanes) {
    // Adding zero turns -0 into 0: whether an underflow left one may depend on tokens whose weight was zero.
    const Vf x = add(mul(load(accumulated + i), inverse), zero());
    if (head_dim - i >= kLanes) store(out + i, x);
    else store_partial(out + i, x, head_dim - i);
  }
}

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {attend, fold, finish, rope_tokens};

}  // namespace noria::NORIA_ISA
