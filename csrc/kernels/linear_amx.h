// Products by AMX tiles: rows of bytes or bfloat16 times a panel, straight from the packed layout, in which 16 steps of 16
// outputs are a B tile.
//
// Four tiles of sums stay in registers over all steps: two of 16 rows by two of 16 outputs, twice, or one by four. An
// output's sum takes its steps 16 at a time in ascending order in both. Within those the instruction itself says how: int32
// sums are exact; tdpbf16ps adds the products of even and of odd index apart, fused, then both to the sum, and takes
// subnormal numbers as zero. So a row's result does not depend on the rows beside it.
#pragma once
#include <initializer_list>

#include "kernels/linear_tile.h"
#include "kernels/tiles.h"

#if defined(__AMX_TILE__)

namespace noria::NORIA_ISA {

static constexpr int kAmxRows = 2 * kTileRows;
static constexpr int kAmxMostRows = 64;

// Sums of 0–3 in tiles 0–3, rows in 4 and 5, weights in 6 and 7.
struct DotBf16Tiles {
  template <int c, int a, int b> static void dot() { tile_dot_bf16<c, a, b>(); }
};
struct DotByteTiles {  // weights are stored as code + 128
  template <int c, int a, int b> static void dot() { tile_dot_su<c, a, b>(); }
};

// 16 or 32 rows at most, times a panel.
struct AmxBlock {
  const char* x;      // [rows][x_stride bytes], zero up to a multiple of 64 bytes
  int64_t x_stride;
  const char* panel;  // [chunks][4096]
  int64_t chunks;
  Ahead ahead;
};

// Registers are shaped for a number of rows and of bytes that a product takes of each; shaping them anew costs as much as
// twenty products.
static thread_local int amx_shaped_for = 0;

static inline void amx_shape(int rows, int row_bytes = 64) {
  const int wanted = rows + row_bytes * 256;
  if (wanted == amx_shaped_for) return;
  TileShapes shapes;
  const int first = rows < kTileRows ? rows : kTileRows, second = rows > first ? rows - first : first;
  for (int t : {0, 1}) shapes.set(t, first);
  for (int t : {2, 3}) shapes.set(t, second);
  shapes.set(4, first, row_bytes);
  shapes.set(5, second, row_bytes);
  for (int t : {6, 7}) shapes.set(t, row_bytes / 4);
  tiles_configure(shapes);
  amx_shaped_for = wanted;
}

static void amx_done() {
  if (amx_shaped_for == 0) return;
  tiles_release();
  amx_shaped_for = 0;
}

// Lines of one stream that some steps ask for.
static inline void amx_prefetch_one(Ahead& ahead, int64_t steps) {
  const int64_t bytes = steps * ahead.step;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(ahead.at + at, 0, 2);
  ahead.at += bytes;
}

// Whether the streams are two; where a tile asks for its own panel's lines, the first covers them all.
static inline bool amx_two_streams(const Ahead& ahead) { return ahead.half >= kChunkSteps * ahead.step; }

// Lines of both streams.
static inline void amx_prefetch(Ahead& ahead, int64_t steps = kChunkSteps) {
  if (amx_two_streams(ahead)) {
    Ahead second = {ahead.at + ahead.half, 0, ahead.step};
    amx_prefetch_one(second, steps);
  }
  amx_prefetch_one(ahead, steps);
}

// 17–32 rows times half a panel, which stays in the nearest cache (if it is not too long) from one block of rows to the next:
// the rows, which come once, go past it. Sums go to out [rows][out_stride bytes].
template <class Dot, class Sink> static void amx_half(const AmxBlock& block, int half, char* out, Sink& sink) {
  constexpr int64_t out_stride = Sink::kStride;
  sink.begin(block.chunks);
  const char* x = block.x;
  const char* second = x + kTileRows * block.x_stride;
  const char* panel = block.panel;
  Ahead ahead = block.ahead;  // a stream for each half: asked for at once, they would wait for each other
  if (half) ahead.at += ahead.half;
  if (half && !amx_two_streams(block.ahead)) ahead.step = 0;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int64_t i = 0; i < block.chunks; ++i, panel += kChunkBytes, x += 64, second += 64) {
    const char* w = panel + tile_offset(i, 2 * half);
    amx_prefetch_one(ahead, kChunkSteps);
    tile_stream<4>(x, block.x_stride);
    tile_load<6>(w, 64);
    Dot::template dot<0, 4, 6>();
    tile_stream<5>(second, block.x_stride);
    Dot::template dot<2, 5, 6>();
    tile_load<7>(w + kChunkTileBytes, 64);
    Dot::template dot<3, 5, 7>();
    Dot::template dot<1, 4, 7>();
    sink.meanwhile();
  }
  tile_store<0>(out, out_stride);
  tile_store<1>(out + 64, out_stride);
  tile_store<2>(out + kTileRows * out_stride, out_stride);
  tile_store<3>(out + kTileRows * out_stride + 64, out_stride);
}

