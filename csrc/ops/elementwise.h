// Row-wise ops around the products: embedding, norm, and conversion into the form that a product wants.
#pragma once
#include "core/pool.h"
#include "core/types.h"

namespace noria {

// Bytes of the data, scales and sums of `rows` activations of this spec, each 64-byte aligned.
struct ActivationBuffer {
  Buffer data, scales, sums;
  ActivationBuffer() = default;
  ActivationBuffer(const ActivationSpec& spec, int64_t rows);
  Activations view(const ActivationSpec& spec, int64_t rows) const;
};

// x [rows][width] → one or more formats. The f32 format is a copy with a padded stride.
void convert(Pool& pool, const float* x, int64_t rows, int64_t width, const ActivationSpec* specs, ActivationBuffer* const* out,
             int count);
// RMS norm, then the float result (if `out`) and any number of formats, in one pass over the row.
void norm(Pool& pool, const float* x, const float* weight, float eps, const float* residual, int64_t rows, int64_t width,
          float* out, const ActivationSpec* specs, ActivationBuffer* const* converted, int count);

struct EmbeddingTable {
  bool bf16 = false;
  int64_t vocab = 0, width = 0;
  Buffer data;
};
void embed(Pool& pool, const EmbeddingTable& table, const int32_t* ids, int64_t rows, float scale, float* out);
void select(Pool& pool, const float* x, const int32_t* rows, int64_t count, int64_t width, float* out);

}  // namespace noria
