// Kernel table of ops/elementwise: one instance per ISA level. No threads, no allocation: one call is a run of
// rows, whose results do not depend on each other.
#pragma once
#include "core/types.h"

namespace noria {

// Rows of an activation in the format of `spec`. The padding up to spec.padded() is written too.
struct RowTarget {
  ActivationSpec spec;
  int64_t row_bytes = 0;    // from a row's data to the next
  void* data = nullptr;
  float* scales = nullptr;  // [rows][groups]; s8 only
  int32_t* sums = nullptr;
};

enum class Function : uint8_t { exp, sigmoid, tanh, silu, gelu_tanh };

constexpr int kNormRows = 4;  // rows that norms take together

// out = x / sqrt(mean(x²) + eps) * weight (+ residual).
struct NormArgs {
  const float* x = nullptr;         // [rows][width]
  const float* weight = nullptr;    // [width]
  const float* residual = nullptr;  // [rows][width] or null
  float* out = nullptr;             // [rows][width], may be x or residual itself; null: only the targets are wanted
  float* scratch = nullptr;         // [kNormRows][width]
  int64_t width = 0;
  float eps = 0;
};

// A tile of products on its way into the form that the next product reads, without float rows in between:
// function(gate + gate_bias) * (up + up_bias). The form is bf16, or s8 in groups of 32 or 64.
struct GatedTile {
  int rows = 0;
  const float* gate = nullptr;       // [rows][64]
  const float* up = nullptr;         // [rows][64]
  const float* gate_bias = nullptr;  // [64] or null
  const float* up_bias = nullptr;
  Function function = Function::silu;  // or gelu_tanh
  RowTarget target;                    // at the tile's first row and column
};

// A tile of the head's products, of which only each row's largest logit is wanted: cap(scale * product).
struct LargestTile {
  int rows = 0, columns = 0;       // of 64
  const float* product = nullptr;  // [rows][64]
  float scale = 1, softcap = 0;    // 0: none
  int32_t first = 0;               // id of the first column
  float* largest = nullptr;        // [rows], so far; kNoLogit at first
  int32_t* ids = nullptr;          // [rows], the lowest that holds it; 0 at first
};
inline constexpr float kNoLogit = -__builtin_inff();

struct ElementwiseKernels {
  // x [rows][width] → every target.
  void (*convert_rows)(const float* x, int64_t rows, int64_t width, const RowTarget* targets, int count);
  void (*norm_rows)(const NormArgs& args, int64_t rows, const RowTarget* targets, int count);
  void (*gated_tile)(const GatedTile& tile);
  // NaN counts as no logit, infinity as the largest finite number, as in sampling.
  void (*largest_tile)(const LargestTile& tile);
  // out = row * scale, for rows of float32 and of bfloat16.
  void (*embed_row_f32)(const float* row, float scale, int64_t width, float* out);
  void (*embed_row_bf16)(const uint16_t* row, float scale, int64_t width, float* out);
  // The functions of simd.h one by one, so that their error can be tested at every level.
  void (*evaluate)(Function function, const float* x, int64_t count, float* out);
};

}  // namespace noria
