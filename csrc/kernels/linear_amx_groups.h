// Products of int8 and int4 weights in groups by AMX tiles, for many rows: a panel is first unpacked into B tiles of signed
// bytes. What tiles cannot do is the conversion of each group's sums to float32: there the vector units work on one group while
// the tiles work on those after it. Sums are exact and conversions are those of the tiles of few rows (add_group in
// linear_products.cpp), in the same order, so that the results are the same.
#pragma once
#include <vector>

#include "kernels/linear_amx.h"

#if defined(__AMX_TILE__)

namespace noria::NORIA_ISA {

static constexpr int kPanelVectors = kPanel / kLanes;
static constexpr int kAmxLead = 3;  // groups that the tiles are ahead of the conversions

// Beside tiles, the vector units do one multiplication or conversion a cycle, but two additions. So sums begin with the bits of
// 1.5 * 2^23, where a sum below 2^22 makes a float of its own value more: a subtraction then converts it, just as exactly.
static constexpr int32_t kSumBits = 0x4b400000;
static constexpr float kSumStart = 12582912.0f;
static constexpr int64_t kMostQuickSum = int64_t{1} << 22;

struct alignas(64) AmxSumTile {
  int32_t sums[kTileRows * kLanes];
  constexpr AmxSumTile() : sums() {
    for (int32_t& sum : sums) sum = kSumBits;
  }
};
static constexpr AmxSumTile kAmxSums;

// How groups are cut into products: `width` bytes of each row at a time. An unpacked panel is, for each vector of 16 outputs
// and each product in ascending order, a B tile [width / 4][64 bytes]; then scales and minimums [groups][64] as float32.
struct AmxGroups {
  int64_t groups, width, products;         // products: of a group, the last one excepted
  int64_t last_products, vector_products;  // of the last group; of all groups
  int64_t tile_bytes;
  explicit AmxGroups(const ProductTile& tile, int64_t step_products) {
    const int64_t group = tile.group_steps * step_products, k = tile.steps * step_products;
    groups = tile.groups;
    width = groups == 1 || group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 0;
    if (width == 0) return;
    products = (group + width - 1) / width;
    last_products = (k - (groups - 1) * group + width - 1) / width;
    vector_products = (groups - 1) * products + last_products;
    tile_bytes = width * kLanes;
  }
  int64_t of_group(int64_t g) const { return g + 1 < groups ? products : last_products; }
  int64_t float_offset() const { return kPanelVectors * vector_products * tile_bytes; }
};

template <bool kInt4> static int64_t amx_unpacked_bytes(const ProductTile& tile) {
  const AmxGroups shape(tile, kInt4 ? 8 : 4);
  return shape.width ? shape.float_offset() + (tile.minimums ? 2 : 1) * tile.groups * kPanel * 4 : 0;
}

static inline void store_units(char* p, Vi v) { store(reinterpret_cast<float*>(p), as_float(v)); }

// One step of a panel → its rows of the four vectors' B tiles, which are `apart` bytes apart. Null: zeros. middle: the int4 code
// of zero, in every byte.
template <bool kInt4>
static inline __attribute__((always_inline)) void amx_unpack_step(const char* step, char* to, int64_t apart, Vi middle) {
  const Vi bias = set1_int(static_cast<int>(0x80808080u));
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v, to += apart) {
    const Vi unit = step ? load_units(step + v * 64) : set1_int(0);
    if (kInt4) {
      store_units(to, step ? _mm512_sub_epi8(low_nibbles(unit), middle) : unit);
      store_units(to + 64, step ? _mm512_sub_epi8(high_nibbles(unit), middle) : unit);
    } else {
      store_units(to, step ? _mm512_xor_si512(unit, bias) : unit);
    }
  }
}

template <bool kInt4> static void amx_unpack(const ProductTile& tile, char* memory) {
  const AmxGroups shape(tile, kInt4 ? 8 : 4);
  const int64_t apart = shape.vector_products * shape.tile_bytes, step_bytes = kInt4 ? 128 : 64;
  const Vi middle = set1_int(kInt4 && !tile.minimums ? 0x01010101 * kMiddleCode : 0);
  char* to = memory;
  for (int64_t g = 0; g < tile.groups; ++g) {
    const int64_t begin = g * tile.group_steps;
    const int64_t there = begin + tile.group_steps < tile.steps ? tile.group_steps : tile.steps - begin;
    const int64_t room = shape.of_group(g) * shape.tile_bytes / step_bytes;  // steps, of which the last may be missing
    const char* step = tile.panel + begin * kStepBytes;
    for (int64_t i = 0; i < there; ++i, step += kStepBytes, to += step_bytes) amx_unpack_step<kInt4>(step, to, apart, middle);
    for (int64_t i = there; i < room; ++i, to += step_bytes) amx_unpack_step<kInt4>(nullptr, to, apart, middle);
  }
  float* floats = reinterpret_cast<float*>(memory + shape.float_offset());
  for (const char* packed : {tile.scales, tile.minimums}) {
    if (!packed) continue;
    for (int64_t i = 0; i < tile.groups * kPanel; i += kLanes, floats += kLanes)
      store(floats, tile.half_scales ? load_half(reinterpret_cast<const uint16_t*>(packed) + i)
                                     : load(reinterpret_cast<const float*>(packed) + i));
  }
}

// What conversions need of 16 rows: scales of theirs and (with minimums) scale times sum, [16][groups]. Of fewer rows, copies.
struct AmxRowScales {
  const float *scales, *sums;
};

