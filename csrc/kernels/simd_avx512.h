// simd.h for AVX-512 (F, BW, DQ, VL): 16 lanes. Include simd.h, not this.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace noria::NORIA_ISA {

static constexpr int kLanes = 16;
using Vf = __m512;
using Vi = __m512i;

static inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

static inline Vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vf v) { _mm512_storeu_ps(p, v); }
static inline Vf load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline void store_partial(float* p, Vf v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
static inline Vf set1(float x) { return _mm512_set1_ps(x); }
static inline Vf zero() { return _mm512_setzero_ps(); }
static inline Vi set1_int(int x) { return _mm512_set1_epi32(x); }

static inline Vf add(Vf a, Vf b) { return _mm512_add_ps(a, b); }
static inline Vf sub(Vf a, Vf b) { return _mm512_sub_ps(a, b); }
static inline Vf mul(Vf a, Vf b) { return _mm512_mul_ps(a, b); }
static inline Vf div(Vf a, Vf b) { return _mm512_div_ps(a, b); }
static inline Vf max(Vf a, Vf b) { return _mm512_max_ps(a, b); }
static inline Vf min(Vf a, Vf b) { return _mm512_min_ps(a, b); }
static inline Vf sqrt(Vf v) { return _mm512_sqrt_ps(v); }
static inline Vf abs(Vf v) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), v); }
static inline Vf neg(Vf v) { return _mm512_xor_ps(_mm512_set1_ps(-0.0f), v); }
static inline Vf fma(Vf a, Vf b, Vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vf round_even(Vf v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vi to_int(Vf v) { return _mm512_cvtps_epi32(v); }
static inline Vf to_float(Vi v) { return _mm512_cvtepi32_ps(v); }
static inline Vf select_less(Vf a, Vf b, Vf x, Vf y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

static inline float reduce_add(Vf v) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 e = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(e, _mm_shuffle_ps(e, e, 1)));
}
static inline float reduce_max(Vf v) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 e = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(e, _mm_shuffle_ps(e, e, 1)));
}
static inline int32_t reduce_add_int(Vi v) {
  const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  const __m128i e = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(e, _mm_shuffle_epi32(e, 0xb1)));
}

static inline Vi as_int(Vf v) { return _mm512_castps_si512(v); }
static inline Vf as_float(Vi v) { return _mm512_castsi512_ps(v); }
static inline Vi add_int(Vi a, Vi b) { return _mm512_add_epi32(a, b); }
static inline Vi and_int(Vi a, Vi b) { return _mm512_and_si512(a, b); }
template <int n> static inline Vi shift_left(Vi v) { return _mm512_slli_epi32(v, n); }
template <int n> static inline Vi shift_right(Vi v) { return _mm512_srli_epi32(v, n); }

static inline void store_low8(void* p, Vi v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
static inline void store_low8_partial(void* p, Vi v, int n) { _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), v); }
static inline void store_low16(void* p, Vi v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
}
static inline void store_low16_partial(void* p, Vi v, int n) { _mm512_mask_cvtepi32_storeu_epi16(p, first_lanes(n), v); }
static inline Vi load_s8(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline Vi load_s8_partial(const int8_t* p, int n) {
  return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p));
}
static inline Vi load_u16(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline Vi load_u16_partial(const uint16_t* p, int n) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

}  // namespace noria::NORIA_ISA
