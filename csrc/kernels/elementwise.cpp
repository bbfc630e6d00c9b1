#include "kernels/elementwise.h"

namespace noria::NORIA_ISA {

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {0};

}  // namespace noria::NORIA_ISA