template <bool kMinimums> static AmxRowScales amx_row_scales(const ProductTile& tile) {
  static thread_local std::vector<float> memory;
  const int64_t count = tile.rows * tile.groups, room = kTileRows * tile.groups + kLanes;
  if (static_cast<int64_t>(memory.size()) < 2 * room) memory.assign(static_cast<size_t>(2 * room), 0.0f);
  AmxRowScales rows = {tile.x_scales, memory.data() + room};
  if (tile.rows < kTileRows) {
    std::memcpy(memory.data(), tile.x_scales, static_cast<size_t>(count) * 4);
    rows.scales = memory.data();
  }
  if (!kMinimums) return rows;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    const Vi sums = as_int(load_partial(reinterpret_cast<const float*>(tile.x_sums) + i, n));
    store_partial(memory.data() + room + i, mul(load_partial(tile.x_scales + i, n), to_float(sums)), n);
  }
  return rows;
}

// 1–16 rows times one vector of outputs. The totals are no member: they would be kept in memory, which the tile instructions
// may read for all that the compiler knows.
template <bool kMinimums, bool kQuick> struct AmxVector {
  const char* x;             // [rows][x_stride]
  int64_t x_stride;
  const char* weights;       // B tiles of the vector
  const float* scales;       // [groups][64], from the vector's first output on
  const float* minimums;
  AmxRowScales rows;
  const AmxGroups& shape;
  int32_t* sums;             // [4][16][16], of the group in tile 0–3

  template <int c> inline __attribute__((always_inline)) void multiply(int64_t g) const {
    constexpr int a = 4 + c % 2, b = 6 + c % 2;
    const char* left = x + g * shape.products * shape.width;
    const char* right = weights + g * shape.products * shape.tile_bytes;
    if (kQuick) tile_load<c>(kAmxSums.sums, 64);
    else tile_zero<c>();
    for (int64_t p = shape.of_group(g); p > 0; --p, left += shape.width, right += shape.tile_bytes) {
      tile_load<a>(left, x_stride);
      tile_load<b>(right, 64);
      tile_dot_ss<c, a, b>();
    }
  }

  inline __attribute__((always_inline)) void convert(int64_t g, const int32_t* from, Vf (&total)[kTileRows]) const {
    const Vf scale = load(scales + g * kPanel), minimum = kMinimums ? load(minimums + g * kPanel) : zero();
    const float *x_scale = rows.scales + g, *x_sum = rows.sums + g;
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const Vi sum = load_units(from + r * kLanes);
      const Vf value = kQuick ? sub(as_float(sum), set1(kSumStart)) : to_float(sum);
      total[r] = fma(value, mul(set1(x_scale[r * shape.groups]), scale), total[r]);
      if (kMinimums) total[r] = fma(minimum, set1(x_sum[r * shape.groups]), total[r]);
    }
  }

  template <int c> inline __attribute__((always_inline)) bool turn(int64_t g, Vf (&total)[kTileRows]) const {
    if (g >= shape.groups) return false;
    if (g + kAmxLead < shape.groups) multiply<(c + kAmxLead) % 4>(g + kAmxLead);
    tile_store<c>(sums + c * kTileRows * kLanes, 64);
    convert(g, sums + c * kTileRows * kLanes, total);
    return true;
  }

  inline __attribute__((always_inline)) void run(float* out, int count) const {
    Vf total[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) total[r] = zero();
    multiply<0>(0);
    if (shape.groups > 1) multiply<1>(1);
    if (shape.groups > 2) multiply<2>(2);
    for (int64_t g = 0;
         turn<0>(g, total) && turn<1>(g + 1, total) && turn<2>(g + 2, total) && turn<3>(g + 3, total); g += 4) {
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
      if (r < count) store(out + r * kPanel, total[r]);
  }
};

template <bool kMinimums, bool kQuick> static void amx_grouped_tile(const ProductTile& tile, const AmxGroups& shape) {
  amx_shape(tile.rows, static_cast<int>(shape.width));
  alignas(64) int32_t sums[4 * kTileRows * kLanes];
  const float* scales = reinterpret_cast<const float*>(tile.unpacked + shape.float_offset());
  const AmxRowScales rows = amx_row_scales<kMinimums>(tile);
  Ahead ahead = {tile.ahead, tile.ahead_half, tile.ahead_step};
  for (int v = 0; v < kPanelVectors; ++v) {
    amx_prefetch(ahead, tile.steps / kPanelVectors);
    const char* weights = tile.unpacked + v * shape.vector_products * shape.tile_bytes;
    const float* minimums = scales + tile.groups * kPanel;
    const AmxVector<kMinimums, kQuick> vector = {tile.x, tile.x_stride, weights, scales + v * kLanes, minimums + v * kLanes, rows, shape, sums};
    vector.run(tile.out + v * kLanes, tile.rows);
  }
}

template <bool kInt4> static void amx_grouped(const ProductTile& tile) {
  constexpr int kStepCodes = kInt4 ? 8 : 4, kMostCode = kInt4 ? 15 : 127;
  const AmxGroups shape(tile, kStepCodes);
  const int64_t most = (tile.groups == 1 ? tile.steps : tile.group_steps) * kStepCodes * kMostCode * 127;
  const bool quick = most < kMostQuickSum;
  if (kInt4 && tile.minimums) quick ? amx_grouped_tile<true, true>(tile, shape) : amx_grouped_tile<true, false>(tile, shape);
  else quick ? amx_grouped_tile<false, true>(tile, shape) : amx_grouped_tile<false, false>(tile, shape);
}

static const UnpackedProducts amx_int8 = {24, kTileRows, &amx_unpacked_bytes<false>, &amx_unpack<false>, &amx_grouped<false>};
static const UnpackedProducts amx_int4 = {32, kTileRows, &amx_unpacked_bytes<true>, &amx_unpack<true>, &amx_grouped<true>};

}  // namespace noria::NORIA_ISA

#endif
