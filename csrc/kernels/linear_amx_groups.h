// Products of int8 and int4 weights in groups by AMX tiles. Two groups of a panel at a time are unpacked into B tiles of
// signed bytes, which all rows use while they are in the nearest cache. What tiles cannot do is the conversion of each
// group's sums to float32: there the vector units work on some rows while the tiles work on the next ones. Sums are exact
// and conversions are those of the tiles of few rows (add_group in linear_products.cpp), in the same order, so that the
// results are the same.
#pragma once
#include <utility>

#include "kernels/linear_amx.h"

#if defined(__AMX_TILE__)

namespace noria::NORIA_ISA {

static constexpr int kPanelVectors = kPanel / kLanes;
static constexpr int kGroupedRows = 64;   // of a call, at most
static constexpr int kTileSums = kTileRows * kLanes;
static constexpr int kUnitTiles = 2 * kPanelVectors;  // of sums: two groups times a panel

// Beside tiles, the vector units do one multiplication or conversion a cycle, but two additions. So sums begin with the
// bits of 1.5 * 2^23, where a sum below 2^22 makes a float of its own value more: a subtraction then converts it, just as
// exactly.
static constexpr int32_t kSumBits = 0x4b400000;
static constexpr float kSumStart = 12582912.0f;
static constexpr int64_t kMostQuickSum = int64_t{1} << 22;

struct alignas(64) AmxSumTile {
  int32_t sums[kTileSums];
  constexpr AmxSumTile() : sums() {
    for (int32_t& sum : sums) sum = kSumBits;
  }
};
static constexpr AmxSumTile kAmxSums;

// How groups are cut into products: `width` bytes of each row at a time.
struct AmxGroups {
  int64_t groups, width, products;  // products: of a group, the last one excepted
  int64_t last_products, tile_bytes;
  explicit AmxGroups(const ProductTile& tile, int64_t step_products) {
    const int64_t group = tile.group_steps * step_products, k = tile.steps * step_products;
    groups = tile.groups;
    width = groups == 1 || group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 0;
    if (width == 0) return;
    last_products = (k - (groups - 1) * group + width - 1) / width;
    products = groups == 1 ? last_products : (group + width - 1) / width;
    tile_bytes = width * kLanes;
  }
  int64_t of_group(int64_t g) const { return g + 1 < groups ? products : last_products; }
  int64_t vector_bytes() const { return products * tile_bytes; }  // B tiles of a group and 16 outputs
  int64_t unit_bytes() const { return kUnitTiles * vector_bytes(); }
};

// Scales and minimums of two groups.
struct AmxPair {
  float scales[2 * kPanel], minimums[2 * kPanel];
};

// What a call works in. After it come B tiles of two groups, [2][4 vectors][products][width / 4][64 bytes], and with
// minimums the rows' sums times scales, [rows][groups].
struct alignas(64) AmxRoom {
  int32_t sums[2][kUnitTiles * kTileSums];
  AmxPair pairs[3];  // of the products under way and of the two conversions
  char* tiles() { return reinterpret_cast<char*>(this + 1); }
};

template <bool kInt4> static int64_t amx_room_bytes(const ProductTile& tile) {
  const AmxGroups shape(tile, kInt4 ? 8 : 4);
  if (!shape.width) return 0;
  const int64_t x_sums = tile.minimums ? kGroupedRows * tile.groups * 4 : 0;
  return static_cast<int64_t>(sizeof(AmxRoom)) + shape.unit_bytes() + x_sums;
}

static inline void store_units(char* p, Vi v) { store(reinterpret_cast<float*>(p), as_float(v)); }

// How far ahead of their use weights are asked for: panels lie one after the other.
static constexpr int64_t kAmxAhead = 8 << 10, kAmxGroupsAhead = 8;

// Lines to ask for, evenly over the steps of the units that two groups make: many at once would keep others waiting.
struct AmxAsked {
  const char* at = nullptr;
  int lines = 0;  // of a step
  void ask() {
    for (int i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Step i of a panel → its rows of the four vectors' B tiles, which are `apart` bytes apart. Null: zeros. middle: the int4
// code of zero, in every byte.
template <bool kInt4>
static inline __attribute__((always_inline)) void amx_unpack_step(const char* panel, int64_t i, char* to, int64_t apart, Vi middle) {
  const int64_t chunk = i / kChunkSteps;
  const char* step = panel + (kInt4 ? i * kStepBytes : chunk * kChunkBytes + i % kChunkSteps * 64);
  const Vi bias = set1_int(static_cast<int>(0x80808080u));
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v, to += apart) {
    const char* at = step + (kInt4 ? v * 64 : tile_offset(chunk, v));
    const Vi unit = panel ? load_units(at) : set1_int(0);
    if (kInt4) {
      store_units(to, panel ? _mm512_sub_epi8(low_nibbles(unit), middle) : unit);
      store_units(to + 64, panel ? _mm512_sub_epi8(high_nibbles(unit), middle) : unit);
    } else {
      store_units(to, panel ? _mm512_xor_si512(unit, bias) : unit);
    }
  }
}

template <bool kInt4> static inline void amx_unpack(const ProductTile& tile, const AmxGroups& shape, int64_t g, char* to) {
  constexpr int64_t kBytes = kInt4 ? 128 : 64;
  const Vi middle = set1_int(kInt4 && !tile.minimums ? 0x01010101 * kMiddleCode : 0);
  const int64_t begin = g * tile.group_steps, apart = shape.vector_bytes();
  const int64_t there = begin + tile.group_steps < tile.steps ? tile.group_steps : tile.steps - begin;
  const int64_t room = shape.of_group(g) * shape.tile_bytes / kBytes;  // steps, of which the last may be missing
  for (int64_t i = 0; i < there; ++i, to += kBytes) amx_unpack_step<kInt4>(tile.panel, begin + i, to, apart, middle);
  for (int64_t i = there; i < room; ++i, to += kBytes) amx_unpack_step<kInt4>(nullptr, 0, to, apart, middle);
}

// Scales or minimums of a group's 64 outputs.
static inline void amx_widen(const ProductTile& tile, const char* packed, int64_t g, float* to) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kPanel; i += kLanes) {
    const int64_t at = g * kPanel + i;
    store(to + i, tile.half_scales ? load_half(reinterpret_cast<const uint16_t*>(packed) + at)
                                   : load(reinterpret_cast<const float*>(packed) + at));
  }
  const char* ahead = packed + (g + kAmxGroupsAhead) * kPanel * (tile.half_scales ? 2 : 4);
  for (int64_t i = 0; i < kPanel * (tile.half_scales ? 2 : 4); i += 64) __builtin_prefetch(ahead + i, 0, 2);
}

// Groups g and, if there is one, g + 1.
template <bool kInt4, bool kMinimums>
static inline void amx_prepare(const ProductTile& tile, const AmxGroups& shape, int64_t g, char* tiles, AmxPair& pair) {
  for (int i = 0; i < 2 && g + i < tile.groups; ++i) {
    amx_unpack<kInt4>(tile, shape, g + i, tiles + i * kPanelVectors * shape.vector_bytes());
    amx_widen(tile, tile.scales, g + i, pair.scales + i * kPanel);
    if (kMinimums) amx_widen(tile, tile.minimums, g + i, pair.minimums + i * kPanel);
  }
}

// Sums of the rows' groups times their scales.
static inline void amx_scale_sums(const ProductTile& tile, float* to) {
  const int64_t count = tile.rows * tile.groups;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    const Vi sums = as_int(load_partial(reinterpret_cast<const float*>(tile.x_sums) + i, n));
    store_partial(to + i, mul(load_partial(tile.x_scales + i, n), to_float(sums)), n);
  }
}

