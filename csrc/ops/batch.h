// The checks that a batch must pass before kernels index with it.
#pragma once
#include "core/types.h"

namespace noria {

struct BatchBounds {
  int64_t max_tokens = 0, max_seqs = 0;
  int64_t vocab = 0;       // 0: no op reads input ids
  int64_t positions = 0;   // rows of the shortest rotation table; 0: no op reads one
  int64_t table_rows = 0;  // rows of block_tables
};

// Throws std::invalid_argument if a number in `batch` leads outside of the cache, the tables or the limits. `cache` null:
// no op reads or writes the cache, so positions within it are not looked at.
void check_batch(const BatchView& batch, const BatchBounds& bounds, const CacheShape* cache);

}  // namespace noria
