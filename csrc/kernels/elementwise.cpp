#include "kernels/elementwise.h"

#include "kernels/simd.h"

namespace noria::NORIA_ISA {

namespace {

// Runs body(i, n) over [0, width) in steps of whole vectors, n being kLanes but for the last.
template <class F> inline void for_lanes(int64_t width, F body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, static_cast<int>(width - i));
}

inline Vf load_n(const float* p, int n) { return n == kLanes ? load(p) : load_partial(p, n); }
inline void store_n(float* p, Vf v, int n) { n == kLanes ? store(p, v) : store_partial(p, v, n); }

// Four running sums, so that the additions do not wait for each other; combined in a fixed order.
float sum_of_squares(const float* x, int64_t width) {
  Vf a = zero(), b = zero(), c = zero(), d = zero();
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    const Vf p = load(x + i), q = load(x + i + kLanes), r = load(x + i + 2 * kLanes), s = load(x + i + 3 * kLanes);
    a = fma(p, p, a);
    b = fma(q, q, b);
    c = fma(r, r, c);
    d = fma(s, s, d);
  }
  for_lanes(width - i, [&](int64_t j, int n) {
    const Vf v = load_n(x + i + j, n);
    a = fma(v, v, a);
  });
  return reduce_add(add(add(a, b), add(c, d)));
}

void norm_row(const float* x, const float* weight, float eps, const float* residual, int64_t width, float* out) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const Vf factor = set1(1.0f / __builtin_sqrtf(mean + eps));
  for_lanes(width, [&](int64_t i, int n) {
    const Vf normed = mul(mul(load_n(x + i, n), factor), load_n(weight + i, n));
    store_n(out + i, residual ? add(normed, load_n(residual + i, n)) : normed, n);
  });
}

float largest_size(const float* x, int64_t width) {
  Vf a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    a = max(abs(load(x + i)), a);
    b = max(abs(load(x + i + kLanes)), b);
  }
  for_lanes(width - i, [&](int64_t j, int n) { a = max(abs(load_n(x + i + j, n)), a); });
  return reduce_max(max(a, b));
}

// Below this a group counts as zero: 127 / max|x| would leave float32.
constexpr float kSmallest = 3.8e-37f;

// Codes of one group; returns their sum.
int32_t quantise_group(const float* x, int64_t width, float inverse, uint8_t* codes) {
  const Vf factor = set1(inverse);
  Vi sum = set1_int(0);
  for_lanes(width, [&](int64_t i, int n) {
    const Vi code = to_int(mul(load_n(x + i, n), factor));
    sum = add_int(sum, code);
    n == kLanes ? store_low8(codes + i, code) : store_low8_partial(codes + i, code, n);
  });
  return reduce_add_int(sum);
}

void quantise_row(const float* x, int64_t width, const RowTarget& target) {
  auto* codes = static_cast<uint8_t*>(target.data);
  const int64_t group = target.spec.group;
  for (int64_t start = 0, g = 0; start < width; start += group, ++g) {
    const int64_t count = width - start < group ? width - start : group;
    const float largest = largest_size(x + start, count);
    const bool empty = largest < kSmallest;
    target.scales[g] = empty ? 0.0f : largest / 127.0f;
    target.sums[g] = quantise_group(x + start, count, empty ? 0.0f : 127.0f / largest, codes + start);
  }
  std::memset(codes + width, 0, static_cast<size_t>(target.spec.stride() - width));
}

void copy_row(const float* x, int64_t width, const RowTarget& target) {
  auto* out = static_cast<float*>(target.data);
  std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
  std::memset(out + width, 0, static_cast<size_t>(target.spec.stride() - width) * sizeof(float));
}

void round_row(const float* x, int64_t width, const RowTarget& target) {
  auto* out = static_cast<uint16_t*>(target.data);
  for_lanes(width, [&](int64_t i, int n) {
    n == kLanes ? store_bf16(out + i, load(x + i)) : store_bf16_partial(out + i, load_partial(x + i, n), n);
  });
  std::memset(out + width, 0, static_cast<size_t>(target.spec.stride() - width) * sizeof(uint16_t));
}

void convert_row(const float* x, int64_t width, const RowTarget* targets, int count) {
  for (int t = 0; t < count; ++t) {
    switch (targets[t].spec.format) {
      case Format::f32: copy_row(x, width, targets[t]); break;
      case Format::bf16: round_row(x, width, targets[t]); break;
      case Format::s8: quantise_row(x, width, targets[t]); break;
    }
  }
}

void embed_row_f32(const float* row, float scale, int64_t width, float* out) {
  const Vf factor = set1(scale);
  for_lanes(width, [&](int64_t i, int n) { store_n(out + i, mul(load_n(row + i, n), factor), n); });
}

void embed_row_bf16(const uint16_t* row, float scale, int64_t width, float* out) {
  const Vf factor = set1(scale);
  for_lanes(width, [&](int64_t i, int n) {
    const Vf value = n == kLanes ? load_bf16(row + i) : load_bf16_partial(row + i, n);
    store_n(out + i, mul(value, factor), n);
  });
}

Vf apply(Function function, Vf x) {
  switch (function) {
    case Function::exp: return exp(x);
    case Function::sigmoid: return sigmoid(x);
    case Function::tanh: return tanh(x);
    case Function::silu: return silu(x);
    default: return gelu_tanh(x);
  }
}

void evaluate(Function function, const float* x, int64_t count, float* out) {
  for_lanes(count, [&](int64_t i, int n) { store_n(out + i, apply(function, load_n(x + i, n)), n); });
}

}  // namespace

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {convert_row,    norm_row, embed_row_f32,
                                                embed_row_bf16, evaluate};

}  // namespace noria::NORIA_ISA
