// Symmetric int8 codes of floats that are still in registers: inline, for whoever has just made them (norms, heads on
// their way into the cache, epilogues of products). scale = max|x| / 127; code = x * (127 / max|x|) rounded to even; a
// group's result depends on its numbers alone, whatever lies beside it.
#pragma once
#include "core/types.h"
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

// Below this a group counts as zero: 127 / max|x| would leave float32.
static constexpr float kLeastQuantised = 3.8e-37f;

static constexpr int kCodeRow = 64;                     // floats that are quantised together: one or two groups
static constexpr int kRowVectors = kCodeRow / kLanes;

// Where rows of 64 codes go. Group g of row r has its scale at r * group_stride + g.
struct CodeRows {
  uint8_t* codes = nullptr;
  int64_t stride = 0;  // bytes from a row to the next
  float* scales = nullptr;
  int32_t* sums = nullptr;
  int64_t group_stride = 0;
  CodeRows from(int64_t row) const {
    return {codes + row * stride, stride, scales + row * group_stride, sums + row * group_stride, group_stride};
  }
};

constexpr bool quantises_rows(int group) { return group == 32 || group == kCodeRow; }

// Scale and its reciprocal of a group whose largest size is known.
struct Scale {
  float scale, inverse;
};
static inline Scale scale_of(float largest) {
  if (largest < kLeastQuantised) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

// Of a row in 16 bits (Format::s16). Below this, 32384 / max|x| would leave float32.
static constexpr float kLeastWide = 1e-34f;
static inline Scale wide_scale_of(float largest) {
  if (largest < kLeastWide) return {0.0f, 0.0f};
  return {largest / kMostWide, kMostWide / largest};
}

// The larger size of each lane; a NaN in x counts for nothing.
static inline Vf larger_size(Vf x, Vf size) { return max(abs(x), size); }

// What is no number becomes the code that it becomes among four rows, where packs saturate: -128.
static inline Vi row_code(Vf x) {
#if defined(__AVX512VNNI__)
  return _mm512_max_epi32(to_int(x), set1_int(-128));
#else
  return to_int(x);
#endif
}

// One row, a group at a time; load(column) yields the vector there.
template <int kGroup, class Load>
static inline void quantise_one_row(uint8_t* codes, float* scales, int32_t* sums, Load load) {
  constexpr int kVectors = kGroup / kLanes;
  for (int g = 0; g < kCodeRow / kGroup; ++g) {
    Vf x[kVectors], size = zero();
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      x[v] = load(g * kGroup + v * kLanes);
      size = larger_size(x[v], size);
    }
    const Scale scale = scale_of(reduce_max(size));
    const Vf inverse = set1(scale.inverse);
    Vi sum = set1_int(0);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const Vi code = row_code(mul(x[v], inverse));
      sum = add_int(sum, code);
      store_low8(codes + g * kGroup + v * kLanes, code);
    }
    scales[g] = scale.scale;
    sums[g] = reduce_add_int(sum);
  }
}

#if defined(__AVX512VNNI__)

// What packs make of four vectors, one after the other.
static inline __m512i in_order(__m512i quarters) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), quarters);
}
// The low bytes of four vectors of codes.
static inline __m512i pack_codes(Vi a, Vi b, Vi c, Vi d) {
  return in_order(_mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)));
}

// The larger size of each lane in one instruction; a NaN counts for nothing beside a number.
static inline Vf larger_of_sizes(Vf a, Vf b) { return _mm512_range_ps(a, b, 0x0b); }

// sum += the four bytes of each lane. As inline assembly, because GCC 12 keeps the intrinsic's sums in memory.
static inline void add_bytes(__m512i& sum, __m512i bytes) {
  asm("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(bytes), "v"(_mm512_set1_epi8(1)));
}

// Codes c of 16 bits in two bytes each, c = 254 * high + low: high = floor((c + 127) / 254), taken as an exact division of
// unsigned numbers, ((c + 32512 + 127) / 2) * 33027 / 2^22 being floor(… / 127) for all 15-bit numerators.
struct WideCodes {
  __m512i high, low;
};
static inline WideCodes wide_codes(Vi a, Vi b, Vi c, Vi d) {
  const __m512i shift = _mm512_set1_epi16(128 * kDigit), half = _mm512_set1_epi16(kDigit / 2);
  __m512i high[2], low[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i code = _mm512_add_epi16(i ? _mm512_packs_epi32(c, d) : _mm512_packs_epi32(a, b), shift);
    const __m512i halved = _mm512_srli_epi16(_mm512_add_epi16(code, half), 1);
    high[i] = _mm512_srli_epi16(_mm512_mulhi_epu16(halved, _mm512_set1_epi16(static_cast<int16_t>(33027))), 6);
    low[i] = _mm512_sub_epi16(code, _mm512_mullo_epi16(high[i], _mm512_set1_epi16(kDigit)));
  }
  const __m512i minus_128 = _mm512_set1_epi8(static_cast<char>(0x80));
  return {_mm512_xor_si512(in_order(_mm512_packus_epi16(high[0], high[1])), minus_128),
          in_order(_mm512_packs_epi16(low[0], low[1]))};
}

// Quarter q of the result: the quarters of vector q, brought together by `join` (an addition or a maximum).
template <class Join> static inline __m512i join_quarters(__m512i a, __m512i b, __m512i c, __m512i d, Join join) {
  const __m512i left = join(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
  const __m512i right = join(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xee));
  return join(_mm512_shuffle_i32x4(left, right, 0x88), _mm512_shuffle_i32x4(left, right, 0xdd));
}

// Brings the four lanes of each quarter together.
template <class Join> static inline __m128i join_lanes(__m512i quarters, Join join) {
  quarters = join(quarters, _mm512_shuffle_epi32(quarters, _MM_PERM_BADC));
  quarters = join(quarters, _mm512_shuffle_epi32(quarters, _MM_PERM_CDAB));
  return _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, quarters));
}

