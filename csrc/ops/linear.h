// Products with packed weights: packing, the driver that cuts a product into tiles, and its epilogues.
#pragma once
#include "core/pool.h"
#include "core/types.h"

namespace noria {

// Layouts of unpacked weights, as Python hands them over (row-major [n, k]).
PackedWeight pack_f32(const float* values, int64_t n, int64_t k);
PackedWeight pack_bf16(const uint16_t* values, int64_t n, int64_t k);
PackedWeight pack_int8(const int8_t* codes, const float* scales, int64_t n, int64_t k, int group);
PackedWeight pack_int4(const uint8_t* codes, const float* scales, const float* minimums, int64_t n, int64_t k, int group);

// The form in which the current ISA level's product takes its left operand for this weight.
ActivationSpec wanted(const PackedWeight& weight);

enum class Activation : uint8_t { silu, gelu_tanh };

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
  float softcap = 0.0f;
};
void linear(Pool& pool, const LinearArgs& args);

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
};
void gated_linear(Pool& pool, const GatedLinearArgs& args);

}  // namespace noria
