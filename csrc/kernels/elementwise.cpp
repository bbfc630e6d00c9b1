#include "kernels/elementwise.h"

#include "kernels/products_out.h"
#include "kernels/quantise.h"
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

float largest_size(const float* x, int64_t width) {
  Vf a = zero(), b = zero(), c = zero(), d = zero();
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    a = larger_size(load(x + i), a);
    b = larger_size(load(x + i + kLanes), b);
    c = larger_size(load(x + i + 2 * kLanes), c);
    d = larger_size(load(x + i + 3 * kLanes), d);
  }
  for_lanes(width - i, [&](int64_t j, int n) { a = larger_size(load_n(x + i + j, n), a); });
  return reduce_max(max(max(a, b), max(c, d)));
}

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

// A group of any size.
void quantise_one(const float* x, int64_t width, uint8_t* codes, float* scale, int32_t* sum) {
  const Scale found = scale_of(largest_size(x, width));
  *scale = found.scale;
  *sum = quantise_group(x, width, found.inverse, codes);
}

// The first `width` floats, whole rows of 64, in groups of 32 or 64; load(column) yields a vector of them.
template <class Load> void quantise_whole(int64_t width, const RowTarget& target, Load load) {
  CodeRows out;
  out.codes = static_cast<uint8_t*>(target.data);
  out.stride = kCodeRow;
  out.scales = target.scales;
  out.sums = target.sums;
  out.group_stride = kCodeRow / target.spec.group;
  const int rows = static_cast<int>(width / kCodeRow);
  const auto at = [&](int row, int column) { return load(row * kCodeRow + column); };
  if (target.spec.group == 32) quantise_rows<32>(rows, out, at);
  else quantise_rows<64>(rows, out, at);
}

void quantise_row(const float* x, int64_t width, const RowTarget& target) {
  auto* codes = static_cast<uint8_t*>(target.data);
  const int64_t group = target.spec.group;
  int64_t start = 0;
  if (quantises_rows(target.spec.group)) {
    start = width / kCodeRow * kCodeRow;
    quantise_whole(start, target, [&](int64_t column) { return load(x + column); });
  }
  for (int64_t g = start / group; start < width; start += group, ++g) {
    const int64_t count = width - start < group ? width - start : group;
    quantise_one(x + start, count, codes + start, target.scales + g, target.sums + g);
  }
  std::memset(codes + width, 0, static_cast<size_t>(target.spec.padded() - width));
}

// Two bytes per value (Format::s16), one scale per row, whose largest size is known.
#if defined(__AVX512VNNI__)
void quantise_wide_row(const float* x, int64_t width, float largest, const RowTarget& target) {
  auto* high = static_cast<uint8_t*>(target.data);
  uint8_t* low = high + target.spec.stride();
  const Scale scale = wide_scale_of(largest);
  const Vf factor = set1(scale.inverse);
  Vi high_sum = set1_int(0), low_sum = set1_int(0);
  for (int64_t i = 0; i < width; i += kCodeRow) {
    Vi code[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const int64_t at = i + v * kLanes, left = width - at;
      code[v] = to_int(mul(left >= kLanes ? load(x + at) : left > 0 ? load_partial(x + at, static_cast<int>(left)) : zero(), factor));
    }
    const WideCodes codes = wide_codes(code[0], code[1], code[2], code[3]);
    _mm512_storeu_si512(high + i, codes.high);
    _mm512_storeu_si512(low + i, codes.low);
    add_bytes(high_sum, codes.high);
    add_bytes(low_sum, codes.low);
  }
  target.scales[0] = scale.scale;
  target.sums[0] = reduce_add_int(high_sum);
  target.sums[1] = reduce_add_int(low_sum);
}
#else
void quantise_wide_row(const float* x, int64_t width, float largest, const RowTarget& target) {
  auto* high = static_cast<uint8_t*>(target.data);
  uint8_t* low = high + target.spec.stride();
  const Scale scale = wide_scale_of(largest);
  const Vf factor = set1(scale.inverse), per_digit = set1(1.0f / kDigit), digit = set1(-kDigit);
  Vi high_sum = set1_int(0), low_sum = set1_int(0);
  for_lanes(width, [&](int64_t i, int n) {
    const Vf code = round_even(mul(load_n(x + i, n), factor));
    // Where code / 254 lies half-way, low is 127 or -127, whichever way it is rounded.
    const Vf upper = round_even(mul(code, per_digit));
    const Vi h = to_int(upper), l = to_int(fma(upper, digit, code));
    high_sum = add_int(high_sum, h);
    low_sum = add_int(low_sum, l);
    n == kLanes ? store_low8(high + i, h) : store_low8_partial(high + i, h, n);
    n == kLanes ? store_low8(low + i, l) : store_low8_partial(low + i, l, n);
  });
  target.scales[0] = scale.scale;
  target.sums[0] = reduce_add_int(high_sum);
  target.sums[1] = reduce_add_int(low_sum);
  const auto padding = static_cast<size_t>(target.spec.padded() - width);
  std::memset(high + width, 0, padding);
  std::memset(low + width, 0, padding);
}
#endif

void copy_row(const float* x, int64_t width, const RowTarget& target) {
  auto* out = static_cast<float*>(target.data);
  std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
  std::memset(out + width, 0, static_cast<size_t>(target.spec.padded() - width) * sizeof(float));
}

