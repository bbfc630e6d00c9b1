// Everything that touches the KV cache: rope + write, attention, block copies.
#pragma once
#include <memory>
#include <vector>

#include "core/pool.h"
#include "core/types.h"

namespace noria {

struct CacheUnits;  // kernels/attention.h: layout inside a block

// Owns the memory of all layers, block by block: a block of all layers lies together, so that pages are touched only as
// blocks are used and a block is copied in one piece.
class KvCache {
 public:
  // Throws std::invalid_argument unless head_dim is a multiple of 8 up to 256 and block_size one of 8, 16, 32, 64, 128.
  KvCache(int layers, const CacheShape& shape);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
  const CacheShape& shape() const { return shape_; }
  int layers() const { return layers_; }
  int64_t block_bytes() const { return block_bytes_; }
  void copy_blocks(const int32_t* pairs, int64_t count);  // [count][2]: source, destination
  CacheUnits units(int layer, int kv_head) const;
  // One token's key and value as floats, [head_dim] each: for tests and inspection.
  void read(int layer, int kv_head, int64_t kv_position, float* key, float* value) const;

 private:
  int layers_;
  CacheShape shape_;
  int64_t unit_bytes_ = 0, block_bytes_ = 0;
  size_t mapped_ = 0;
  char* memory_ = nullptr;
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

// What a step's threads do, one plan per window: the layers of a step share it.
struct AttentionPlan;

// Work space that grows to the largest step and is then reused.
class AttentionScratch {
 public:
  AttentionScratch();
  ~AttentionScratch();
  AttentionScratch(const AttentionScratch&) = delete;
  AttentionScratch& operator=(const AttentionScratch&) = delete;
  // A new batch: what was planned for the last one is forgotten.
  void begin_step() { planned_ = 0; }
  // The plan of the current batch for a layer with so many query heads and this window.
  const AttentionPlan& plan(const BatchView& batch, const CacheShape& cache, int heads, int window, int threads);

  Buffer memory;    // per thread
  Buffer partials;  // states of shared prefixes, and of contexts that several threads share

 private:
  std::vector<std::unique_ptr<AttentionPlan>> plans_;
  size_t planned_ = 0;  // plans_[0 … planned_) are of the current batch
};
// The tokens of a sequence have consecutive positions, the last being kv_length - 1.
void attention(Pool& pool, const AttentionArgs& args, const BatchView& batch, const KvCache& cache, int layer,
               AttentionScratch& scratch);

}  // namespace noria
