// simd.h for AArch64 NEON: 4 lanes. Include simd.h, not this.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace noria::NORIA_ISA {

static constexpr int kLanes = 4;
using Vf = float32x4_t;
using Vi = int32x4_t;

static inline Vf load(const float* p) { return vld1q_f32(p); }
static inline void store(float* p, Vf v) { vst1q_f32(p, v); }
static inline Vf load_partial(const float* p, int n) {
  float lanes[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return vld1q_f32(lanes);
}
static inline void store_partial(float* p, Vf v, int n) {
  float lanes[4];
  vst1q_f32(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
static inline Vf set1(float x) { return vdupq_n_f32(x); }
static inline Vf zero() { return vdupq_n_f32(0.0f); }
static inline Vi set1_int(int x) { return vdupq_n_s32(x); }

static inline Vf add(Vf a, Vf b) { return vaddq_f32(a, b); }
static inline Vf sub(Vf a, Vf b) { return vsubq_f32(a, b); }
static inline Vf mul(Vf a, Vf b) { return vmulq_f32(a, b); }
static inline Vf div(Vf a, Vf b) { return vdivq_f32(a, b); }
static inline Vf max(Vf a, Vf b) { return vmaxq_f32(a, b); }
static inline Vf min(Vf a, Vf b) { return vminq_f32(a, b); }
static inline Vf sqrt(Vf v) { return vsqrtq_f32(v); }
static inline Vf abs(Vf v) { return vabsq_f32(v); }
static inline Vf neg(Vf v) { return vnegq_f32(v); }
static inline Vf fma(Vf a, Vf b, Vf c) { return vfmaq_f32(c, a, b); }
static inline Vf round_even(Vf v) { return vrndnq_f32(v); }
static inline Vi to_int(Vf v) { return vcvtnq_s32_f32(v); }
static inline Vf to_float(Vi v) { return vcvtq_f32_s32(v); }
static inline Vf select_less(Vf a, Vf b, Vf x, Vf y) { return vbslq_f32(vcltq_f32(a, b), x, y); }

static inline float reduce_add(Vf v) {
  const float32x2_t e = vadd_f32(vget_low_f32(v), vget_high_f32(v));
  return vget_lane_f32(e, 0) + vget_lane_f32(e, 1);
}
static inline float reduce_max(Vf v) { return vmaxvq_f32(v); }
static inline int32_t reduce_add_int(Vi v) { return vaddvq_s32(v); }

static inline Vi as_int(Vf v) { return vreinterpretq_s32_f32(v); }
static inline Vf as_float(Vi v) { return vreinterpretq_f32_s32(v); }
static inline Vi add_int(Vi a, Vi b) { return vaddq_s32(a, b); }
static inline Vi and_int(Vi a, Vi b) { return vandq_s32(a, b); }
template <int n> static inline Vi shift_left(Vi v) { return vshlq_n_s32(v, n); }
template <int n> static inline Vi shift_right(Vi v) {
  return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), n));
}

static inline void store_low16_partial(void* p, Vi v, int n) {
  const int16x4_t halves = vmovn_s32(v);
  std::memcpy(p, &halves, 2 * static_cast<size_t>(n));
}
static inline void store_low16(void* p, Vi v) { store_low16_partial(p, v, 4); }
static inline void store_low8_partial(void* p, Vi v, int n) {
  const int16x4_t halves = vmovn_s32(v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
  std::memcpy(p, &bytes, static_cast<size_t>(n));
}
static inline void store_low8(void* p, Vi v) { store_low8_partial(p, v, 4); }
static inline Vi load_s8_partial(const int8_t* p, int n) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, p, static_cast<size_t>(n));
  return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes))));
}
static inline Vi load_s8(const int8_t* p) { return load_s8_partial(p, 4); }
static inline Vi load_u16_partial(const uint16_t* p, int n) {
  uint64_t halves = 0;
  std::memcpy(&halves, p, 2 * static_cast<size_t>(n));
  return vreinterpretq_s32_u32(vmovl_u16(vcreate_u16(halves)));
}
static inline Vi load_u16(const uint16_t* p) { return load_u16_partial(p, 4); }

}  // namespace noria::NORIA_ISA
