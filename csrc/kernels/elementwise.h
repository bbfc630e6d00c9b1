// Kernel table of ops/elementwise: one instance per ISA level. No threads, no allocation: one call is one row.
#pragma once
#include "core/types.h"

namespace noria {

// One row of an activation in the format of `spec`. The padding up to spec.stride() is written too.
struct RowTarget {
  ActivationSpec spec;
  void* data = nullptr;
  float* scales = nullptr;  // [groups]; s8 only
  int32_t* sums = nullptr;
};

enum class Function : uint8_t { exp, sigmoid, tanh, silu, gelu_tanh };

struct ElementwiseKernels {
  // x [width] → every target.
  void (*convert_row)(const float* x, int64_t width, const RowTarget* targets, int count);
  // out = x / sqrt(mean(x²) + eps) * weight (+ residual). out may be x or residual itself.
  void (*norm_row)(const float* x, const float* weight, float eps, const float* residual, int64_t width, float* out);
  // out = row * scale, for rows of float32 and of bfloat16.
  void (*embed_row_f32)(const float* row, float scale, int64_t width, float* out);
  void (*embed_row_bf16)(const uint16_t* row, float scale, int64_t width, float* out);
  // The functions of simd.h one by one, so that their error can be tested at every level.
  void (*evaluate)(Function function, const float* x, int64_t count, float* out);
};

}  // namespace noria