// 1–16 rows: all four vectors of outputs at once.
template <class Dot> static void amx_flat(const AmxBlock& block, char* out, int64_t out_stride) {
  const char* x = block.x;
  const char* panel = block.panel;
  Ahead ahead = block.ahead;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int64_t i = 0; i < block.chunks; ++i, panel += kChunkBytes, x += 64) {
    amx_prefetch(ahead);
    tile_load<4>(x, block.x_stride);
    tile_load<6>(panel + tile_offset(i, 0), 64);
    Dot::template dot<0, 4, 6>();
    tile_load<7>(panel + tile_offset(i, 1), 64);
    Dot::template dot<1, 4, 7>();
    tile_load<6>(panel + tile_offset(i, 2), 64);
    Dot::template dot<2, 4, 6>();
    tile_load<7>(panel + tile_offset(i, 3), 64);
    Dot::template dot<3, 4, 7>();
  }
  tile_store<0>(out, out_stride);
  tile_store<1>(out + 64, out_stride);
  tile_store<2>(out + 128, out_stride);
  tile_store<3>(out + 192, out_stride);
}

// Block `index` of `count` of a tile's rows, with its share of what is to be prefetched.
static AmxBlock amx_block(const ProductTile& tile, int64_t x_stride, int index, int count) {
  const int64_t step = tile.ahead_step / count;
  return {tile.x + index * kAmxRows * x_stride, x_stride, tile.panel, tile.panel_bytes / kChunkBytes,
          {tile.ahead + index * tile.steps * step, tile.ahead_half, step}};
}

// rows: of 64 bytes per chunk. Sink: at(row, half) says where the sums of a block's half go, and done(row, rows, half) that
// they are there; half 2: the whole panel.
template <class Dot, class Sink> static void amx_product(int rows, const ProductTile& tile, int64_t x_stride, Sink& sink) {
  const int count = (rows + kAmxRows - 1) / kAmxRows;
  const int rest = rows % kAmxRows, tall = rest > kTileRows ? count : rows / kAmxRows;  // blocks of more than 16 rows
  for (int index = 0; index < count;) {
    const int row = index * kAmxRows, last = index < rows / kAmxRows ? rows / kAmxRows : count;  // of equal shape
    const int height = index < rows / kAmxRows ? kAmxRows : rest;
    amx_shape(height);
    if (index >= tall) {
      amx_flat<Dot>(amx_block(tile, x_stride, index, count), sink.at(row, 2), Sink::kStride);
      return sink.done(row, height, 2);
    }
    for (int half = 0; half < 2; ++half)
      for (int i = index; i < last; ++i) {
        amx_half<Dot>(amx_block(tile, x_stride, i, count), half, sink.at(i * kAmxRows, half), sink);
        sink.done(i * kAmxRows, height, half);
      }
    index = last;
  }
}

struct AmxFloats {
  static constexpr int64_t kStride = kStepBytes;
  float* out;
  char* at(int row, int half) const { return reinterpret_cast<char*>(out + row * kPanel + half % 2 * kPanel / 2); }
  void begin(int64_t) const {}
  void meanwhile() const {}
  void done(int, int, int) const {}
};

static void amx_bf16(const ProductTile& tile) {
  AmxFloats sink = {tile.out};
  amx_product<DotBf16Tiles>(tile.rows, tile, tile.x_stride, sink);
}

// Sums of rows of bytes, two of which make a row of 16-bit activations. They are converted when the tiles are at the next ones:
// what a tile has just stored is not there yet. Where a load's address has the lower 12 bits of such a store, it would wait too:
// so blocks take turns at the left and the right half of the same rows.
struct AmxWideSums {
  static constexpr int64_t kStride = kStepBytes;
  const ProductTile& tile;
  const float* scales;
  int turn = 0, row = 0, half = 0, pairs = 0, each = 0;
  alignas(64) int32_t sums[kAmxRows][kPanel];
  alignas(64) int32_t flat[kTileRows][kPanel];

  AmxWideSums(const ProductTile& tile, const float* scales) : tile(tile), scales(scales) {}
  char* at(int, int to_half) { return reinterpret_cast<char*>(to_half == 2 ? flat[0] : sums[0] + turn * kPanel / 2); }
  void begin(int64_t chunks) { each = static_cast<int>((kTileRows + chunks - 1) / chunks); }
  inline __attribute__((always_inline)) void meanwhile() {
    for (int i = 0; i < each && pairs > 0; ++i) convert<kPanel / 2>(sums[0] + (1 - turn) * kPanel / 2, half * kPanel / 2);
  }
  void done(int new_row, int new_rows, int new_half) {
    finish();
    turn = 1 - turn;
    row = new_row / 2;
    pairs = new_rows / 2;
    half = new_half;
  }
  void finish() {
    while (pairs > 0) {
      if (half == 2) convert<kPanel>(flat[0], 0);
      else convert<kPanel / 2>(sums[0] + (1 - turn) * kPanel / 2, half * kPanel / 2);
    }
  }
  template <int kColumns> inline __attribute__((always_inline)) void convert(const int32_t* from, int column) {
    --pairs;
    from += pairs * 2 * kPanel;
    const int at = row + pairs;
    const Vi high_bias = set1_int(-128 * tile.x_sums[2 * at]), low_bias = set1_int(-128 * tile.x_sums[2 * at + 1]);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; c += kLanes) {
      const Vi high = add_int(load_units(from + c), high_bias), low = add_int(load_units(from + kPanel + c), low_bias);
      store(tile.out + at * kPanel + column + c, wide_value(high, low, tile.x_scales[at], load(scales + column + c)));
    }
  }
};

static void amx_wide(const ProductTile& tile) {
  alignas(64) float wide[kPanel];
  AmxWideSums sink(tile, group_floats<4>(tile, tile.scales, 0, wide));
  amx_product<DotByteTiles>(2 * tile.rows, tile, tile.x_stride / 2, sink);
  sink.finish();
}

}  // namespace noria::NORIA_ISA

#endif
