// Products by AMX tiles: up to 32 rows of bytes or bfloat16 times a panel, straight from the packed layout, in which 16 steps
// of 16 outputs are a B tile whose rows are 256 bytes apart.
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
static constexpr int kAmxSteps = 16;  // of a B tile

// Sums of 0–3 in tiles 0–3, rows in 4 and 5, weights in 6 and 7.
struct DotBf16Tiles {
  template <int c, int a, int b> static void dot() { tile_dot_bf16<c, a, b>(); }
};
struct DotByteTiles {  // weights are stored as code + 128
  template <int c, int a, int b> static void dot() { tile_dot_su<c, a, b>(); }
};

struct AmxBlock {
  const char* x;      // [rows][x_stride bytes], zero up to a multiple of 64 bytes
  int64_t x_stride;
  const char* panel;  // [steps][256]
  int64_t steps;
  char* out;          // [rows][64] sums of 4 bytes
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
static inline bool amx_two_streams(const Ahead& ahead) { return ahead.half >= kAmxSteps * ahead.step; }

// Lines of both streams.
static inline void amx_prefetch(Ahead& ahead, int64_t steps = kAmxSteps) {
  if (amx_two_streams(ahead)) {
    Ahead second = {ahead.at + ahead.half, 0, ahead.step};
    amx_prefetch_one(second, steps);
  }
  amx_prefetch_one(ahead, steps);
}

// The last steps, fewer than 16, with zeros after them.
struct AmxTail {
  alignas(64) char steps[kAmxSteps * kStepBytes];
  explicit AmxTail(const AmxBlock& block) {
    const int64_t left = block.steps % kAmxSteps * kStepBytes;
    if (left == 0) return;
    std::memcpy(steps, block.panel + block.steps * kStepBytes - left, static_cast<size_t>(left));
    std::memset(steps + left, 0, sizeof steps - static_cast<size_t>(left));
  }
};

// Up to so many bytes of k, half a panel stays in the nearest cache from one block of rows to the next, if the rows, which come
// once, go past it.
static constexpr int64_t kNearBytes = 768;

// 17–32 rows.
template <class Dot, bool kStream> static void amx_tall(const AmxBlock& block) {
  const AmxTail tail(block);
  const int64_t whole = block.steps / kAmxSteps;
  for (int half = 0; half < 2; ++half) {
    const char* x = block.x;
    const char* w = block.panel + half * 128;
    const auto multiply = [&](const char* weights) __attribute__((always_inline)) {
      kStream ? tile_stream<4>(x, block.x_stride) : tile_load<4>(x, block.x_stride);
      tile_load<6>(weights, kStepBytes);
      Dot::template dot<0, 4, 6>();
      const char* second = x + kTileRows * block.x_stride;
      kStream ? tile_stream<5>(second, block.x_stride) : tile_load<5>(second, block.x_stride);
      Dot::template dot<2, 5, 6>();
      tile_load<7>(weights + 64, kStepBytes);
      Dot::template dot<3, 5, 7>();
      Dot::template dot<1, 4, 7>();
      x += 64;
    };
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    Ahead ahead = block.ahead;  // a stream for each half: asked for at once, they would wait for each other
    if (half) ahead.at += ahead.half;
    if (half && !amx_two_streams(block.ahead)) ahead.step = 0;
    for (int64_t i = 0; i < whole; ++i, w += kAmxSteps * kStepBytes) {
      amx_prefetch_one(ahead, kAmxSteps);
      multiply(w);
    }
    if (block.steps % kAmxSteps) multiply(tail.steps + half * 128);
    char* out = block.out + half * 128;
    tile_store<0>(out, kStepBytes);
    tile_store<1>(out + 64, kStepBytes);
    tile_store<2>(out + kTileRows * kStepBytes, kStepBytes);
    tile_store<3>(out + kTileRows * kStepBytes + 64, kStepBytes);
  }
}

// 1–16 rows: all four vectors of outputs at once.
template <class Dot> static void amx_flat(const AmxBlock& block) {
  const AmxTail tail(block);
  const char* x = block.x;
  const auto multiply = [&](const char* weights) __attribute__((always_inline)) {
    tile_load<4>(x, block.x_stride);
    tile_load<6>(weights, kStepBytes);
    Dot::template dot<0, 4, 6>();
    tile_load<7>(weights + 64, kStepBytes);
    Dot::template dot<1, 4, 7>();
    tile_load<6>(weights + 128, kStepBytes);
    Dot::template dot<2, 4, 6>();
    tile_load<7>(weights + 192, kStepBytes);
    Dot::template dot<3, 4, 7>();
    x += 64;
  };
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  Ahead ahead = block.ahead;
  const char* w = block.panel;
  for (int64_t i = block.steps / kAmxSteps; i > 0; --i, w += kAmxSteps * kStepBytes) {
    amx_prefetch(ahead);
    multiply(w);
  }
  if (block.steps % kAmxSteps) multiply(tail.steps);
  tile_store<0>(block.out, kStepBytes);
  tile_store<1>(block.out + 64, kStepBytes);
  tile_store<2>(block.out + 128, kStepBytes);
  tile_store<3>(block.out + 192, kStepBytes);
}

template <class Dot> static void amx_block(int rows, const AmxBlock& block) {
  amx_shape(rows);
  if (rows <= kTileRows) return amx_flat<Dot>(block);
  block.steps * 4 <= kNearBytes ? amx_tall<Dot, true>(block) : amx_tall<Dot, false>(block);
}

static AmxBlock amx_operands(const ProductTile& tile, int64_t x_stride, void* out) {
  return {tile.x, x_stride, tile.panel, tile.steps, static_cast<char*>(out), {tile.ahead, tile.ahead_half, tile.ahead_step}};
}

static void amx_bf16(const ProductTile& tile) {
  amx_block<DotBf16Tiles>(tile.rows, amx_operands(tile, tile.x_stride, tile.out));
}

// A row of 16-bit activations is two rows of bytes.
static void amx_wide(const ProductTile& tile) {
  alignas(64) int32_t sums[kAmxRows][kPanel];
  amx_block<DotByteTiles>(2 * tile.rows, amx_operands(tile, tile.x_stride / 2, sums));
  alignas(64) float wide[kPanel];
  const float* scales = group_floats<4>(tile, tile.scales, 0, wide);
  for (int r = 0; r < tile.rows; ++r) {
    const Vi high_bias = set1_int(-128 * tile.x_sums[2 * r]), low_bias = set1_int(-128 * tile.x_sums[2 * r + 1]);
#pragma GCC unroll 4
    for (int c = 0; c < kPanel; c += kLanes) {
      const Vi high = add_int(load_units(sums[2 * r] + c), high_bias), low = add_int(load_units(sums[2 * r + 1] + c), low_bias);
      store(tile.out + r * kPanel + c, wide_value(high, low, tile.x_scales[r], load(scales + c)));
    }
  }
}

}  // namespace noria::NORIA_ISA

#endif