// Up to 16 rows times two groups. Its eight tiles of sums are the first group's four vectors', then the second's.
struct AmxUnit {
  const char* x = nullptr;
  const AmxPair* pair = nullptr;
  const float *x_scales = nullptr, *x_sums = nullptr;  // x_sums: times scales
  float* out = nullptr;
  int32_t* sums = nullptr;
  int first = 0, rows = 0;  // to be converted; none: no unit
  bool two = false;         // groups
  int64_t products[2] = {};
};

// The assembly line: each step multiplies one tile of sums of a unit, stores the one three before, and converts two rows of
// the unit before that.
template <bool kMinimums, bool kQuick> struct AmxLine {
  const AmxGroups& shape;
  int64_t x_stride;
  const char* weights;  // B tiles
  struct Scales {
    Vf of[kUnitTiles], minimums[kUnitTiles];
  };

  template <int j> inline __attribute__((always_inline)) void multiply(const AmxUnit& unit) const {
    constexpr int c = j % 4, a = 4 + j / 4, b = 6 + j % 2;
    if (kQuick) tile_load<c>(kAmxSums.sums, 64);
    else tile_zero<c>();
    const char* left = unit.x + j / 4 * shape.products * shape.width;
    const char* right = weights + j * shape.vector_bytes();
    if (kQuick) {
      if (c == 0) tile_load<a>(left, x_stride);  // the group's four vectors share it
      tile_load<b>(right, 64);
      tile_dot_ss<c, a, b>();
      return;
    }
    for (int64_t p = unit.products[j / 4]; p > 0; --p, left += shape.width, right += shape.tile_bytes) {
      tile_load<a>(left, x_stride);
      tile_load<b>(right, 64);
      tile_dot_ss<c, a, b>();
    }
  }

  template <int g>
  static inline __attribute__((always_inline)) void add_group(const AmxUnit& unit, int r, Vf x_scale, const float* x_sum,
                                                              const Scales& scales, Vf (&total)[kPanelVectors]) {
    const Vf sum_of_x = kMinimums ? set1(x_sum[g]) : zero();
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      constexpr int first = g * kPanelVectors;
      const Vi sum = load_units(unit.sums + (first + v) * kTileSums + r * kLanes);
      const Vf value = kQuick ? sub(as_float(sum), set1(kSumStart)) : to_float(sum);
      total[v] = fma(value, mul(x_scale, scales.of[first + v]), total[v]);
      if (kMinimums) total[v] = fma(scales.minimums[first + v], sum_of_x, total[v]);
    }
  }

  inline __attribute__((always_inline)) void convert(const AmxUnit& unit, int r, const Scales& scales) const {
    if (r < unit.first || r >= unit.rows) return;
    const float *x_scale = unit.x_scales + r * shape.groups, *x_sum = kMinimums ? unit.x_sums + r * shape.groups : nullptr;
    float* out = unit.out + r * kPanel;
    Vf total[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) total[v] = load(out + v * kLanes);
    add_group<0>(unit, r, set1(x_scale[0]), x_sum, scales, total);
    if (unit.two) add_group<1>(unit, r, set1(x_scale[1]), x_sum, scales, total);
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) store(out + v * kLanes, total[v]);
  }

  template <int j>
  inline __attribute__((always_inline)) void step(const AmxUnit& unit, const AmxUnit& last, const AmxUnit& before,
                                                  Scales& scales) const {
    constexpr int done = (j + 5) % 8, c = done % 4;  // done: the tile that is stored
    if (done < j ? unit.rows && (done < 4 || unit.two) : last.two)
      tile_store<c>((done < j ? unit : last).sums + done * kTileSums, 64);
    if (unit.rows && (j < 4 || unit.two)) multiply<j>(unit);
    if (done == 0 && last.rows) {
#pragma GCC unroll 8
      for (int i = 0; i < kUnitTiles; ++i) {
        scales.of[i] = load(last.pair->scales + i * kLanes);
        if (kMinimums) scales.minimums[i] = load(last.pair->minimums + i * kLanes);
      }
    }
    convert(done < j ? last : before, 2 * done, scales);
    convert(done < j ? last : before, 2 * done + 1, scales);
  }

  template <int... j>
  inline __attribute__((always_inline)) void steps(std::integer_sequence<int, j...>, const AmxUnit& unit, const AmxUnit& last,
                                                   const AmxUnit& before, Scales& scales, AmxAsked& ahead) const {
    ((step<j>(unit, last, before, scales), ahead.ask()), ...);
  }
};

