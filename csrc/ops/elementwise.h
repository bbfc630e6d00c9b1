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
  Activations view(const ActivationSpec& spec, int64_t first, int64_t rows) const;
};

struct RowTarget;  // kernels/elementwise.h
// The rows of a buffer from a row and a column on (a multiple of 64).
RowTarget target_at(const ActivationSpec& spec, ActivationBuffer& buffer, int64_t row, int64_t column);
// Whether whoever makes a value 64 columns at a time can write it in this form: no group reaches beyond them.
bool fits_tiles(const ActivationSpec& spec);

// x [rows][width] → one or more formats. The f32 format is a copy with a padded stride.
void convert(Pool& pool, const float* x, int64_t rows, int64_t width, const ActivationSpec* specs, ActivationBuffer* const* out,
             int count);
// RMS norm: x / sqrt(mean(x²) + eps) * weight (+ residual); then the float result (if `out`, which may be x or residual)
// and any number of formats, while the row is in the nearest cache.
void norm(Pool& pool, const float* x, const float* weight, float eps, const float* residual, int64_t rows, int64_t width,
          float* out, const ActivationSpec* specs, ActivationBuffer* const* converted, int count);

struct EmbeddingTable {
  bool bf16 = false;
  int64_t vocab = 0, width = 0;
  Buffer data;
  const PackedWeight* packed = nullptr;  // instead of `data`: its rows are the table's
};
// Copies values [vocab, width] (float, or bfloat16 as uint16_t).
EmbeddingTable make_table(const void* values, bool bf16, int64_t vocab, int64_t width);
// Reads an f32 or bf16 weight, which must outlive the table, in place.
EmbeddingTable make_table(const PackedWeight& weight);
// ids must lie in [0, vocab).
void embed(Pool& pool, const EmbeddingTable& table, const int32_t* ids, int64_t rows, float scale, float* out);
void select(Pool& pool, const float* x, const int32_t* rows, int64_t count, int64_t width, float* out);

}  // namespace noria
