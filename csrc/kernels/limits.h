// Kernel table of ops/limits: what this level's instructions can do at best, for measurements. One instance per ISA level.
#pragma once
#include <cstdint>

namespace noria {

struct LimitKernels {
  // `turns` turns of a loop of independent products whose operands and sums never leave the registers; returns the
  // operations done, a multiply-add being two. These are the instructions of this level's matrix products.
  int64_t (*int8)(int64_t turns);
  int64_t (*bf16)(int64_t turns);
  int64_t (*f32)(int64_t turns);
  // Their names, for people.
  const char *int8_name, *bf16_name, *f32_name;
  // Loads `bytes` (a multiple of kReadBytes) once, in ascending order. `ahead`: asks for the line so many bytes further on
  // into the second-level cache, as the products do; 0: only the processor itself looks ahead.
  void (*read)(const char* data, int64_t bytes, int64_t ahead);
};

constexpr int64_t kReadBytes = 512;

}  // namespace noria