void round_row(const float* x, int64_t width, const RowTarget& target) {
  auto* out = static_cast<uint16_t*>(target.data);
  for_lanes(width, [&](int64_t i, int n) {
    n == kLanes ? store_bf16(out + i, load(x + i)) : store_bf16_partial(out + i, load_partial(x + i, n), n);
  });
  std::memset(out + width, 0, static_cast<size_t>(target.spec.padded() - width) * sizeof(uint16_t));
}

RowTarget target_of_row(const RowTarget& target, int64_t row) {
  RowTarget at = target;
  at.data = static_cast<char*>(target.data) + row * target.row_bytes;
  at.scales += row * target.spec.groups();
  at.sums += row * target.spec.sums();
  return at;
}

// `size`: the row's largest.
void convert_row(const float* x, int64_t width, float size, const RowTarget& target) {
  switch (target.spec.format) {
    case Format::f32: copy_row(x, width, target); break;
    case Format::bf16: round_row(x, width, target); break;
    case Format::s8: quantise_row(x, width, target); break;
    case Format::s16: quantise_wide_row(x, width, size, target); break;
  }
}

void convert_rows(const float* x, int64_t rows, int64_t width, const RowTarget* targets, int count) {
  bool sized = false;
  for (int t = 0; t < count; ++t) sized = sized || targets[t].spec.format == Format::s16;
  for (int64_t first = 0; first < rows; first += kNormRows) {
    const int64_t end = rows - first < kNormRows ? rows : first + kNormRows;
    float sizes[kNormRows] = {};
    for (int64_t row = first; sized && row < end; ++row) sizes[row - first] = largest_size(x + row * width, width);
    for (int64_t row = first; row < end; ++row)
      for (int t = 0; t < count; ++t) convert_row(x + row * width, width, sizes[row - first], target_of_row(targets[t], row));
  }
}

// A norm of one row, yielded a vector at a time.
struct NormedRow {
  const float *x, *weight, *residual;
  Vf factor;
  inline Vf whole(int64_t i) const {
    const Vf normed = mul(mul(load(x + i), factor), load(weight + i));
    return residual ? add(normed, load(residual + i)) : normed;
  }
  inline Vf part(int64_t i, int n) const {
    const Vf normed = mul(mul(load_partial(x + i, n), factor), load_partial(weight + i, n));
    return residual ? add(normed, load_partial(residual + i, n)) : normed;
  }
};

// The row's only form, straight from the registers. False if that form needs the whole row first.
bool norm_into(const NormedRow& row, int64_t width, const RowTarget& target) {
  if (width % kCodeRow) return false;
  if (target.spec.format == Format::bf16) {
    auto* out = static_cast<uint16_t*>(target.data);
    for (int64_t i = 0; i < width; i += kLanes) store_bf16(out + i, row.whole(i));
    return true;
  }
  if (target.spec.format != Format::s8 || !quantises_rows(target.spec.group)) return false;
  quantise_whole(width, target, [&](int64_t column) { return row.whole(column); });
  return true;
}

// Writes a row's norm and returns its largest size.
float norm_floats(const NormedRow& row, int64_t width, float* out) {
  Vf a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    const Vf p = row.whole(i), q = row.whole(i + kLanes);
    store(out + i, p);
    store(out + i + kLanes, q);
    a = larger_size(p, a);
    b = larger_size(q, b);
  }
  for_lanes(width - i, [&](int64_t j, int n) {
    const Vf v = n == kLanes ? row.whole(i + j) : row.part(i + j, n);
    store_n(out + i + j, v, n);
    a = larger_size(v, a);
  });
  return reduce_max(max(a, b));
}

// A few rows, each stage for all of them before the next: what one row's stage yields at its end, the next waits for.
void norm_some(const NormArgs& args, int64_t first, int rows, const RowTarget* targets, int count) {
  const int64_t width = args.width;
  NormedRow row[kNormRows];
  for (int r = 0; r < rows; ++r) {
    const int64_t at = (first + r) * width;
    const float mean = sum_of_squares(args.x + at, width) / static_cast<float>(width);
    row[r] = {args.x + at, args.weight, args.residual ? args.residual + at : nullptr,
              set1(1.0f / __builtin_sqrtf(mean + args.eps))};
  }
  float sizes[kNormRows];
  bool done[kNormRows];
  // The rows stay in the nearest cache between their norms and their conversions.
  const auto floats = [&](int r) { return args.out ? args.out + (first + r) * width : args.scratch + r * width; };
  for (int r = 0; r < rows; ++r) {
    done[r] = !args.out && count == 1 && norm_into(row[r], width, target_of_row(targets[0], first + r));
    if (!done[r]) sizes[r] = norm_floats(row[r], width, floats(r));
  }
  for (int r = 0; r < rows; ++r) {
    if (done[r]) continue;
    for (int t = 0; t < count; ++t) convert_row(floats(r), width, sizes[r], target_of_row(targets[t], first + r));
  }
}

void norm_rows(const NormArgs& args, int64_t rows, const RowTarget* targets, int count) {
  for (int64_t first = 0; first < rows; first += kNormRows)
    norm_some(args, first, static_cast<int>(rows - first < kNormRows ? rows - first : kNormRows), targets, count);
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
const ElementwiseKernels elementwise_kernels = {convert_rows,  norm_rows,      gated_tile, largest_tile,
                                                embed_row_f32, embed_row_bf16, evaluate};

}  // namespace noria::NORIA_ISA
