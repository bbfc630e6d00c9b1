// Attention over one segment of a sequence's paged cache, for a few query rows of one KV head.
#include "kernels/attention.h"

#include <cfloat>

#include "kernels/attention_tile.h"
#include "kernels/rope.h"
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

static constexpr int kTile = kAttentionTile;

alignas(64) static const float kIndex[kTile] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// exp of one number by the steps of the vector function.
static float exp_one(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// One tile of a job: where its keys and values are.
struct Tile {
  int first = 0, tokens = 0;
  const char* keys[kTile / kLanes];  // per vector of tokens
  ValueTile values;
  const float* key_scales = nullptr;  // [kTile], int8 only
  const float* value_scales = nullptr;
};

// Blocks of 8 tokens have rows of 8 words; the kernels want 16. Copied: such small blocks are rare.
static void widen_keys(const char* const* runs, int count, int words, char* out) {
  for (int i = 0; i < count; ++i) {
    char* to = out + (i / 2) * words * 64 + (i % 2) * 32;
    for (int w = 0; w < words; ++w) std::memcpy(to + w * 64, runs[i] + w * 32, 32);
  }
}

template <int kPack> static void locate(const AttentionJob& job, int first, int tokens, float* scales, char* copy, Tile& tile) {
  const CacheUnits& cache = job.cache;
  const int block_size = 1 << cache.block_shift;
  const int64_t token_bytes = static_cast<int64_t>(cache.head_dim) * 4 / kPack;
  const int runs = (tokens + 7) / 8;
  const char* keys[kTile / 8] = {};
  tile.first = first;
  tile.tokens = tile.values.tokens = tokens;
  for (int i = 0; i < runs; ++i) {
    const int position = first + i * 8;
    const char* unit = cache.base + job.blocks[position >> cache.block_shift] * cache.block_stride;
    const int offset = position & (block_size - 1);
    keys[i] = unit + offset * token_bytes;
    tile.values.runs[i] = unit + cache.values + offset * token_bytes;
    if (kPack == 4) {
      std::memcpy(scales + i * 8, unit + cache.key_scales + offset * 4, 32);
      std::memcpy(scales + kTile + i * 8, unit + cache.value_scales + offset * 4, 32);
    }
  }
  if (kPack == 4) {
    // Scales of tokens that do not exist may be stale: they meet weights of zero and must be finite.
    for (int t = tokens; t < kTile; ++t) scales[t] = scales[kTile + t] = 0;
    tile.key_scales = scales;
    tile.value_scales = scales + kTile;
  }
  const int words = cache.head_dim / kPack;
  if (block_size == 8) widen_keys(keys, runs, words, copy);
  for (int v = 0; v * kLanes < tokens; ++v) {
    const int token = v * kLanes;
    const char* group = block_size == 8 ? copy + (token / 16) * words * 64 : keys[token / 16 * 2];
    tile.keys[v] = group + token % 16 * 4;
  }
}

static void prefetch(const AttentionJob& job, int first, int64_t unit_bytes) {
  if (first >= job.end) return;
  const CacheUnits& cache = job.cache;
  const int last = first + kTile < job.end ? first + kTile : job.end;
  for (int block = first >> cache.block_shift; block <= (last - 1) >> cache.block_shift; ++block) {
    const char* unit = cache.base + job.blocks[block] * cache.block_stride;
    for (int64_t i = 0; i < unit_bytes; i += 64) __builtin_prefetch(unit + i, 0, 2);
  }
}

// Raw products of one row → weights of its values; maximum, sum and decay of the online softmax.
// A tile that the row does not see at all leaves its state as it is.
static void weigh(const AttentionJob& job, const Tile& tile, int row, float* scores, float* decay) {
  const int position = job.first_position + row / job.rows_per_token - tile.first;  // relative to the tile
  const int low = job.window && position - job.window + 1 > 0 ? position - job.window + 1 : 0;
  const int high = position + 1 < tile.tokens ? position + 1 : tile.tokens;
  if (low >= high) {
    for (int i = 0; i < kTile; i += kLanes) store(scores + i, zero());
    *decay = 1;
    return;
  }
  const Vf from = set1(static_cast<float>(low)), to = set1(static_cast<float>(high));
  const Vf hidden = set1(-__builtin_inff());
  const Vf scale = set1(job.softcap ? job.scale / job.softcap : job.scale), softcap = set1(job.softcap);
  Vf s[kTile / kLanes];
  Vf most = hidden;
#pragma GCC unroll 16
  for (int v = 0; v < kTile / kLanes; ++v) {
    const int i = v * kLanes;
    s[v] = hidden;
    if (i >= high) continue;
    Vf x = load(scores + i);
    if (tile.key_scales) x = mul(x, load(tile.key_scales + i));
    x = mul(x, scale);
    if (job.softcap) x = mul(tanh(x), softcap);
    const Vf index = load(kIndex + i);
    s[v] = select_less(index, from, hidden, select_less(index, to, x, hidden));
    most = max(most, s[v]);
  }
  const float before = job.maximum[row];
  const float tile_most = reduce_max(most);
  const float now = tile_most > before ? tile_most : before;
  const Vf level = set1(now);
  Vf total = zero();
#pragma GCC unroll 16
  for (int v = 0; v < kTile / kLanes; ++v) {
    const int i = v * kLanes;
    if (i >= high) {
      store(scores + i, zero());
      continue;
    }
    Vf p = exp(sub(s[v], level));
    total = add(total, p);
    if (tile.value_scales) p = mul(p, load(tile.value_scales + i));
    store(scores + i, p);
  }
  *decay = now == before ? 1.0f : exp_one(before - now);
  job.sum[row] = job.sum[row] * *decay + reduce_add(total);
  job.maximum[row] = now;
}

template <class T> static void attend_tile(const AttentionJob& job, const Tile& tile, float* scores, float* decay) {
  static constexpr TileKernels<T> kernels;
  const int dim = job.cache.head_dim;
  const int vectors = (tile.tokens + kLanes - 1) / kLanes;
  for (int r = 0; r < job.rows; r += kMaxRows) {
    const int rows = job.rows - r < kMaxRows ? job.rows - r : kMaxRows;
    for (int v = 0; v < vectors; v += kMaxVectors) {
      const int count = vectors - v < kMaxVectors ? vectors - v : kMaxVectors;
      kernels.dots[rows - 1][count - 1](job.q + r * dim, dim, tile.keys + v, scores + r * kTile + v * kLanes);
    }
  }
  for (int r = 0; r < job.rows; ++r) weigh(job, tile, r, scores + r * kTile, decay + r);
  const int dim_vectors = (dim + kLanes - 1) / kLanes;
  for (int r = 0; r < job.rows; r += kMaxRows) {
    const int rows = job.rows - r < kMaxRows ? job.rows - r : kMaxRows;
    for (int v = 0; v < dim_vectors; v += kMaxVectors) {
      const int count = dim_vectors - v < kMaxVectors ? dim_vectors - v : kMaxVectors;
      kernels.sums[rows - 1][count - 1](scores + r * kTile, decay + r, tile.values, v * kLanes,
                                        job.accumulated + r * padded_dim(dim) + v * kLanes);
    }
  }
}

template <class T> static void attend_segment(const AttentionJob& job) {
  const int dim = job.cache.head_dim;
  const int64_t stride = padded_dim(dim);
  float* scores = reinterpret_cast<float*>(job.work);  // [rows][kTile]
  float* scales = scores + static_cast<int64_t>(job.rows) * kTile;
  float* decay = scales + 2 * kTile;
  char* copy = job.work + (static_cast<int64_t>(job.rows) * (kTile + 1) + 2 * kTile) * 4;
  copy += -reinterpret_cast<uintptr_t>(copy) & 63;
  for (int r = 0; r < job.rows; ++r) {
    job.maximum[r] = -FLT_MAX;
    job.sum[r] = 0;
    for (int64_t i = 0; i < stride; i += kLanes) store(job.accumulated + r * stride + i, zero());
  }
  Tile tile;
  tile.values.head_dim = dim;
  tile.values.stride = stride;
  const int64_t unit_bytes = (int64_t{2} << job.cache.block_shift) * dim * 4 / T::kPack;
  for (int first = job.begin; first < job.end; first += kTile) {
    const int tokens = job.end - first < kTile ? job.end - first : kTile;
    locate<T::kPack>(job, first, tokens, scales, copy, tile);
    prefetch(job, first + kTile, unit_bytes);
    attend_tile<T>(job, tile, scores, decay);
  }
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
  const float a = exp_one(*maximum - now), b = exp_one(*next_maximum - now);
  *maximum = now;
  *sum = *sum * a + *next_sum * b;
  const Vf va = set1(a), vb = set1(b);
  for (int64_t i = 0; i < padded_dim(head_dim); i += kLanes)
    store(accumulated + i, fma(vb, load(next_accumulated + i), mul(va, load(accumulated + i))));
}

static void finish(const float* accumulated, const float* sum, float* out, int head_dim) {
  const Vf total = set1(*sum);
  for (int i = 0; i < head_dim; i += kLanes) {
    // Adding zero turns -0 into 0: whether an underflow left one may depend on tokens whose weight was zero.
    const Vf x = add(div(load(accumulated + i), total), zero());
    if (head_dim - i >= kLanes) store(out + i, x);
    else store_partial(out + i, x, head_dim - i);
  }
}

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {attend, fold, finish, rotate_head, write_token};

}  // namespace noria::NORIA_ISA
