// Rotation of heads and their way into the cache: an entry of AttentionKernels (attention.h) that rope.cpp defines.
#pragma once
#include "kernels/attention.h"

namespace noria::NORIA_ISA {

void rope_tokens(const RopeJob& job);

}  // namespace noria::NORIA_ISA
