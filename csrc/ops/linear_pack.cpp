// Packing: row-major weights into panels of 64 outputs, in steps of 4-byte units (kernels/linear.h).
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/linear.h"
#include "ops/linear.h"

namespace noria {
namespace {

// Sums of so many products of a byte and a code + 128 fit 32 bits.
constexpr int64_t kMostWideProducts = 1 << 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

PackedWeight empty_weight(Scheme scheme, int64_t n, int64_t k, int group) {
  if (n <= 0 || k <= 0) throw std::invalid_argument("a weight needs at least one row and one column");
  PackedWeight w;
  w.scheme = scheme;
  w.n = n;
  w.k = k;
  w.group = group;
  w.groups = group ? ceil_div(k, group) : 0;
  w.data = Buffer(static_cast<size_t>(ceil_div(n, kPanel) * panel_bytes(scheme, k)));
  return w;
}

// Fills every panel. unit(row, step) makes the unit of a step that lies wholly within k; tail(row, step) the others.
// Works through chunks of 16 steps so that both sides stay in the first-level cache.
template <class Unit, class Tail> void fill(PackedWeight& w, uint32_t padding, Unit unit, Tail tail) {
  const int64_t width = step_width(w.scheme), steps = ceil_div(w.k, width), whole = w.k / width;
  const int64_t panel_units = panel_bytes(w.scheme, w.k) / 4, padded = panel_units / kPanel;
  const bool tiled = is_tiled(w.scheme);
  const int64_t apart = tiled ? kChunkTileBytes / kChunkSteps / 4 : kPanel;  // from one step to the next
  uint32_t* out = w.data.as<uint32_t>();
  for (int64_t panel = 0; panel < ceil_div(w.n, kPanel); ++panel, out += panel_units) {
    for (int64_t first = 0; first < padded; first += kChunkSteps) {
      const int64_t last = std::min(first + kChunkSteps, padded);
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t row = panel * kPanel + j, there = row < w.n ? steps : 0;
        const int64_t at = tiled ? tile_offset(first / kChunkSteps, static_cast<int>(j / 16)) / 4 + j % 16 : j;
        uint32_t* to = out + first * kPanel + at;
        for (int64_t step = first; step < last; ++step, to += apart)
          *to = step >= there ? padding : step < whole ? unit(row, step) : tail(row, step);
      }
    }
  }
}

template <class T> uint32_t copy_unit(const T* from, int64_t count) {
  uint32_t unit = 0;
  std::memcpy(&unit, from, sizeof(T) * static_cast<size_t>(count));
  return unit;
}

uint32_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;  // a NaN stays one
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Whether a float16 holds the value exactly, as a normal number or zero (kernels widen these by shift and scale).
bool fits_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t exponent = bits >> 23 & 0xff;
  return (bits & 0x7fffffffu) == 0 || ((bits & 0x1fffu) == 0 && exponent >= 113 && exponent <= 142);
}

uint16_t exact_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  return static_cast<uint16_t>(sign | (size ? (size - (112u << 23)) >> 13 : 0));
}

// [n][groups] → [panels][groups][64], zero where there is no output.
template <class T, class Convert> Buffer pack_scales(const float* scales, int64_t n, int64_t groups, Convert convert) {
  Buffer packed(static_cast<size_t>(ceil_div(n, kPanel) * groups * kPanel) * sizeof(T));
  T* out = packed.as<T>();
  for (int64_t row = 0; row < n; ++row)
    for (int64_t g = 0; g < groups; ++g)
      out[(row / kPanel * groups + g) * kPanel + row % kPanel] = convert(scales[row * groups + g]);
  return packed;
}

// Scales and minimums, as float16 where that loses nothing: files that store them so (Q4_1, Q8_0 …) are read a sixth or
// a tenth faster.
void set_scales(PackedWeight& w, const float* scales, const float* minimums) {
  w.half_scales = std::all_of(scales, scales + w.n * w.groups, fits_half) &&
                  (!minimums || std::all_of(minimums, minimums + w.n * w.groups, fits_half));
  const auto pack = [&](const float* values) {
    if (w.half_scales) return pack_scales<uint16_t>(values, w.n, w.groups, exact_half);
    return pack_scales<float>(values, w.n, w.groups, [](float value) { return value; });
  };
  w.scales = pack(scales);
  if (minimums) w.minimums = pack(minimums);
}

// Whether code 8 stands for zero everywhere, as in Q4_0: the minimums then say nothing new.
bool is_symmetric(const float* scales, const float* minimums, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (minimums[i] != -kMiddleCode * scales[i]) return false;
  return true;
}

int checked_group(int group, int64_t k, int multiple) {
  if (group > 0 && (group % multiple == 0 || group >= k)) return group;
  throw std::invalid_argument("a group of " + std::to_string(group) + " is neither a multiple of " +
                              std::to_string(multiple) + " nor a whole row of " + std::to_string(k));
}

}  // namespace

