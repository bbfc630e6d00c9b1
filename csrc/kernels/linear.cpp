#include "kernels/linear.h"

namespace noria::NORIA_ISA {

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {0};

}  // namespace noria::NORIA_ISA
