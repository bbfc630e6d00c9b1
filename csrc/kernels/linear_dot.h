// What the products need beyond simd.h: a step's 4-byte units in the lanes of a Vi, and their dot products.
#pragma once
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

static inline Vi load_units(const void* p) { return as_int(load(static_cast<const float*>(p))); }

static inline Vi low_nibbles(Vi v) { return and_int(v, set1_int(0x0f0f0f0f)); }
static inline Vi high_nibbles(Vi v) { return and_int(shift_right<4>(v), set1_int(0x0f0f0f0f)); }
static inline Vi low_halves(Vi v) { return shift_left<16>(v); }  // widens the bfloat16 of lower index
static inline Vi high_halves(Vi v) { return and_int(v, set1_int(static_cast<int>(0xffff0000u))); }

// The float16 at p, none of them subnormal, infinite or NaN.
static inline Vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  const Vi half = load_u16(p);
  const Vf size = as_float(shift_left<13>(and_int(half, set1_int(0x7fff))));  // its exponent lacks 127 - 15
  const Vi sign = shift_left<16>(and_int(half, set1_int(0x8000)));
  return as_float(add_int(as_int(mul(size, as_float(set1_int((127 + 112) << 23)))), sign));
#endif
}

// dot_int8(acc, w, x): acc += w · x of four bytes per lane, w = int8_weight(stored unit), x s8.
// dot_int4(acc, w, x): the same for w of 0…15. Where NORIA_PAIR_SUMS says so, acc holds sums of pairs in 16 bits, good for
// eight products (|pair| ≤ 2 * 15 * 127), which add_pairs(acc, pairs) then adds to 32-bit ones.
// kBiasedCodes: int8_weight keeps the stored code + 128, and the accumulator has to start at -128 * sum of x.
// dot_bf16(acc, w, x), where NORIA_DOT_BF16 says that the level has it: acc += w · x of two bfloat16 per lane.

// dot_f32(acc, w, x): acc += w * x of the float in each lane.

#if defined(__x86_64__) && defined(__FMA__)  // the form that adds to its accumulator; GCC's choice of form costs moves
static inline void dot_f32(Vf& acc, Vi w, Vi x) { asm volatile("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }
#else
static inline void dot_f32(Vf& acc, Vi w, Vi x) { acc = fma(as_float(w), as_float(x), acc); }
#endif

#if defined(__AVX512VNNI__)

constexpr bool kBiasedCodes = true;
static inline Vi int8_weight(Vi w) { return w; }
// Inline assembly: GCC 12 keeps the accumulators of the intrinsics on the stack. As a read-write operand of an
// instruction they stay in registers; volatile keeps the order, in which no register has to be saved for later.
static inline void dot_int8(Vi& acc, Vi w, Vi x) { asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }
static inline void dot_int4(Vi& acc, Vi w, Vi x) { asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }
#if defined(__AVX512BF16__)
#define NORIA_DOT_BF16 1
static inline void dot_bf16(Vf& acc, Vi w, Vi x) { asm volatile("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }
#endif

#elif defined(__AVX2__)

// vpmaddubsw saturates its 16-bit pair sums. |w| ≤ 127 times ±x with |x| ≤ 127 cannot reach that: 2 * 127² < 2^15.
constexpr bool kBiasedCodes = false;
static inline Vi int8_weight(Vi w) { return _mm256_xor_si256(w, set1_int(static_cast<int>(0x80808080u))); }
static inline Vi add_pairs(Vi acc, Vi pairs) { return add_int(acc, _mm256_madd_epi16(pairs, set1_int(0x00010001))); }
static inline void dot_int8(Vi& acc, Vi w, Vi x) {
  acc = add_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
}
#define NORIA_PAIR_SUMS 1
static inline void dot_int4(Vi& acc, Vi w, Vi x) { acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x)); }

#elif defined(__SSE4_1__)

constexpr bool kBiasedCodes = false;  // as for AVX2
static inline Vi int8_weight(Vi w) { return _mm_xor_si128(w, set1_int(static_cast<int>(0x80808080u))); }
static inline Vi add_pairs(Vi acc, Vi pairs) { return add_int(acc, _mm_madd_epi16(pairs, set1_int(0x00010001))); }
static inline void dot_int8(Vi& acc, Vi w, Vi x) {
  acc = add_pairs(acc, _mm_maddubs_epi16(_mm_abs_epi8(w), _mm_sign_epi8(x, w)));
}
#define NORIA_PAIR_SUMS 1
static inline void dot_int4(Vi& acc, Vi w, Vi x) { acc = _mm_add_epi16(acc, _mm_maddubs_epi16(w, x)); }

#elif defined(__ARM_FEATURE_DOTPROD)

#if defined(__ARM_FEATURE_MATMUL_INT8)  // usdot: unsigned by signed
constexpr bool kBiasedCodes = true;
static inline Vi int8_weight(Vi w) { return w; }
static inline void dot_int8(Vi& acc, Vi w, Vi x) {
  acc = vusdotq_s32(acc, vreinterpretq_u8_s32(w), vreinterpretq_s8_s32(x));
}
#else
constexpr bool kBiasedCodes = false;
static inline Vi int8_weight(Vi w) { return veorq_s32(w, set1_int(static_cast<int>(0x80808080u))); }
static inline void dot_int8(Vi& acc, Vi w, Vi x) {
  acc = vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
#endif
static inline void dot_int4(Vi& acc, Vi w, Vi x) {  // codes 0…15 are the same signed and unsigned
  acc = vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define NORIA_DOT_BF16 1
static inline void dot_bf16(Vf& acc, Vi w, Vi x) {
  acc = vbfdotq_f32(acc, vreinterpretq_bf16_s32(w), vreinterpretq_bf16_s32(x));
}
#endif

#else  // plain C++

constexpr bool kBiasedCodes = false;
static inline Vi int8_weight(Vi w) {
  for (int i = 0; i < kLanes; ++i) w.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(w.lane[i]) ^ 0x80808080u);
  return w;
}
static inline void dot_int8(Vi& acc, Vi w, Vi x) {
  for (int i = 0; i < kLanes; ++i)
    for (int b = 0; b < 32; b += 8)
      acc.lane[i] += static_cast<int8_t>(w.lane[i] >> b) * static_cast<int8_t>(x.lane[i] >> b);
}
static inline void dot_int4(Vi& acc, Vi w, Vi x) { dot_int8(acc, w, x); }

#endif

}  // namespace noria::NORIA_ISA
