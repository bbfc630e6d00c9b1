// Splits qkv into heads, norms and rotates them and writes keys and values: one task is a run of tokens.
#include <algorithm>

#include "core/isa.h"
#include "kernels/attention.h"
#include "ops/attention.h"

namespace noria {

// Fewer tokens are not worth a task of their own (about half a microsecond).
static constexpr int64_t kLeastTokens = 4;
// Tasks per thread: enough that the last ones end nearly together, and that others do what a descheduled thread leaves.
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
  const int64_t tasks = std::min((tokens + kLeastTokens - 1) / kLeastTokens, pool.threads() * kTasksPerThread);
  pool.run(tasks, [&](int64_t task, int) {
    const int64_t first = tokens * task / tasks;
    RopeJob job = whole;
    job.qkv += first * (job.heads + 2 * job.kv_heads) * dim;
    job.q += first * job.heads * dim;
    job.positions += first;
    job.kv_positions += first;
    job.tokens = tokens * (task + 1) / tasks - first;
    kernels.rope(job);
  });
}

}  // namespace noria
