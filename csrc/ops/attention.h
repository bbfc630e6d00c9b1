// Everything that touches the KV cache: rope + write, attention, block copies.
#pragma once
#include "core/pool.h"
#include "core/types.h"

namespace noria {

// Owns the memory of all layers. Pages are touched only as blocks are used.
class KvCache {
 public:
  KvCache(int layers, const CacheShape& shape);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
  const CacheShape& shape() const;
  CacheLayer layer(int index) const;
  void copy_blocks(const int32_t* pairs, int64_t count);  // [count][2]: source, destination

 private:
  struct State;
  State* state_;
};

struct RopeCacheArgs {
  const float* qkv = nullptr;      // [tokens][(heads + 2 * kv_heads) * head_dim]
  float* q = nullptr;              // [tokens][heads * head_dim]
  int heads = 0;
  int rotary_dim = 0;              // 0: no rotation
  const float* cos = nullptr;      // [positions][rotary_dim / 2]
  const float* sin = nullptr;
  const float* q_norm = nullptr;   // [head_dim] or null
  const float* k_norm = nullptr;
  float eps = 0;
};
void rope_cache(Pool& pool, const RopeCacheArgs& args, const BatchView& batch, KvCache& cache, int layer);

struct AttentionArgs {
  const float* q = nullptr;        // [tokens][heads * head_dim]
  float* out = nullptr;            // [tokens][heads * head_dim]
  int heads = 0;
  float scale = 1;
  int window = 0;                  // 0: all
  float softcap = 0;               // 0: none
};
// Work space that grows to the largest step and is then reused.
struct AttentionScratch {
  Buffer memory;
};
void attention(Pool& pool, const AttentionArgs& args, const BatchView& batch, const KvCache& cache, int layer,
               AttentionScratch& scratch);

}  // namespace noria