PackedWeight pack_f32(const float* values, int64_t n, int64_t k) {
  PackedWeight w = empty_weight(Scheme::f32, n, k, 0);
  const auto unit = [=](int64_t row, int64_t step) { return copy_unit(values + row * k + step, 1); };
  fill(w, 0, unit, unit);
  return w;
}

PackedWeight pack_bf16(const uint16_t* values, int64_t n, int64_t k) {
  PackedWeight w = empty_weight(Scheme::bf16, n, k, 0);
  fill(w, 0, [=](int64_t row, int64_t step) { return copy_unit(values + row * k + step * 2, 2); },
       [=](int64_t row, int64_t step) { return copy_unit(values + row * k + step * 2, 1); });
  return w;
}

PackedWeight pack_bf16(const float* values, int64_t n, int64_t k) {
  PackedWeight w = empty_weight(Scheme::bf16, n, k, 0);
  fill(w, 0,
       [=](int64_t row, int64_t step) {
         const float* from = values + row * k + step * 2;
         return round_to_bf16(from[0]) | round_to_bf16(from[1]) << 16;
       },
       [=](int64_t row, int64_t step) { return round_to_bf16(values[row * k + step * 2]); });
  return w;
}

PackedWeight pack_int8(const int8_t* codes, const float* scales, int64_t n, int64_t k, int group, bool wide) {
  if (wide && group < k) throw std::invalid_argument("activations of 16 bits need one scale per row of the weight");
  if (wide && k > kMostWideProducts) throw std::invalid_argument("activations of 16 bits: at most 2^16 products");
  PackedWeight w = empty_weight(Scheme::int8, n, k, checked_group(group, k, 4));
  w.wide = wide;
  constexpr uint32_t bias = 0x80808080u;
  uint32_t lowest = 0;  // bit 7 of a byte is set once a code of -128, stored as 0, was seen
  const auto checked = [&lowest](uint32_t biased) {
    lowest |= (biased - 0x01010101u) & ~biased;  // the lowest zero byte of a word is always found
    return biased;
  };
  fill(w, bias, [&](int64_t row, int64_t step) { return checked(copy_unit(codes + row * k + step * 4, 4) ^ bias); },
       [&](int64_t row, int64_t step) { return checked(copy_unit(codes + row * k + step * 4, k - step * 4) ^ bias); });
  if (lowest & bias) throw std::invalid_argument("an int8 weight has the code -128; codes are -127 to 127");
  set_scales(w, scales, nullptr);
  return w;
}

PackedWeight pack_int4(const uint8_t* codes, const float* scales, const float* minimums, int64_t n, int64_t k, int group) {
  PackedWeight w = empty_weight(Scheme::int4, n, k, checked_group(group, k, 8));
  uint32_t seen = 0;
  const auto join = [&seen](uint32_t low, uint32_t high) {
    seen |= low | high;
    return low | high << 4;
  };
  fill(w, 0,
       [&](int64_t row, int64_t step) {
         const uint8_t* from = codes + row * k + step * 8;
         return join(copy_unit(from, 4), copy_unit(from + 4, 4));
       },
       [&](int64_t row, int64_t step) {
         const uint8_t* from = codes + row * k + step * 8;
         const int64_t left = k - step * 8;
         return join(copy_unit(from, left < 4 ? left : 4), left > 4 ? copy_unit(from + 4, left - 4) : 0);
       });
  if (seen & 0xf0f0f0f0u) throw std::invalid_argument("an int4 weight has a code above 15");
  set_scales(w, scales, is_symmetric(scales, minimums, n * w.groups) ? nullptr : minimums);
  return w;
}

void unpack_row(const PackedWeight& w, int64_t row, uint32_t* to) {
  const int64_t steps = ceil_div(w.k, step_width(w.scheme)), j = row % kPanel;
  const char* panel = w.data.as<char>() + row / kPanel * panel_bytes(w.scheme, w.k);
  const bool tiled = is_tiled(w.scheme);
  const int64_t apart = tiled ? kChunkTileBytes / kChunkSteps / 4 : kPanel;
  for (int64_t first = 0; first < steps; first += kChunkSteps) {
    const auto* from = reinterpret_cast<const uint32_t*>(panel + first * kStepBytes) +
                       (tiled ? tile_offset(first / kChunkSteps, static_cast<int>(j / 16)) / 4 + j % 16 : j);
    const int64_t last = std::min(first + kChunkSteps, steps);
    for (int64_t step = first; step < last; ++step, from += apart) to[step] = *from;
  }
}

ActivationSpec wanted(const PackedWeight& weight) {
  ActivationSpec spec;
  spec.format = weight.scheme == Scheme::f32    ? Format::f32
                : weight.scheme == Scheme::bf16 ? Format::bf16
                : weight.wide                   ? Format::s16
                                                : Format::s8;
  spec.group = weight.group;
  spec.k = weight.k;
  return spec;
}

}  // namespace noria
