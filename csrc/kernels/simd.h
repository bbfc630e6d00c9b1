// The one thin header over intrinsics: a vector of floats (Vf) and of 32-bit integers (Vi) per ISA level.
//
// Everything lives in noria::NORIA_ISA, a namespace per level, because two levels' versions of one inline function would
// be merged by the linker, and the wider one might then run on a processor that lacks it. For the same reason kernel
// files must not call inline functions or templates of the standard library (std::max, std::vector …): theirs are merged.
//
// The build forbids contraction (-ffp-contract=off): fma() is fused where the level has it and a multiplication followed
// by an addition on the baseline. Reductions have one fixed order. So a result depends on the level and on nothing else.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__)
#include "kernels/simd_avx512.h"
#elif defined(NORIA_ISA_avx2)
#include "kernels/simd_avx2.h"
#elif defined(NORIA_ISA_neon) || defined(NORIA_ISA_neon_i8mm)
#include "kernels/simd_neon.h"
#elif defined(__SSE4_1__)
#include "kernels/simd_sse.h"
#else
#include "kernels/simd_scalar.h"
#endif

namespace noria::NORIA_ISA {

// What the level's header defines (Vf of kLanes floats, Vi of kLanes int32):
//   load(p) store(p, v)                    unaligned
//   load_partial(p, n) store_partial(p, v, n)   the first n of kLanes, 0 <= n <= kLanes; other lanes load as zero
//   set1(x) zero() set1_int(i)
//   add sub mul div max min abs neg sqrt   max(a, b), min(a, b): b where either is NaN (NEON: NaN)
//   fma(a, b, c)                           a * b + c
//   round_even(v)                          to the nearest integer, ties to even, still floats
//   to_int(v) to_float(i)                  to_int rounds to the nearest, ties to even
//   select_less(a, b, x, y)                a < b ? x : y
//   reduce_add(v) reduce_max(v) reduce_add_int(i)  lanes i and i + half are combined, then quarters, and so on
//   as_int(v) as_float(i) add_int(a, b) and_int(a, b) shift_left<n>(i) shift_right<n>(i)   shift_right is logical
//   store_low8(p, i) store_low8_partial(p, i, n)     the low byte of each lane
//   store_low16(p, i) store_low16_partial(p, i, n)   the low half of each lane
//   load_s8(p) load_s8_partial(p, n)       int8 sign-extended to Vi
//   load_u16(p) load_u16_partial(p, n)     uint16 zero-extended to Vi

// ---- bfloat16: the upper half of a float32; rounding to nearest even; NaN stays NaN. The same bits at every level.

static inline float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline Vf load_bf16(const uint16_t* p) { return as_float(shift_left<16>(load_u16(p))); }
static inline Vf load_bf16_partial(const uint16_t* p, int n) { return as_float(shift_left<16>(load_u16_partial(p, n))); }

// The bfloat16 bits in the low half of each lane. A NaN that only its low bits make one becomes infinite here; the hot
// path does not pay for telling them apart (our kernels yield quiet NaNs, whose upper half is one).
static inline Vi to_bf16_bits(Vf v) {
  const Vi bits = as_int(v);
  const Vi odd = and_int(shift_right<16>(bits), set1_int(1));
  return shift_right<16>(add_int(add_int(bits, set1_int(0x7fff)), odd));
}
static inline void store_bf16(uint16_t* p, Vf v) { store_low16(p, to_bf16_bits(v)); }
static inline void store_bf16_partial(uint16_t* p, Vf v, int n) { store_low16_partial(p, to_bf16_bits(v), n); }
// v rounded to bfloat16, as float32.
static inline Vf round_bf16(Vf v) { return as_float(shift_left<16>(to_bf16_bits(v))); }

// ---- elementary functions: branch-free, the same steps in every lane.

// e^x. Relative error below 2^-22 where the result is a normal number; 0 below -87.33 (so for -inf); arguments above
// 88.37 count as 88.37; NaN stays NaN. Range reduction by powers of two and the degree-5 polynomial of Cephes' expf.
static inline Vf exp(Vf x) {
  const Vf low = set1(-87.3365447f), high = set1(88.3762589f);
  const Vf bounded = max(low, min(high, x));
  const Vf n = round_even(mul(bounded, set1(1.44269504f)));
  Vf r = fma(n, set1(-0.693359375f), bounded);
  r = fma(n, set1(2.12194440e-4f), r);
  Vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  const Vf power = as_float(shift_left<23>(add_int(to_int(n), set1_int(127))));
  return select_less(x, low, zero(), mul(p, power));
}

// 1 / (1 + e^-x); relative error below 2^-21 for x > -87.
#if defined(__AVX512F__)
// The bits of 2^(j / 32), j << 18 less.
alignas(64) static constexpr uint32_t kPowers[32] = {
    0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
    0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
    0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
    0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3};

// Gated products wait for this one, most of all beside matrix registers, where multiplications, conversions and roundings are
// scarce, but additions, shuffles and blends are not. e^-x is a power of two, x * -log2(e) = k / 32 + r with k in the lower bits
// of `near`: the table has 2^(k / 32) but for its exponent, and 2^r is 1 + r * (c1 + c2 r), with an error below 2^-24. The
// reciprocal begins with 14 bits, which one step of Newton's doubles.
static inline Vf sigmoid(Vf x) {
  // Beyond, the power would leave float32. NaN stays NaN.
  const Vf most = set1(87.3f), least = set1(-87.3f);
  x = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, most, _CMP_GT_OQ), x, most);
  x = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, least, _CMP_LT_OQ), x, least);
  const Vf shift = set1(393216.0f);  // 1.5 * 2^18: its last bit is worth 1 / 32
  const Vf near = fma(x, set1(-1.44269504f), shift);
  Vf r = fma(x, set1(-1.44269504f), sub(shift, near));
  r = fma(x, set1(-1.92596303e-8f), r);
  const Vi table = _mm512_permutex2var_epi32(_mm512_load_si512(kPowers), as_int(near), _mm512_load_si512(kPowers + 16));
  const Vf power = as_float(add_int(table, shift_left<18>(as_int(near))));
  const Vf d = add(fma(mul(power, r), fma(set1(0.240226507f), r, set1(0.693157344f)), power), set1(1.0f));
  const Vf y = _mm512_rcp14_ps(d);
  return fma(y, fma(neg(d), y, set1(1.0f)), y);
}
#else
static inline Vf sigmoid(Vf x) { return div(set1(1.0f), add(set1(1.0f), exp(neg(x)))); }
#endif

// tanh x; relative error below 2^-20. Cephes' tanhf: an odd polynomial near zero, exponentials beyond.
static inline Vf tanh(Vf x) {
  const Vf size = abs(x);
  const Vf z = mul(x, x);
  Vf p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const Vf near = fma(mul(p, z), x, x);
  const Vf far = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
  return select_less(size, set1(0.625f), near, select_less(x, zero(), neg(far), far));
}

static inline Vf silu(Vf x) { return mul(x, sigmoid(x)); }

// GELU by its tanh approximation: x * sigmoid(2 * sqrt(2/pi) * (x + 0.044715 x^3)).
static inline Vf gelu_tanh(Vf x) {
  const Vf cubic = mul(fma(mul(x, x), set1(0.044715f), set1(1.0f)), x);
  return mul(x, sigmoid(mul(cubic, set1(1.59576912f))));
}

}  // namespace noria::NORIA_ISA
