// Splits qkv into heads, norms and rotates them and writes keys and values: one task is a run of tokens.
#include <algorithm>

#include "core/isa.h"
#include "kernels/attention.h"
#include "ops/attention.h"
#include "ops/owners.h"

namespace noria {

// Fewer tokens are not worth a task of their own (about half a microsecond).
static constexpr int64_t kLeastTokens = 4;
// Enough that the last ones end nearly together, and that others do what a descheduled thread leaves.
static constexpr int64_t kTasksPerThread = 4;

static RopeJob whole_job(const RopeCacheArgs& args, const BatchView& batch, const KvCache& cache, int layer) {
  RopeJob job;
  job.cache = cache.units(layer, 0);
  job.unit_bytes = cache.units(layer, 1).base - job.cache.base;
  job.qkv = args.qkv;
  job.q = args.q;
  job.heads = args.heads;
  job.kv_heads = cache.shape().kv_heads;
  job.positions = batch.positions;
  job.kv_positions = batch.kv_positions;
  job.tokens = batch.tokens;
  job.rotary_dim = args.rotary_dim;
  job.cos = args.cos;
  job.sin = args.sin;
  job.q_norm = args.q_norm;
  job.k_norm = args.k_norm;
  job.eps = args.eps;
  return job;
}

void rope_cache(Pool& pool, const RopeCacheArgs& args, const BatchView& batch, KvCache& cache, int layer) {
  const AttentionKernels& kernels = *noria::kernels().attention;
  const RopeJob whole = whole_job(args, batch, cache, layer);
  const int64_t dim = cache.shape().head_dim, tokens = batch.tokens;
  run_rows(pool, tokens, (tokens + kLeastTokens - 1) / kLeastTokens, kTasksPerThread, [&](int64_t first, int64_t count) {
    RopeJob job = whole;
    job.qkv += first * (job.heads + 2 * job.kv_heads) * dim;
    job.q += first * job.heads * dim;
    job.positions += first;
    job.kv_positions += first;
    job.tokens = count;
    kernels.rope(job);
  });
}

}  // namespace noria
