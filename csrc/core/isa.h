// Which instruction set the kernels run on. Each level's kernels are compiled apart and reached through `Kernels`,
// a table of function pointers; drivers in ops/ hold no SIMD of their own.
#pragma once
#include <string>
#include <vector>

namespace noria {

struct LinearKernels;       // kernels/linear.h
struct ElementwiseKernels;  // kernels/elementwise.h
struct AttentionKernels;    // kernels/attention.h
struct SamplingKernels;     // kernels/sampling.h
struct LimitKernels;        // kernels/limits.h

struct Kernels {
  const char* name;
  const LinearKernels* linear;
  const ElementwiseKernels* elementwise;
  const AttentionKernels* attention;
  const SamplingKernels* sampling;
  const LimitKernels* limits;
};

// Levels that were compiled in and that this processor can run, best last.
std::vector<std::string> available_isas();
// The table in use: the best level, unless NORIA_ISA or select_isa named another.
const Kernels& kernels();
// Throws std::invalid_argument for a level that is not available. For tests: weights packed before must be packed anew.
void select_isa(const std::string& name);

}  // namespace noria
