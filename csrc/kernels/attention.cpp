#include "kernels/attention.h"

namespace noria::NORIA_ISA {

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {0};

}  // namespace noria::NORIA_ISA