static inline __m512i join_sums(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
// Sizes are not negative: they compare as their bits do.
static inline __m512i join_sizes(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }

// Four groups in one go, so that their reductions share instructions: R rows of 64 floats, 4 for groups of 64 and 2 for
// groups of 32.
template <int R> struct FourGroups {
  static constexpr int kGroups = 4 / R;  // per row
  alignas(16) float scales[4], inverses[4];
  alignas(16) int32_t sums[4];

  inline void measure(const Vf (&x)[R][4]) {
    Vf size[4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vf low = larger_of_sizes(x[r][0], x[r][1]), high = larger_of_sizes(x[r][2], x[r][3]);
      // Beside zero, a NaN counts for nothing even where all are.
      if constexpr (R == 4) {
        size[r] = larger_of_sizes(larger_of_sizes(low, high), zero());
      } else {
        size[2 * r] = larger_of_sizes(low, zero());
        size[2 * r + 1] = larger_of_sizes(high, zero());
      }
    }
    const __m512i quarters = join_quarters(as_int(size[0]), as_int(size[1]), as_int(size[2]), as_int(size[3]), join_sizes);
    const __m128 largest = _mm_castsi128_ps(join_lanes(quarters, join_sizes));
    const __m128 most = _mm_set1_ps(127.0f);
    const __mmask8 usable = _mm_cmp_ps_mask(largest, _mm_set1_ps(kLeastQuantised), _CMP_NLT_UQ);
    _mm_store_ps(scales, _mm_maskz_div_ps(usable, largest, most));
    _mm_store_ps(inverses, _mm_maskz_div_ps(usable, most, largest));
  }

  inline void store_codes(const Vf (&x)[R][4], const CodeRows& out) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vf low = set1(inverses[r * kGroups]), high = set1(inverses[r * kGroups + kGroups - 1]);
      const __m512i codes = pack_codes(to_int(mul(x[r][0], low)), to_int(mul(x[r][1], low)), to_int(mul(x[r][2], high)),
                                       to_int(mul(x[r][3], high)));
      _mm512_storeu_si512(out.codes + r * out.stride, codes);
      sum[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, codes);
    }
    __m512i quarters;
    if constexpr (R == 4) quarters = join_quarters(sum[0], sum[1], sum[2], sum[3], join_sums);
    else quarters = join_sums(_mm512_shuffle_i32x4(sum[0], sum[1], 0x88), _mm512_shuffle_i32x4(sum[0], sum[1], 0xdd));
    _mm_store_si128(reinterpret_cast<__m128i*>(sums), join_lanes(quarters, join_sums));
  }

  inline void store_groups(const CodeRows& out) const {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      std::memcpy(out.scales + r * out.group_stride, scales + r * kGroups, kGroups * 4);
      std::memcpy(out.sums + r * out.group_stride, sums + r * kGroups, kGroups * 4);
    }
  }
};

#endif

// load(r, column) yields the vector at that column of row r. Rows hold 64 floats; kGroup is 32 or 64.
template <int kGroup, class Load> static inline void quantise_rows(int rows, const CodeRows& out, Load load) {
  int row = 0;
#if defined(__AVX512VNNI__)
  constexpr int R = kGroup / 16;
  for (; row + R <= rows; row += R) {
    Vf x[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) x[r][v] = load(row + r, v * kLanes);
    const CodeRows at = out.from(row);
    FourGroups<R> four;
    four.measure(x);
    four.store_codes(x, at);
    four.store_groups(at);
  }
#endif
  for (; row < rows; ++row) {
    const CodeRows at = out.from(row);
    quantise_one_row<kGroup>(at.codes, at.scales, at.sums, [&](int column) { return load(row, column); });
  }
}

}  // namespace noria::NORIA_ISA
