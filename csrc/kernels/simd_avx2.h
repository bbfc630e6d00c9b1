// simd.h for AVX2 with FMA: 8 lanes. Include simd.h, not this.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace noria::NORIA_ISA {

static constexpr int kLanes = 8;
using Vf = __m256;
using Vi = __m256i;

static inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline Vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vf v) { _mm256_storeu_ps(p, v); }
static inline Vf load_partial(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
static inline void store_partial(float* p, Vf v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
static inline Vf set1(float x) { return _mm256_set1_ps(x); }
static inline Vf zero() { return _mm256_setzero_ps(); }
static inline Vi set1_int(int x) { return _mm256_set1_epi32(x); }

static inline Vf add(Vf a, Vf b) { return _mm256_add_ps(a, b); }
static inline Vf sub(Vf a, Vf b) { return _mm256_sub_ps(a, b); }
static inline Vf mul(Vf a, Vf b) { return _mm256_mul_ps(a, b); }
static inline Vf div(Vf a, Vf b) { return _mm256_div_ps(a, b); }
static inline Vf max(Vf a, Vf b) { return _mm256_max_ps(a, b); }
static inline Vf min(Vf a, Vf b) { return _mm256_min_ps(a, b); }
static inline Vf sqrt(Vf v) { return _mm256_sqrt_ps(v); }
static inline Vf abs(Vf v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
static inline Vf neg(Vf v) { return _mm256_xor_ps(_mm256_set1_ps(-0.0f), v); }
static inline Vf fma(Vf a, Vf b, Vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vf round_even(Vf v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vi to_int(Vf v) { return _mm256_cvtps_epi32(v); }
static inline Vf to_float(Vi v) { return _mm256_cvtepi32_ps(v); }
static inline Vf select_less(Vf a, Vf b, Vf x, Vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

static inline float reduce_add(Vf v) {
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 e = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(e, _mm_shuffle_ps(e, e, 1)));
}
static inline float reduce_max(Vf v) {
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 e = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(e, _mm_shuffle_ps(e, e, 1)));
}
static inline int32_t reduce_add_int(Vi v) {
  const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i e = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(e, _mm_shuffle_epi32(e, 0xb1)));
}

static inline Vi as_int(Vf v) { return _mm256_castps_si256(v); }
static inline Vf as_float(Vi v) { return _mm256_castsi256_ps(v); }
static inline Vi add_int(Vi a, Vi b) { return _mm256_add_epi32(a, b); }
static inline Vi and_int(Vi a, Vi b) { return _mm256_and_si256(a, b); }
template <int n> static inline Vi shift_left(Vi v) { return _mm256_slli_epi32(v, n); }
template <int n> static inline Vi shift_right(Vi v) { return _mm256_srli_epi32(v, n); }

static inline __m128i low16(Vi v) {
  const __m256i in_pairs = _mm256_shuffle_epi8(
      v, _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1,
                          -1, -1, -1, -1, -1));
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(in_pairs, 0x08));
}
static inline __m128i low8(Vi v) {
  return _mm_shuffle_epi8(low16(v), _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1));
}
static inline void store_low8(void* p, Vi v) { _mm_storel_epi64(static_cast<__m128i*>(p), low8(v)); }
static inline void store_low8_partial(void* p, Vi v, int n) {
  const int64_t bytes = _mm_cvtsi128_si64(low8(v));
  std::memcpy(p, &bytes, static_cast<size_t>(n));
}
static inline void store_low16(void* p, Vi v) { _mm_storeu_si128(static_cast<__m128i*>(p), low16(v)); }
static inline void store_low16_partial(void* p, Vi v, int n) {
  const __m128i halves = low16(v);
  std::memcpy(p, &halves, 2 * static_cast<size_t>(n));
}
static inline Vi load_s8(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
static inline Vi load_s8_partial(const int8_t* p, int n) {
  int64_t bytes = 0;
  std::memcpy(&bytes, p, static_cast<size_t>(n));
  return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes));
}
static inline Vi load_u16(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline Vi load_u16_partial(const uint16_t* p, int n) {
  __m128i halves = _mm_setzero_si128();
  std::memcpy(&halves, p, 2 * static_cast<size_t>(n));
  return _mm256_cvtepu16_epi32(halves);
}

}  // namespace noria::NORIA_ISA
