#include "kernels/sampling.h"

namespace noria::NORIA_ISA {

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels = {0};

}  // namespace noria::NORIA_ISA
