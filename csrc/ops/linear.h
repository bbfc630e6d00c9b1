// Products with packed weights: packing, the driver that cuts a product into tiles, and its epilogues.
#pragma once
#include <vector>

#include "core/pool.h"
#include "core/types.h"

namespace noria {

// Packing of row-major [n, k] weights as Python hands them over. The layout (kernels/linear.h) is the same for every
// ISA level. All throw std::invalid_argument for what the products cannot take:
// codes outside -127…127 or 0…15, a group that is no multiple of 4 (int4: 8) and shorter than k.
PackedWeight pack_f32(const float* values, int64_t n, int64_t k);
PackedWeight pack_bf16(const uint16_t* values, int64_t n, int64_t k);
PackedWeight pack_bf16(const float* values, int64_t n, int64_t k);  // rounds to nearest even
// wide: for activations of 16 bits (Format::s16); needs one group per row.
PackedWeight pack_int8(const int8_t* codes, const float* scales, int64_t n, int64_t k, int group, bool wide = false);
PackedWeight pack_int4(const uint8_t* codes, const float* scales, const float* minimums, int64_t n, int64_t k, int group);

// One row of an f32 or bf16 weight as it was packed: `to` gets its k values (with an odd k of bf16, a zero behind them).
void unpack_row(const PackedWeight& weight, int64_t row, uint32_t* to);

// The form in which a product takes its left operand for this weight. int8 (unless wide) and int4 of one group want the
// same form: s8 codes with their sums (the unsigned operand of a dot-product instruction is always the weight).
ActivationSpec wanted(const PackedWeight& weight);

enum class Activation : uint8_t { silu, gelu_tanh };
struct ActivationBuffer;  // ops/elementwise.h

// out[:, part by part] = residual + softcap * tanh(scale * (x @ part.T + bias) / softcap)
struct LinearArgs {
  const Activations* x = nullptr;        // one per distinct spec; x_of_part[i] is the one for part i
  const int* x_of_part = nullptr;
  const PackedWeight* const* parts = nullptr;
  int part_count = 0;
  const float* bias = nullptr;           // [sum of n] or null
  const float* residual = nullptr;       // [rows][out_stride] or null; may be `out` itself
  float* out = nullptr;                  // [rows][out_stride]
  int64_t out_stride = 0;
  float scale = 1.0f;                    // logits: applied before the soft cap
  float softcap = 0.0f;                  // 0: none
  // Instead of `out`: each row's largest result and the lowest output that holds it, among those that a thread computed:
  // [threads][largest_stride] both, filled with kNoLogit and 0 (kernels/elementwise.h) before. For one part, without bias
  // and residual.
  float* largest = nullptr;
  int32_t* largest_ids = nullptr;
  int64_t largest_stride = 0;
};
// Throws std::invalid_argument if an activation is not what its part wants. Allocates nothing but memory of each thread that is kept for
// the next call.
void linear(Pool& pool, const LinearArgs& args);

// out = activation(gate_x @ gate.T + gate_bias) * (up_x @ up.T + up_bias)
struct GatedLinearArgs {
  const Activations* gate_x = nullptr;   // may be the same object as up_x
  const Activations* up_x = nullptr;
  const PackedWeight* gate = nullptr;
  const PackedWeight* up = nullptr;
  const float* gate_bias = nullptr;      // [n] or null; added before the activation
  const float* up_bias = nullptr;
  Activation activation = Activation::silu;
  float* out = nullptr;                  // [rows][out_stride]
  int64_t out_stride = 0;
  ActivationBuffer* form = nullptr;      // instead of `out`: the result in form_spec, which fits_tiles (ops/elementwise.h)
  ActivationSpec form_spec;
};
void gated_linear(Pool& pool, const GatedLinearArgs& args);

// Where a thread begins among the panels of a product, or of several side by side, whose rows are not cut.
inline int64_t first_panel(int64_t panels, int thread, int threads) { return panels * thread / threads; }

// What each thread of a pool reads first of such a product, in order and up to so many bytes each; for Pool::expect.
// gated: the parts are read side by side, panel by panel, not one after the other.
std::vector<std::vector<Span>> first_reads(const PackedWeight* const* parts, int count, bool gated, int threads, int64_t bytes);

}  // namespace noria
