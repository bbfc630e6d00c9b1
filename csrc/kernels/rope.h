// Rotation of a head and its way into the cache; entries of AttentionKernels (attention.h) that rope.cpp defines.
#pragma once
#include "kernels/attention.h"

namespace noria::NORIA_ISA {

void rotate_head(const float* x, float* out, const RopeHead& head);
void write_token(const CacheUnits& cache, int64_t block, int offset, const float* key, const float* value);

}  // namespace noria::NORIA_ISA
