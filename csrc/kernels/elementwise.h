// Kernel table of ops/elementwise: one instance per ISA level. No threads, no allocation: one call is a run of
// rows, whose results do not depend on each other.
#pragma once
#include "core/types.h"

namespace noria {

// Rows of an activation in the format of `spec`. The padding up to spec.stride() is written too.
struct RowTarget {
  ActivationSpec spec;
  int64_t row_bytes = 0;    // from a row's data to the next
  void* data = nullptr;
  float* scales = nullptr;  // [rows][groups]; s8 only
  int32_t* sums = nullptr;
};

enum class Function : uint8_t { exp, sigmoid, tanh, silu, gelu_tanh };

// out = x / sqrt(mean(x²) + eps) * weight (+ residual).
struct NormArgs {
  const float* x = nullptr;         // [rows][width]
  const float* weight = nullptr;    // [width]
  const float* residual = nullptr;  // [rows][width] or null
  float* out = nullptr;             // [rows][width], may be x or residual itself; null: only the targets are wanted
  float* scratch = nullptr;         // [width]
  int64_t width = 0;
  float eps = 0;
};

struct ElementwiseKernels {
  // x [rows][width] → every target.
  void (*convert_rows)(const float* x, int64_t rows, int64_t width, const RowTarget* targets, int count);
  void (*norm_rows)(const NormArgs& args, int64_t rows, const RowTarget* targets, int count);
  // out = row * scale, for rows of float32 and of bfloat16.
  void (*embed_row_f32)(const float* row, float scale, int64_t width, float* out);
  void (*embed_row_bf16)(const uint16_t* row, float scale, int64_t width, float* out);
  // The functions of simd.h one by one, so that their error can be tested at every level.
  void (*evaluate)(Function function, const float* x, int64_t count, float* out);
};

}  // namespace noria
