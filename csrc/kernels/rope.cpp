// RMS norm and rotation of the heads of a run of tokens, and their way into the cache's layout (attention.h).
//
// Functions of a head are templates of its width: for common widths a head stays in registers from the product's floats
// to the cache's words. kDim 0 is any width, known at run time only.
#include "kernels/rope.h"

#include "kernels/quantise.h"
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

template <int kDim> static constexpr int kVectors = (kDim ? kDim : kMaxHeadDim) / kLanes;
template <int kDim> using Head = Vf[kVectors<kDim>];
template <int kDim> static constexpr int width_of(int head_dim) { return kDim ? kDim : head_dim; }

static inline Vf load_tail(const float* p, int n) { return n >= kLanes ? load(p) : load_partial(p, n); }
static inline void store_tail(float* p, Vf v, int n) {
  if (n >= kLanes) store(p, v);
  else store_partial(p, v, n);
}

template <int kDim> static inline void load_head(const float* x, int head_dim, Head<kDim>& head) {
  const int dim = width_of<kDim>(head_dim);
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) head[i / kLanes] = load_tail(x + i, dim - i);
}

template <int kDim> static inline void store_head(const Head<kDim>& head, int head_dim, float* out) {
  const int dim = width_of<kDim>(head_dim);
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) store_tail(out + i, head[i / kLanes], dim - i);
}

template <int kDim> static inline void norm_head(const float* weight, float eps, int head_dim, Head<kDim>& head) {
  const int dim = width_of<kDim>(head_dim);
  Vf squares = zero();
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) squares = fma(head[i / kLanes], head[i / kLanes], squares);
  const float mean = reduce_add(squares) / static_cast<float>(dim);
  const Vf inverse = set1(1.0f / __builtin_sqrtf(mean + eps));
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes)
    head[i / kLanes] = mul(mul(head[i / kLanes], inverse), load_tail(weight + i, dim - i));
}

static inline Vf turned_low(Vf a, Vf b, Vf cos, Vf sin) { return fma(a, cos, neg(mul(b, sin))); }
static inline Vf turned_high(Vf a, Vf b, Vf cos, Vf sin) { return fma(b, cos, mul(a, sin)); }

// One token's row of the table.
struct Turn {
  const float *cos, *sin;
  int rotary_dim;
};

// Halves that are whole vectors.
template <int kDim> static inline void turn_head(const Turn& turn, Head<kDim>& head) {
  constexpr int kHalf = kDim / 2;
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; i += kLanes) {
    const Vf a = head[i / kLanes], b = head[(kHalf + i) / kLanes];
    const Vf cos = load(turn.cos + i), sin = load(turn.sin + i);
    head[i / kLanes] = turned_low(a, b, cos, sin);
    head[(kHalf + i) / kLanes] = turned_high(a, b, cos, sin);
  }
}

static void turn_any_head(const Turn& turn, int head_dim, Head<0>& head) {
  alignas(64) float x[kMaxHeadDim];
  store_head<0>(head, head_dim, x);
  const int half = turn.rotary_dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i;
    const Vf a = load_tail(x + i, n), b = load_tail(x + half + i, n);
    const Vf cos = load_tail(turn.cos + i, n), sin = load_tail(turn.sin + i, n);
    store_tail(x + i, turned_low(a, b, cos, sin), n);
    store_tail(x + half + i, turned_high(a, b, cos, sin), n);
  }
  load_head<0>(x, head_dim, head);
}

template <int kDim>
static inline void make_head(const RopeJob& job, const float* x, const float* norm, const Turn& turn, Head<kDim>& head) {
  const int head_dim = job.cache.head_dim;
  load_head<kDim>(x, head_dim, head);
  if (norm) norm_head<kDim>(norm, job.eps, head_dim, head);
  if constexpr (kDim != 0) turn_head<kDim>(turn, head);
  else if (turn.rotary_dim) turn_any_head(turn, head_dim, head);
}

// ---- into the cache

// Key words and value words of one token within its unit; the token has `slot` of kPack elements in the value words.
struct Place {
  char* key;
  int key_stride;  // bytes from a key word to the next
  char* value;
  int slot;
};
template <int kPack> static inline Place place(const CacheUnits& cache, char* unit, int offset) {
  const int lanes = cache.block_shift == 3 ? 8 : 16;
  const int64_t token_bytes = static_cast<int64_t>(cache.head_dim) * 4 / kPack;
  char* key = unit + offset / lanes * lanes * token_bytes + offset % lanes * 4;
  char* value = unit + cache.values + offset / kPack * kPack * token_bytes;
  return {key, lanes * 4, value, offset % kPack};
}

