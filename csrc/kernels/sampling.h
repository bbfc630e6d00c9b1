// Kernel table of ops/sampling: one instance per ISA level. No threads, no allocation: one call is one tile or row.
#pragma once
#include "core/types.h"

namespace noria {

struct SamplingKernels {
  int placeholder;
};

}  // namespace noria
