// Products of a tile, by scheme and number of rows. See linear.h for the layouts.
#include "kernels/linear_tile.h"
#include "kernels/linear_widened.h"
#include "kernels/linear_amx.h"
#include "kernels/linear_amx_groups.h"

namespace noria::NORIA_ISA {

template <int R> static inline void row_pointers(const ProductTile& tile, const char* (&x)[R]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) x[r] = tile.x + r * tile.x_stride;
}

template <class Step, int R, int V> static void float_tile(const ProductTile& tile) {
  const char* x[R];
  row_pointers(tile, x);
  for (int column = 0; column < kPanel; column += V * kLanes) {
    Ahead ahead = Ahead::of<Step>(tile);
    Vf acc[R][V];
#pragma GCC unroll 128
    for (int i = 0; i < R * V; ++i) acc[i / V][i % V] = zero();
    add_steps<Step, R, V>(acc, tile.panel, column, x, 0, tile.steps, ahead);
#pragma GCC unroll 128
    for (int i = 0; i < R * V; ++i) store(tile.out + i / V * kPanel + column + i % V * kLanes, acc[i / V][i % V]);
  }
}

// The group's exact sums become floats here, and are added to those of the groups before; kFirst: there are none.
template <int R, int V, bool kMinimums, bool kFirst>
static inline __attribute__((always_inline)) void add_group(const ProductTile& tile, const Vi (&acc)[R][V], int column,
                                                            int64_t group) {
  alignas(64) float wide[V * kLanes];
  const int64_t index = group * kPanel + column;
  const float* minimums = kMinimums ? group_floats<V>(tile, tile.minimums, index, wide) : nullptr;
  Vf scales[V];
  group_vectors<V>(tile, tile.scales, index, scales);
  const float* x_scales = tile.x_scales + group;
  const int32_t* x_sums = tile.x_sums + group;
  float* out = tile.out + column;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const int64_t at = r * tile.groups;
    const Vf x_scale = set1(x_scales[at]);
    const Vf x_sum = set1(x_scales[at] * static_cast<float>(x_sums[at]));
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      float* into = out + r * kPanel + v * kLanes;
      Vf sum = fma(to_float(acc[r][v]), mul(x_scale, scales[v]), kFirst ? zero() : load(into));
      if (kMinimums) sum = fma(load(minimums + v * kLanes), x_sum, sum);
      store(into, sum);
    }
  }
}

// kOffset: what the stored codes are too large by; sums of products with them start accordingly lower.
template <class Step, int R, int V, int kOffset, bool kMinimums> static void grouped_tile(const ProductTile& tile) {
  const char* x[R];
  row_pointers(tile, x);
  for (int column = 0; column < kPanel; column += V * kLanes) {
    Ahead ahead = Ahead::of<Step>(tile);
    for (int64_t group = 0; group < tile.groups; ++group) {
      const int64_t first = group * tile.group_steps;
      const int64_t last = first + tile.group_steps < tile.steps ? first + tile.group_steps : tile.steps;
      Vi acc[R][V];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vi start = set1_int(kOffset ? -kOffset * tile.x_sums[r * tile.groups + group] : 0);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[r][v] = start;
      }
      add_whole_steps<Step, R, V>(acc, tile.panel, column, x, first, last, ahead);
      if (group == 0) add_group<R, V, kMinimums, true>(tile, acc, column, group);
      else add_group<R, V, kMinimums, false>(tile, acc, column, group);
    }
  }
}

// R rows of 16-bit activations: 2 R rows of bytes, over one group.
template <int R, int V, bool kBiased> static void wide_tile(const ProductTile& tile) {
  const char* x[2 * R];
#pragma GCC unroll 8
  for (int r = 0; r < 2 * R; ++r) x[r] = tile.x + r * (tile.x_stride / 2);
  for (int column = 0; column < kPanel; column += V * kLanes) {
    Ahead ahead = Ahead::of<StepInt8>(tile);
    Vi acc[2 * R][V];
#pragma GCC unroll 8
    for (int r = 0; r < 2 * R; ++r) {
      const Vi start = set1_int(kBiased ? -128 * tile.x_sums[r] : 0);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = start;
    }
    add_steps<StepInt8, 2 * R, V>(acc, tile.panel, column, x, 0, tile.steps, ahead);
    alignas(64) float wide[V * kLanes];
    const float* scales = group_floats<V>(tile, tile.scales, column, wide);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v)
        store(tile.out + r * kPanel + column + v * kLanes,
              wide_value(acc[2 * r][v], acc[2 * r + 1][v], tile.x_scales[r], load(scales + v * kLanes)));
  }
}