static inline void scatter_key(const char* row, int words, const Place& at) {
  if (at.key_stride == 64) {
#pragma GCC unroll 16
    for (int w = 0; w < words; ++w) std::memcpy(at.key + w * 64, row + w * 4, 4);
  } else {
    for (int w = 0; w < words; ++w) std::memcpy(at.key + w * at.key_stride, row + w * 4, 4);
  }
}

// The low 32 / kPack bits of n lanes into their slot of the words at `to`. Words of one dim belong to several tokens,
// which other threads may be writing: nothing but the slot is touched.
template <int kPack> static inline void put_slots(char* to, int slot, Vi bits, int n) {
#if defined(__AVX512F__)
  const Vi moved = _mm512_sll_epi32(bits, _mm_cvtsi32_si128(slot * (32 / kPack)));
  if constexpr (kPack == 4) {
    __mmask64 bytes = 0x1111111111111111u << slot;
    if (n < kLanes) bytes &= (uint64_t{1} << (4 * n)) - 1;
    _mm512_mask_storeu_epi8(to, bytes, moved);
  } else if constexpr (kPack == 2) {
    __mmask32 halves = 0x55555555u << slot;
    if (n < kLanes) halves &= (1u << (2 * n)) - 1;
    _mm512_mask_storeu_epi16(to, halves, moved);
  } else {
    _mm512_mask_storeu_epi32(to, n >= kLanes ? 0xffff : first_lanes(n), moved);
  }
#else
  char row[kLanes * 4];
  constexpr int kBytes = 4 / kPack;
  if constexpr (kPack == 4) store_low8(row, bits);
  else if constexpr (kPack == 2) store_low16(row, bits);
  else store(reinterpret_cast<float*>(row), as_float(bits));
  for (int i = 0; i < kLanes && i < n; ++i) std::memcpy(to + i * 4 + slot * kBytes, row + i * kBytes, kBytes);
#endif
}

template <int kDim> static inline Scale measure_head(const Head<kDim>& head, int head_dim) {
  const int dim = width_of<kDim>(head_dim);
  Vf size = zero();
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) size = larger_size(head[i / kLanes], size);
  return scale_of(reduce_max(size));
}

template <int kDim>
static inline void write_int8(const CacheUnits& cache, char* unit, int offset, const Head<kDim>& key, const Head<kDim>& value) {
  const int dim = width_of<kDim>(cache.head_dim);
  const Place at = place<4>(cache, unit, offset);
  const Scale key_scale = measure_head<kDim>(key, dim), value_scale = measure_head<kDim>(value, dim);
  std::memcpy(unit + cache.key_scales + offset * 4, &key_scale.scale, 4);
  std::memcpy(unit + cache.value_scales + offset * 4, &value_scale.scale, 4);
  const Vf key_inverse = set1(key_scale.inverse), value_inverse = set1(value_scale.inverse);
  // Keys are stored as code + 128.
  alignas(64) char row[kMaxHeadDim];
#if defined(__AVX512VNNI__)
  if constexpr (kDim % 64 == 0 && kDim != 0) {
#pragma GCC unroll 4
    for (int i = 0; i < kDim; i += 64) {
      const auto code = [&](int v) { return to_int(mul(key[i / kLanes + v], key_inverse)); };
      const __m512i codes = pack_codes(code(0), code(1), code(2), code(3));
      _mm512_store_si512(row + i, _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80))));
    }
  } else
#endif
#pragma GCC unroll 16
    for (int i = 0; i < dim; i += kLanes)
      store_low8(row + i, add_int(to_int(mul(key[i / kLanes], key_inverse)), set1_int(128)));
  scatter_key(row, dim / 4, at);
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes)
    put_slots<4>(at.value + i * 4, at.slot, to_int(mul(value[i / kLanes], value_inverse)), dim - i);
}

template <int kDim>
static inline void write_bf16(const CacheUnits& cache, char* unit, int offset, const Head<kDim>& key, const Head<kDim>& value) {
  const int dim = width_of<kDim>(cache.head_dim);
  const Place at = place<2>(cache, unit, offset);
  alignas(64) uint16_t row[kMaxHeadDim];
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) store_bf16(row + i, key[i / kLanes]);
  scatter_key(reinterpret_cast<const char*>(row), dim / 2, at);
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) put_slots<2>(at.value + i * 4, at.slot, to_bf16_bits(value[i / kLanes]), dim - i);
}

template <int kDim>
static inline void write_f32(const CacheUnits& cache, char* unit, int offset, const Head<kDim>& key, const Head<kDim>& value) {
  const int dim = width_of<kDim>(cache.head_dim);
  const Place at = place<1>(cache, unit, offset);
  alignas(64) float row[kMaxHeadDim];
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) store(row + i, key[i / kLanes]);
  scatter_key(reinterpret_cast<const char*>(row), dim, at);
