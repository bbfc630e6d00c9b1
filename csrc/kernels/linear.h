// Kernel table of ops/linear: one instance per ISA level. No threads: one call is one tile. What tiles need
// besides, each thread keeps from call to call.
//
// A weight [n, k] is packed alike for every level, in panels of 64 outputs. Within a panel one *step* along k holds one
// 4-byte unit per output, 256 bytes in all:
//   f32   one value                 bf16  two values, ascending k
//   int8  four codes + 128          int4  eight codes; byte j holds code j in its low and code j + 4 in its high half
// f32 and int4: [steps][64] units. bf16 and int8 are *tiled*: 16 steps of 16 outputs lie together, [16][16] units, as matrix
// registers take them, and four such tiles make a chunk of 16 steps; chunks ascend along k (tile_offset). What is missing in
// the last step or chunk is zero (int8: code 0, stored as 128). A product needs one accumulator per output, which takes its
// steps in ascending k in every tile shape, so that a row's result does not depend on the rows beside it.
#pragma once
#include "core/types.h"

namespace noria {

constexpr int kPanel = 64;         // outputs of a panel
constexpr int kStepBytes = 256;    // bytes of a panel's step
constexpr int kMiddleCode = 8;     // of int4, whose value is zero where there are no minimums
constexpr int kMaxTileRows = 64;   // no level takes more at once
constexpr int kChunkSteps = 16;
constexpr int kChunkBytes = kChunkSteps * kStepBytes;
constexpr int kChunkTileBytes = 1024;

// Products along k that one step holds.
constexpr int step_width(Scheme scheme) {
  return scheme == Scheme::f32 ? 1 : scheme == Scheme::bf16 ? 2 : scheme == Scheme::int8 ? 4 : 8;
}

constexpr bool is_tiled(Scheme scheme) { return scheme == Scheme::bf16 || scheme == Scheme::int8; }

// Of outputs 16 * tile … within a chunk. The halves of a panel change places from chunk to chunk: half a panel, which matrix
// registers read again and again, is so spread over all sets of the nearest cache.
constexpr int64_t tile_offset(int64_t chunk, int tile) { return (tile ^ static_cast<int>(chunk % 2 * 2)) * kChunkTileBytes; }

constexpr int64_t panel_bytes(Scheme scheme, int64_t k) {
  const int64_t steps = (k + step_width(scheme) - 1) / step_width(scheme);
  return is_tiled(scheme) ? (steps + kChunkSteps - 1) / kChunkSteps * kChunkBytes : steps * kStepBytes;
}

// How a product is computed: by the weight's scheme, and for int8 by its activations (Format::s8 or Format::s16).
enum class Product : uint8_t { f32, bf16, int8, int4, int8_wide };
constexpr int kProducts = 5;

inline Product product_of(const PackedWeight& weight) {
  return weight.wide ? Product::int8_wide : static_cast<Product>(weight.scheme);
}

// Some rows times one panel.
struct ProductTile {
  int rows = 0;                      // 1 … LinearProducts::tile_rows; any number where it finishes
  const char* x = nullptr;           // first row, in the format of the product
  int64_t x_stride = 0;              // bytes
  const float* x_scales = nullptr;   // [rows][groups], int8 and int4
  const int32_t* x_sums = nullptr;   // [rows][groups]; int8_wide: [rows][2]
  const char* panel = nullptr;
  int64_t panel_bytes = 0;
  char* room = nullptr;              // ManyRowProducts: to work in, 64-byte aligned
  const char* scales = nullptr;      // [groups][64] float32 or, with half_scales, float16
  const char* minimums = nullptr;    // the same, int4 only; null: all are -8 scales
  bool half_scales = false;
  int64_t steps = 0;
  int64_t group_steps = 0;           // steps of a group, int8 and int4
  int64_t groups = 0;
  float* out = nullptr;              // [rows][out_stride]
  // Others than 64 and null only where LinearProducts::finishes says so: out = product (+ bias) (+ residual).
  int64_t out_stride = kPanel;
  const float* bias = nullptr;       // [64]
  const float* residual = nullptr;   // [rows][out_stride]
  // What to prefetch meanwhile: two streams, `ahead_half` bytes apart, each advancing by `ahead_step` bytes per step.
  const char* ahead = nullptr;
  int64_t ahead_half = 0, ahead_step = 0;
};

// out = residual + cap(scale * (product + bias)) for the first `columns` outputs of a panel.
struct LinearEpilogue {
  int rows = 0;
  int columns = 0;                   // 1 … 64; nothing beyond them is read or written
  const float* product = nullptr;    // [rows][64]
  const float* bias = nullptr;       // [columns] or null
  const float* residual = nullptr;   // [rows][stride] or null; may be `out`
  float* out = nullptr;              // [rows][stride]
  int64_t stride = 0;
  float scale = 1.0f;
  float softcap = 0.0f;              // 0: none
  bool stream = false;               // past the caches, where the level can and rows are aligned to 64 bytes
};

// out = activation(gate + gate_bias) * (up + up_bias).
struct GatedEpilogue {
  int rows = 0;
  int columns = 0;
  const float* gate = nullptr;       // [rows][64]
  const float* up = nullptr;         // [rows][64]
  const float* gate_bias = nullptr;  // [columns] or null
  const float* up_bias = nullptr;
  float* out = nullptr;              // [rows][stride]
  int64_t stride = 0;
};

// Any number of rows times the same 64 outputs of two weights: out = activation(gate + gate_bias) * (up + up_bias).
struct GatedProductTile {
  ProductTile gate, up;              // of the same rows; their `out` and what follows it is not used, but for `bias`
  char* out = nullptr;               // [rows][out_bytes], float32 or bfloat16
  int64_t out_bytes = 0;
  bool out_bf16 = false;
};

struct GatedProducts {
  void (*silu)(const GatedProductTile& tile);
  void (*gelu_tanh)(const GatedProductTile& tile);
};

struct LinearProducts {
  int tile_rows[kProducts];                         // rows of the tallest tile
  bool finishes[kProducts];                         // `run` takes any number of rows and what an epilogue would add
  void (*run[kProducts])(const ProductTile& tile);
  GatedProducts gated[kProducts];                   // null where there is none. The results are those of `run`
  // Where not null: a product of no more than two rows in all is faster so. The results are the same.
  void (*few[kProducts])(const ProductTile& tile);
  // Where not null: so many rows are faster over weights that are unpacked once for all of them, or (bf16) when they themselves
  // are widened once. The results are the same.
  const struct ManyRowProducts* many[kProducts];
  void (*done)();                                   // to be called when a thread has run its tiles; may be null
};

constexpr int kFewRows = 2;

struct ManyRowProducts {
  int least_rows, tile_rows;
  int64_t (*room_bytes)(const ProductTile& tile);  // 0: not for these groups
  void (*run)(const ProductTile& tile);
};

struct LinearKernels {
  const LinearProducts* products;
  void (*epilogue)(const LinearEpilogue& args);
  void (*silu)(const GatedEpilogue& args);
  void (*gelu_tanh)(const GatedEpilogue& args);
};

}  // namespace noria