// ---- choice of shapes: rows of the tallest tile, and vectors of outputs by number of rows, such that accumulators,
// a phase's weights and an activation fit in the level's registers

#if defined(__AVX512F__)
constexpr int kRows = 6, kInt8Rows = 6, kInt4Rows = 6;
constexpr int float_vectors(int) { return 4; }
constexpr int int8_vectors(int) { return 4; }
constexpr int int4_vectors(int) { return 4; }
#elif defined(__aarch64__)
constexpr int kRows = 6, kInt8Rows = 6, kInt4Rows = 6;
constexpr int float_vectors(int rows) { return rows == 1 ? 16 : 4; }
constexpr int int8_vectors(int rows) { return rows == 1 ? 16 : 4; }
constexpr int int4_vectors(int rows) { return rows == 1 ? 16 : 4; }
#else
constexpr int kRows = kLanes == 8 ? 6 : 4, kInt8Rows = 8, kInt4Rows = 6;
constexpr int float_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
constexpr int int8_vectors(int rows) { return rows == 1 ? 8 : rows <= 3 ? 2 : 1; }
constexpr int int4_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

template <int R> struct F32Tile {
  static void run(const ProductTile& tile) { float_tile<StepF32, R, float_vectors(R)>(tile); }
};
template <int R> struct Bf16Tile {
  static void run(const ProductTile& tile) { float_tile<StepBf16, R, float_vectors(R)>(tile); }
};
template <int R> struct Int8Tile {
  static void run(const ProductTile& tile) { grouped_tile<StepInt8, R, int8_vectors(R), kBiasedCodes ? 128 : 0, false>(tile); }
};
template <int R> struct Int4Tile {
  static void run(const ProductTile& tile) {
    if (tile.minimums) grouped_tile<StepInt4, R, int4_vectors(R), 0, true>(tile);
    else grouped_tile<StepInt4, R, int4_vectors(R), kMiddleCode, false>(tile);
  }
};

template <int R> struct WideTile {
  static void run(const ProductTile& tile) { wide_tile<R, int8_vectors(2 * R), kBiasedCodes>(tile); }
};

// Tile<1> … Tile<kMost>, by the number of rows.
template <template <int> class Tile, int kMost> static void by_rows(const ProductTile& tile) {
  if (tile.rows == kMost) return Tile<kMost>::run(tile);
  if constexpr (kMost > 1) by_rows<Tile, kMost - 1>(tile);
}

extern const LinearProducts linear_products;
#if defined(__AMX_TILE__)
const LinearProducts linear_products = {
    {kRows, kAmxRows, kInt8Rows, kInt4Rows, kAmxRows / 2},
    {false, true, false, false, true},
    {&by_rows<F32Tile, kRows>, &amx_bf16, &by_rows<Int8Tile, kInt8Rows>, &by_rows<Int4Tile, kInt4Rows>, &amx_wide},
    {{},
     {&amx_gated_bf16<&silu>, &amx_gated_bf16<&gelu_tanh>},
     {},
     {},
     {&amx_gated_wide<&silu>, &amx_gated_wide<&gelu_tanh>}},
    {nullptr, nullptr, nullptr, nullptr, &by_rows<WideTile, kFewRows>},  // vectors read a panel faster than tiles do
    {nullptr, nullptr, &amx_int8, &amx_int4, nullptr},
    &amx_done};
#else
#if defined(__AVX2__) && !defined(NORIA_DOT_BF16)
template <int R> struct WidenedTile {
  static void run(const ProductTile& tile) { float_tile<StepWidened, R, float_vectors(R)>(tile); }
};
static const ManyRowProducts many_bf16 = {kLeastWidened, kWidenedRows, &widened_room<kRows>, &widened<kRows, &by_rows<WidenedTile, kRows>>};
constexpr const ManyRowProducts* kManyBf16 = &many_bf16;
#else
constexpr const ManyRowProducts* kManyBf16 = nullptr;
#endif
const LinearProducts linear_products = {{kRows, kRows, kInt8Rows, kInt4Rows, kInt8Rows / 2},
                                        {},
                                        {&by_rows<F32Tile, kRows>, &by_rows<Bf16Tile, kRows>, &by_rows<Int8Tile, kInt8Rows>,
                                         &by_rows<Int4Tile, kInt4Rows>, &by_rows<WideTile, kInt8Rows / 2>},
                                        {},
                                        {},
                                        {nullptr, kManyBf16, nullptr, nullptr, nullptr},
                                        nullptr};
#endif

}  // namespace noria::NORIA_ISA