#pragma GCC unroll 16
  for (int i = 0; i < dim; i += kLanes) put_slots<1>(at.value + i * 4, 0, as_int(value[i / kLanes]), dim - i);
}

// As assembly: GCC drops calls of functions that do nothing but prefetch.
static inline void fetch_to_write(const char* p) {
#if defined(__AVX512F__)
  asm volatile("prefetchw %0" : : "m"(*p));
#elif defined(__x86_64__)
  asm volatile("prefetcht0 %0" : : "m"(*p));
#else
  __builtin_prefetch(p, 1, 3);
#endif
}

// Asks for the lines that a token's keys and values are written to: they lie scattered, and are rarely in a near cache.
static void fetch_token(const RopeJob& job, int64_t token) {
  const CacheUnits& cache = job.cache;
  const int32_t at = job.kv_positions[token];
  const int offset = at & ((1 << cache.block_shift) - 1);
  const int pack = cache.type == CacheType::int8 ? 4 : cache.type == CacheType::bf16 ? 2 : 1;
  char* unit = cache.base + (at >> cache.block_shift) * cache.block_stride;
  const int lanes = cache.block_shift == 3 ? 8 : 16;
  const int64_t token_bytes = static_cast<int64_t>(cache.head_dim) * 4 / pack;
  for (int h = 0; h < job.kv_heads; ++h, unit += job.unit_bytes) {
    const char* key = unit + offset / lanes * lanes * token_bytes;
    for (int64_t b = 0; b < lanes * token_bytes; b += 64) fetch_to_write(key + b);
    const char* value = unit + cache.values + offset / pack * pack * token_bytes;
    for (int64_t b = 0; b < pack * token_bytes; b += 64) fetch_to_write(value + b);
    if (pack < 4) continue;
    fetch_to_write(unit + cache.key_scales + offset * 4);
    fetch_to_write(unit + cache.value_scales + offset * 4);
  }
}

template <int kDim> static inline void rope_token(const RopeJob& job, int64_t token) {
  const CacheUnits& cache = job.cache;
  const int dim = width_of<kDim>(cache.head_dim);
  const int64_t row = int64_t{job.positions[token]} * (job.rotary_dim / 2);
  const Turn turn{job.cos + row, job.sin + row, job.rotary_dim};
  const float* x = job.qkv + token * (job.heads + 2 * job.kv_heads) * dim;
  float* q = job.q + token * job.heads * dim;
  Head<kDim> head, value;
  for (int h = 0; h < job.heads; ++h) {
    make_head<kDim>(job, x + h * dim, job.q_norm, turn, head);
    store_head<kDim>(head, dim, q + h * dim);
  }
  const int32_t at = job.kv_positions[token];
  const int offset = at & ((1 << cache.block_shift) - 1);
  char* unit = cache.base + (at >> cache.block_shift) * cache.block_stride;
  const float* keys = x + job.heads * dim;
  for (int h = 0; h < job.kv_heads; ++h, unit += job.unit_bytes) {
    make_head<kDim>(job, keys + h * dim, job.k_norm, turn, head);
    load_head<kDim>(keys + (job.kv_heads + h) * dim, dim, value);
    switch (cache.type) {
      case CacheType::f32: write_f32<kDim>(cache, unit, offset, head, value); break;
      case CacheType::bf16: write_bf16<kDim>(cache, unit, offset, head, value); break;
      case CacheType::int8: write_int8<kDim>(cache, unit, offset, head, value); break;
    }
  }
}

constexpr int64_t kTokensAhead = 2;

template <int kDim> static void rope_run(const RopeJob& job) {
  for (int64_t t = 0; t < kTokensAhead && t < job.tokens; ++t) fetch_token(job, t);
  for (int64_t t = 0; t < job.tokens; ++t) {
    // Neighbours of one block share their lines.
    const int64_t next = t + kTokensAhead;
    if (next < job.tokens && job.kv_positions[next] != job.kv_positions[next - 1] + 1) fetch_token(job, next);
    rope_token<kDim>(job, t);
  }
}

void rope_tokens(const RopeJob& job) {
  const bool whole = job.rotary_dim == job.cache.head_dim;
  if (whole && job.rotary_dim == 64) rope_run<64>(job);
  else if (whole && job.rotary_dim == 128) rope_run<128>(job);
  else if (whole && job.rotary_dim == 256) rope_run<256>(job);
  else rope_run<0>(job);
}

}  // namespace noria::NORIA_ISA
