// Many rows times a bf16 panel where there are no products of bfloat16: each tile's rows are widened to float32 once, not anew
// with every vector of outputs. The sums are those of StepBf16, which adds the same products in the same order.
#pragma once
#include "kernels/linear_tile.h"

namespace noria::NORIA_ISA {

struct StepWidened {
  using Accumulator = Vf;
  static constexpr bool tiled = true;
  static constexpr int phases = 2, x_bytes = 8;
  template <int phase> static Vi weight(Vi unit) { return phase ? high_halves(unit) : low_halves(unit); }
  template <int phase> static Vi activation(const char* x) { return broadcast_unit(x + 4 * phase); }
  static void dot(Vf& acc, Vi w, Vi x) { dot_f32(acc, w, x); }
};

constexpr int kWidenedRows = kMaxTileRows, kLeastWidened = 12;

template <int kRows> static int64_t widened_room(const ProductTile& tile) {
  return kRows * 2 * tile.steps * static_cast<int64_t>(sizeof(float));
}

static inline void widen_row(const uint16_t* x, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_bf16(x + i));
  const int rest = static_cast<int>(count - i);
  if (rest) store_partial(out + i, load_bf16_partial(x + i, rest), rest);
}

// multiply: kRows at most, with StepWidened.
template <int kRows, void (*multiply)(const ProductTile& tile)> static void widened(const ProductTile& tile) {
  const int64_t k = 2 * tile.steps, count = (tile.rows + kRows - 1) / kRows;
  float* const rows = reinterpret_cast<float*>(tile.room);
  ProductTile part = tile;
  part.x = tile.room;
  part.x_stride = k * static_cast<int64_t>(sizeof(float));
  part.ahead_step = tile.panel_bytes / 2 / count / tile.steps;  // a share of the next panel
  part.ahead_half = tile.steps * part.ahead_step;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = tile.rows * i / count;
    part.rows = static_cast<int>(tile.rows * (i + 1) / count - first);
    for (int r = 0; r < part.rows; ++r)
      widen_row(reinterpret_cast<const uint16_t*>(tile.x + (first + r) * tile.x_stride), k, rows + r * k);
    part.ahead = tile.panel + tile.panel_bytes + 2 * i * part.ahead_half;
    part.out = tile.out + first * kPanel;
    multiply(part);
  }
}

}  // namespace noria::NORIA_ISA
