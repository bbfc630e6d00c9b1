// RMS norm and rotation of one head of one token, and its conversion into the cache's layout (attention.h).
#include "kernels/rope.h"

#include "kernels/simd.h"

namespace noria::NORIA_ISA {

static inline Vf load_tail(const float* p, int n) { return n >= kLanes ? load(p) : load_partial(p, n); }
static inline void store_tail(float* p, Vf v, int n) {
  if (n >= kLanes) store(p, v);
  else store_partial(p, v, n);
}

static void norm_head(const float* x, float* out, const float* weight, float eps, int dim) {
  Vf squares = zero();
  for (int i = 0; i < dim; i += kLanes) {
    const Vf v = load_tail(x + i, dim - i);
    squares = fma(v, v, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(dim);
  const Vf inverse = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (int i = 0; i < dim; i += kLanes) {
    const Vf v = mul(load_tail(x + i, dim - i), inverse);
    store_tail(out + i, mul(v, load_tail(weight + i, dim - i)), dim - i);
  }
}

// out may be x.
void rotate_head(const float* x, float* out, const RopeHead& head) {
  const int dim = head.head_dim, half = head.rotary_dim / 2;
  if (head.norm) {
    norm_head(x, out, head.norm, head.eps, dim);
    x = out;
  }
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i;
    const Vf a = load_tail(x + i, n), b = load_tail(x + half + i, n);
    const Vf c = load_tail(head.cos + i, n), s = load_tail(head.sin + i, n);
    store_tail(out + i, fma(a, c, neg(mul(b, s))), n);
    store_tail(out + half + i, fma(b, c, mul(a, s)), n);
  }
  if (x == out) return;
  for (int i = 2 * half; i < dim; i += kLanes) store_tail(out + i, load_tail(x + i, dim - i), dim - i);
}

// Codes -127…127 and their scale: max|x| / 127, 0 for a row of zeros (or of numbers that have no reciprocal).
static float quantise(const float* x, int dim, int8_t* codes) {
  Vf most = zero();
  for (int i = 0; i < dim; i += kLanes) most = max(abs(load_tail(x + i, dim - i)), most);
  const float largest = reduce_max(most);
  const bool usable = largest > 1e-35f;
  const Vf inverse = set1(usable ? 127.0f / largest : 0.0f);
  for (int i = 0; i < dim; i += kLanes) {
    const Vi code = to_int(mul(load_tail(x + i, dim - i), inverse));
    if (dim - i >= kLanes) store_low8(codes + i, code);
    else store_low8_partial(codes + i, code, dim - i);
  }
  return usable ? largest / 127.0f : 0.0f;
}

static void round_row(const float* x, int dim, uint16_t* out) {
  for (int i = 0; i < dim; i += kLanes) {
    const Vf v = load_tail(x + i, dim - i);
    if (dim - i >= kLanes) store_bf16(out + i, v);
    else store_bf16_partial(out + i, v, dim - i);
  }
}

// A converted row as the key words of one token: `lanes` words apart.
static void scatter_key(const void* row, int words, int lanes, char* to) {
  const char* from = static_cast<const char*>(row);
  for (int w = 0; w < words; ++w) std::memcpy(to + static_cast<int64_t>(w) * lanes * 4, from + w * 4, 4);
}

// Key words and value elements of one token within its unit.
struct Place {
  char* key;
  char* value;
  int lanes;
};
template <int kPack> static Place place(const CacheUnits& cache, int64_t block, int offset) {
  const int lanes = cache.block_shift == 3 ? 8 : 16;
  char* unit = cache.base + block * cache.block_stride;
  const int64_t token_bytes = static_cast<int64_t>(cache.head_dim) * 4 / kPack;
  char* key = unit + offset / lanes * lanes * token_bytes + offset % lanes * 4;
  char* value = unit + cache.values + offset / kPack * kPack * token_bytes + offset % kPack * (4 / kPack);
  return {key, value, lanes};
}

static void write_f32(const CacheUnits& cache, int64_t block, int offset, const float* key, const float* value) {
  const Place at = place<1>(cache, block, offset);
  scatter_key(key, cache.head_dim, at.lanes, at.key);
  std::memcpy(at.value, value, static_cast<size_t>(cache.head_dim) * 4);
}

static void write_bf16(const CacheUnits& cache, int64_t block, int offset, const float* key, const float* value) {
  alignas(64) uint16_t row[kMaxHeadDim];
  const Place at = place<2>(cache, block, offset);
  round_row(key, cache.head_dim, row);
  scatter_key(row, cache.head_dim / 2, at.lanes, at.key);
  round_row(value, cache.head_dim, row);
  uint16_t* to = reinterpret_cast<uint16_t*>(at.value);
  for (int i = 0; i < cache.head_dim; ++i) to[i * 2] = row[i];
}

static void write_int8(const CacheUnits& cache, int64_t block, int offset, const float* key, const float* value) {
  alignas(64) int8_t row[kMaxHeadDim];
  const Place at = place<4>(cache, block, offset);
  char* unit = cache.base + block * cache.block_stride;
  const float key_scale = quantise(key, cache.head_dim, row);
  std::memcpy(unit + cache.key_scales + offset * 4, &key_scale, 4);
  for (int i = 0; i < cache.head_dim; ++i) row[i] = static_cast<int8_t>(row[i] ^ 0x80);
  scatter_key(row, cache.head_dim / 4, at.lanes, at.key);
  const float value_scale = quantise(value, cache.head_dim, row);
  std::memcpy(unit + cache.value_scales + offset * 4, &value_scale, 4);
  for (int i = 0; i < cache.head_dim; ++i) at.value[i * 4] = static_cast<char>(row[i]);
}

void write_token(const CacheUnits& cache, int64_t block, int offset, const float* key, const float* value) {
  switch (cache.type) {
    case CacheType::f32: return write_f32(cache, block, offset, key, value);
    case CacheType::bf16: return write_bf16(cache, block, offset, key, value);
    case CacheType::int8: return write_int8(cache, block, offset, key, value);
  }
}

}  // namespace noria::NORIA_ISA
