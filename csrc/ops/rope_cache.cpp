// Splits qkv into heads, norms and rotates them and writes keys and values: one task is a run of tokens.
#include "core/isa.h"
#include "kernels/attention.h"
#include "ops/attention.h"

namespace noria {

static void rope_token(const AttentionKernels& kernels, const RopeCacheArgs& args, const BatchView& batch,
                       const KvCache& cache, int layer, int64_t token) {
  const int dim = cache.shape().head_dim, kv_heads = cache.shape().kv_heads, block_size = cache.shape().block_size;
  const float* x = args.qkv + token * (args.heads + 2 * kv_heads) * dim;
  RopeHead head;
  head.eps = args.eps;
  head.head_dim = dim;
  head.rotary_dim = args.rotary_dim;
  if (args.rotary_dim) {
    const int64_t row = int64_t{batch.positions[token]} * (args.rotary_dim / 2);
    head.cos = args.cos + row;
    head.sin = args.sin + row;
  }
  head.norm = args.q_norm;
  float* q = args.q + token * args.heads * dim;
  for (int64_t h = 0; h < args.heads; ++h) kernels.rotate(x + h * dim, q + h * dim, head);
  head.norm = args.k_norm;
  const int64_t at = batch.kv_positions[token];
  alignas(64) float key[kMaxHeadDim];
  for (int h = 0; h < kv_heads; ++h) {
    kernels.rotate(x + int64_t{args.heads + h} * dim, key, head);
    kernels.write(cache.units(layer, h), at / block_size, static_cast<int>(at % block_size), key,
                  x + int64_t{args.heads + kv_heads + h} * dim);
  }
}

void rope_cache(Pool& pool, const RopeCacheArgs& args, const BatchView& batch, KvCache& cache, int layer) {
  const AttentionKernels& kernels = *noria::kernels().attention;
  // Runs of 16 tokens amortise the hand-out of tasks; fewer tokens are spread evenly.
  const int64_t even = (batch.tokens + pool.threads() - 1) / pool.threads();
  const int64_t run = even < 16 ? (even > 0 ? even : 1) : 16;
  pool.run((batch.tokens + run - 1) / run, [&](int64_t index, int) {
    const int64_t end = (index + 1) * run < batch.tokens ? (index + 1) * run : batch.tokens;
    for (int64_t token = index * run; token < end; ++token) rope_token(kernels, args, batch, cache, layer, token);
  });
}

}  // namespace noria