// Rows in blocks of one height, since shaping tiles anew is dear: the last block begins early enough, and leaves out the
// rows that it shares with the one before.
struct AmxBlocks {
  int rows, count, height;
  explicit AmxBlocks(int rows) : rows(rows), count((rows + kTileRows - 1) / kTileRows), height((rows + count - 1) / count) {}
  int wanted(int block) const { return block * height; }
  int begin(int block) const { return wanted(block) + height > rows ? rows - height : wanted(block); }
};

template <bool kInt4, bool kMinimums, bool kQuick>
static void amx_grouped_rows(const ProductTile& tile, const AmxGroups& shape) {
  using Line = AmxLine<kMinimums, kQuick>;
  AmxRoom& room = *reinterpret_cast<AmxRoom*>(tile.room);
  float* x_sums = reinterpret_cast<float*>(room.tiles() + shape.unit_bytes());
  const AmxBlocks blocks(tile.rows);
  const Line line = {shape, tile.x_stride, room.tiles()};
  typename Line::Scales scales;
  amx_shape(blocks.height, static_cast<int>(shape.width));
  for (int64_t i = 0; i < tile.rows * kPanel; i += kLanes) store(tile.out + i, zero());
  if (kMinimums) amx_scale_sums(tile, x_sums);
#pragma GCC unroll 8
  for (int i = 0; i < kUnitTiles; ++i) scales.of[i] = scales.minimums[i] = zero();
  AmxUnit ring[3];
  const int64_t pair_lines = 2 * tile.group_steps * kStepBytes / 64, pair_steps = blocks.count * kUnitTiles;
  AmxAsked ahead = {tile.panel, static_cast<int>((pair_lines + pair_steps - 1) / pair_steps)};
  AmxUnit *unit = ring, *last = ring + 1, *before = ring + 2;
  const AmxPair* const end = room.pairs + 3;
  AmxPair* pair = room.pairs;
  int32_t *sums = room.sums[0], *other_sums = room.sums[1];
  // Two units of nothing bring the last ones off the line.
  for (int64_t g = 0, block = 0, left = 2; left > 0;) {
    unit->rows = 0;
    unit->two = false;
    if (g < shape.groups) {
      if (block == 0) {
        amx_prepare<kInt4, kMinimums>(tile, shape, g, room.tiles(), *pair);
        ahead.at = tile.panel + g * tile.group_steps * kStepBytes + kAmxAhead;
      }
      const int wanted = blocks.wanted(static_cast<int>(block)), begin = blocks.begin(static_cast<int>(block));
      unit->x = tile.x + begin * tile.x_stride + g * shape.products * shape.width;
      unit->pair = pair;
      unit->x_scales = tile.x_scales + begin * tile.groups + g;
      unit->x_sums = x_sums + begin * tile.groups + g;
      unit->out = tile.out + begin * kPanel;
      unit->sums = sums;
      unit->first = wanted - begin;
      unit->rows = blocks.height;
      unit->two = g + 1 < shape.groups;
      unit->products[0] = shape.of_group(g);
      unit->products[1] = shape.of_group(g + 1);
      if (++block == blocks.count) {
        block = 0;
        g += 2;
        if (++pair == end) pair = room.pairs;
      }
    } else {
      --left;
    }
    line.steps(std::make_integer_sequence<int, kUnitTiles>(), *unit, *last, *before, scales, ahead);
    AmxUnit* free = before;
    before = last;
    last = unit;
    unit = free;
    int32_t* stored = sums;
    sums = other_sums;
    other_sums = stored;
  }
}

template <bool kInt4> static void amx_grouped(const ProductTile& tile) {
  constexpr int kStepCodes = kInt4 ? 8 : 4, kMostCode = kInt4 ? 15 : 127;
  const AmxGroups shape(tile, kStepCodes);
  const int64_t most = shape.products * shape.width * kMostCode * 127;
  const bool quick = shape.products == 1 && most < kMostQuickSum;
  if (kInt4 && tile.minimums)
    quick ? amx_grouped_rows<kInt4, true, true>(tile, shape) : amx_grouped_rows<kInt4, true, false>(tile, shape);
  else quick ? amx_grouped_rows<kInt4, false, true>(tile, shape) : amx_grouped_rows<kInt4, false, false>(tile, shape);
}

static const ManyRowProducts amx_int8 = {13, kGroupedRows, &amx_room_bytes<false>, &amx_grouped<false>};
static const ManyRowProducts amx_int4 = {10, kGroupedRows, &amx_room_bytes<true>, &amx_grouped<true>};

}  // namespace noria::NORIA_ISA

#endif
