// The micro-kernel of all schemes: R rows × V vectors of outputs, whose accumulators stay in registers over all steps.
// A scheme says what a step looks like: how many phases it has (which units to multiply with which activations), and
// how one unit is multiplied.
#pragma once
#include "kernels/linear.h"
#include "kernels/linear_dot.h"

namespace noria::NORIA_ISA {

// The four bytes at p in every lane. The empty assembly keeps the vector in a register; otherwise the broadcast is
// folded into every product as a load of its own, and loads become the limit.
static inline Vi broadcast_unit(const char* p) {
  int32_t unit;
  std::memcpy(&unit, p, 4);
  Vi v = set1_int(unit);
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

struct StepF32 {
  using Accumulator = Vf;
  static constexpr int phases = 1, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return unit; }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x); }
  static void dot(Vf& acc, Vi w, Vi x) { acc = fma(as_float(w), as_float(x), acc); }
};

#ifdef NORIA_DOT_BF16
struct StepBf16 {
  using Accumulator = Vf;
  static constexpr int phases = 1, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return unit; }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x); }
  static void dot(Vf& acc, Vi w, Vi x) { dot_bf16(acc, w, x); }
};
#else
struct StepBf16 {  // widened to float32: first the lower index of each pair, then the higher
  using Accumulator = Vf;
  static constexpr int phases = 2, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return phase ? high_halves(unit) : low_halves(unit); }
  template <int phase> static Vi activation(const char* x) {
    return phase ? high_halves(broadcast_unit(x)) : low_halves(broadcast_unit(x));
  }
  static void dot(Vf& acc, Vi w, Vi x) { acc = fma(as_float(w), as_float(x), acc); }
};
#endif

struct StepInt8 {
  using Accumulator = Vi;
  static constexpr int phases = 1, x_bytes = 4;
  template <int phase> static Vi weight(Vi unit) { return int8_weight(unit); }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x); }
  static void dot(Vi& acc, Vi w, Vi x) { dot_int8(acc, w, x); }
};

struct StepInt4 {
  using Accumulator = Vi;
  static constexpr int phases = 2, x_bytes = 8;
  template <int phase> static Vi weight(Vi unit) { return phase ? high_nibbles(unit) : low_nibbles(unit); }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x + 4 * phase); }
  static void dot(Vi& acc, Vi w, Vi x) { dot_int4(acc, w, x); }
};

template <class Step, int phase, int R, int V>
static inline __attribute__((always_inline)) void phase_of_step(typename Step::Accumulator (&acc)[R][V], const char* w,
                                                                const char* const (&x)[R], int64_t offset) {
  if (R == 1) {
    const Vi activation = Step::template activation<phase>(x[0] + offset);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
      Step::dot(acc[0][v], Step::template weight<phase>(load_units(w + v * kLanes * 4)), activation);
    return;
  }
  Vi units[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) units[v] = Step::template weight<phase>(load_units(w + v * kLanes * 4));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vi activation = Step::template activation<phase>(x[r] + offset);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) Step::dot(acc[r][v], units[v], activation);
  }
}

// Adds steps `first` … `last - 1`. w: the tile's first vector within the panel.
template <class Step, int R, int V>
static inline __attribute__((always_inline)) void add_steps(typename Step::Accumulator (&acc)[R][V], const char* w,
                                                            const char* const (&x)[R], int64_t first, int64_t last) {
  w += first * kStepBytes;
  for (int64_t offset = first * Step::x_bytes; offset < last * Step::x_bytes; offset += Step::x_bytes) {
    phase_of_step<Step, 0>(acc, w, x, offset);
    if (Step::phases == 2) phase_of_step<Step, Step::phases - 1>(acc, w, x, offset);
    w += kStepBytes;
  }
}

}  // namespace noria::NORIA_ISA
