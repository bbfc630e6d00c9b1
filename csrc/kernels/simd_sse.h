// simd.h for the x86-64-v2 baseline (SSE4.1): 4 lanes, no fused multiply-add. Include simd.h, not this.
#pragma once
#include <smmintrin.h>

#include <cstdint>
#include <cstring>

namespace noria::NORIA_ISA {

static constexpr int kLanes = 4;
using Vf = __m128;
using Vi = __m128i;

static inline Vf load(const float* p) { return _mm_loadu_ps(p); }
static inline void store(float* p, Vf v) { _mm_storeu_ps(p, v); }
static inline Vf load_partial(const float* p, int n) {
  float lanes[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return _mm_loadu_ps(lanes);
}
static inline void store_partial(float* p, Vf v, int n) {
  float lanes[4];
  _mm_storeu_ps(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
static inline Vf set1(float x) { return _mm_set1_ps(x); }
static inline Vf zero() { return _mm_setzero_ps(); }
static inline Vi set1_int(int x) { return _mm_set1_epi32(x); }

static inline Vf add(Vf a, Vf b) { return _mm_add_ps(a, b); }
static inline Vf sub(Vf a, Vf b) { return _mm_sub_ps(a, b); }
static inline Vf mul(Vf a, Vf b) { return _mm_mul_ps(a, b); }
static inline Vf div(Vf a, Vf b) { return _mm_div_ps(a, b); }
static inline Vf max(Vf a, Vf b) { return _mm_max_ps(a, b); }
static inline Vf min(Vf a, Vf b) { return _mm_min_ps(a, b); }
static inline Vf sqrt(Vf v) { return _mm_sqrt_ps(v); }
static inline Vf abs(Vf v) { return _mm_andnot_ps(_mm_set1_ps(-0.0f), v); }
static inline Vf neg(Vf v) { return _mm_xor_ps(_mm_set1_ps(-0.0f), v); }
static inline Vf fma(Vf a, Vf b, Vf c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
static inline Vf round_even(Vf v) { return _mm_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vi to_int(Vf v) { return _mm_cvtps_epi32(v); }
static inline Vf to_float(Vi v) { return _mm_cvtepi32_ps(v); }
static inline Vf select_less(Vf a, Vf b, Vf x, Vf y) { return _mm_blendv_ps(y, x, _mm_cmplt_ps(a, b)); }

static inline float reduce_add(Vf v) {
  const __m128 e = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(e, _mm_shuffle_ps(e, e, 1)));
}
static inline float reduce_max(Vf v) {
  const __m128 e = _mm_max_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_max_ss(e, _mm_shuffle_ps(e, e, 1)));
}
static inline int32_t reduce_add_int(Vi v) {
  const __m128i e = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(e, _mm_shuffle_epi32(e, 0xb1)));
}

static inline Vi as_int(Vf v) { return _mm_castps_si128(v); }
static inline Vf as_float(Vi v) { return _mm_castsi128_ps(v); }
static inline Vi add_int(Vi a, Vi b) { return _mm_add_epi32(a, b); }
static inline Vi and_int(Vi a, Vi b) { return _mm_and_si128(a, b); }
template <int n> static inline Vi shift_left(Vi v) { return _mm_slli_epi32(v, n); }
template <int n> static inline Vi shift_right(Vi v) { return _mm_srli_epi32(v, n); }

static inline void store_low8_partial(void* p, Vi v, int n) {
  const __m128i packed = _mm_shuffle_epi8(v, _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const int32_t bytes = _mm_cvtsi128_si32(packed);
  std::memcpy(p, &bytes, static_cast<size_t>(n));
}
static inline void store_low8(void* p, Vi v) { store_low8_partial(p, v, 4); }
static inline void store_low16_partial(void* p, Vi v, int n) {
  const __m128i packed = _mm_shuffle_epi8(v, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
  const int64_t halves = _mm_cvtsi128_si64(packed);
  std::memcpy(p, &halves, 2 * static_cast<size_t>(n));
}
static inline void store_low16(void* p, Vi v) { store_low16_partial(p, v, 4); }
static inline Vi load_s8_partial(const int8_t* p, int n) {
  int32_t bytes = 0;
  std::memcpy(&bytes, p, static_cast<size_t>(n));
  return _mm_cvtepi8_epi32(_mm_cvtsi32_si128(bytes));
}
static inline Vi load_s8(const int8_t* p) { return load_s8_partial(p, 4); }
static inline Vi load_u16_partial(const uint16_t* p, int n) {
  int64_t halves = 0;
  std::memcpy(&halves, p, 2 * static_cast<size_t>(n));
  return _mm_cvtepu16_epi32(_mm_cvtsi64_si128(halves));
}
static inline Vi load_u16(const uint16_t* p) { return load_u16_partial(p, 4); }

}  // namespace noria::NORIA_ISA
