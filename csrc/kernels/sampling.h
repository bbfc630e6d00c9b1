// Kernel table of ops/sampling: one instance per ISA level. No threads, no allocation: one call is one pass over a row
// (or over a list of candidates). NaN counts as minus infinity everywhere. Sums are in double, in one fixed order.
#pragma once
#include "core/types.h"

namespace noria {

inline constexpr int64_t kSamplingChunk = 256;  // tokens whose largest logit or sum is kept
inline constexpr int64_t kColumns = 16;
inline constexpr int kThresholds = 7;

constexpr int64_t sampling_chunks(int64_t n) { return (n + kSamplingChunk - 1) / kSamplingChunk; }

// What one pass over a row yields.
struct RowScan {
  float largest;
  double total;  // of exp((x[i] - largest) * factor)
};

struct SamplingKernels {
  // maxima[chunks], and sums[chunks] of exp((x[i] - largest) * factor). The logits are read once.
  RowScan (*scan)(const float* x, int64_t n, float factor, float* maxima, double* sums);
  // maxima[chunks]; returns the largest.
  float (*maxima)(const float* x, int64_t n, float* maxima);
  // Of each chunk, the maxima of kColumns columns (tokens i, i + kColumns …): out[chunks * kColumns].
  void (*columns)(const float* x, int64_t n, float* out);
  // e[i] = exp((x[i] - largest) * factor), sums[chunks]; returns the sum. e may be null.
  double (*exponentials)(const float* x, int64_t n, float largest, float factor, float* e, double* sums);
  // Sums of the e[i] >= threshold: sums[chunks]; returns the sum.
  double (*kept_sums)(const float* e, int64_t n, float threshold, double* sums);
  // masses[j] = sum of the e[i] >= thresholds[j], for kThresholds of them.
  void (*masses)(const float* e, int64_t n, const float* thresholds, double* masses);
  // Values and indices (either may be null) of low <= x[i] < high in ascending index; returns their number. Buffers need
  // room for 16 more.
  int64_t (*collect)(const float* x, int64_t n, float low, float high, float* values, int32_t* indices);
  int64_t (*count_above)(const float* x, int64_t n, float value);
  // x[i] becomes minus infinity where bit i % 32 of bits[i / 32] is 0.
  void (*forbid)(float* x, int64_t n, const uint32_t* bits);
};

}  // namespace noria
