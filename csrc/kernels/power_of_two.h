// The exponential of softmax and sampling, whose arguments are never positive. They work in powers of two: the factor
// log2(e) is part of the scale that is applied anyway.
#pragma once
#include "kernels/simd.h"

namespace noria::NORIA_ISA {

static constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0; 1 for 0; 0 below -125 (so for -inf) and for NaN. Relative error below 2^-22.
static inline Vf power_of_two(Vf x) {
#if defined(__AVX512VNNI__)
  // A minimax polynomial on [-0.5, 0.5]. Half the work of exp(), which must also mind large arguments.
  const Vf n = round_even(x), r = sub(x, n);
  Vf p = fma(set1(1.5353359586e-4f), r, set1(1.3398875888e-3f));
  p = fma(p, r, set1(9.6184373789e-3f));
  p = fma(p, r, set1(5.5503324668e-2f));
  p = fma(p, r, set1(2.4022647913e-1f));
  p = fma(p, r, set1(6.9314720286e-1f));
  p = fma(p, r, set1(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set1(-125.0f), _CMP_GT_OQ), p, n);
#else
  return select_less(set1(-125.0f), x, exp(mul(x, set1(0.693147181f))), zero());
#endif
}

}  // namespace noria::NORIA_ISA
