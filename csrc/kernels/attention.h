// Kernel table of ops/attention and ops/rope_cache: one instance per ISA level. No threads, no allocation.
//
// Inside the cache, everything is 32-bit words of `pack` elements: 1 (f32), 2 (bf16) or 4 (int8). A unit holds one block
// of one layer and KV head:
//   keys          [block_size / lanes][head_dim / pack][lanes] words of `pack` neighbouring dims of one token
//   values        [block_size / pack][head_dim] words of `pack` neighbouring tokens of one dim
//   key scales    [block_size] float, int8 only
//   value scales  [block_size] float, int8 only
// lanes is 16, or 8 where blocks have 8 tokens. A vector thus holds one dim (pair, quad) of many tokens for q·k and many
// dims of one token (pair, quad) for p·v: the operand of a plain, bf16 or VNNI dot product, without any shuffle.
// int8 keys are stored as code + 128, because VNNI wants one unsigned operand; values are signed (weights are positive).
#pragma once
#include "core/types.h"

namespace noria {

inline constexpr int kAttentionTile = 64;      // key positions whose scores are taken together, from position 0 on
inline constexpr int kAttentionSegment = 512;  // key positions of one online softmax; segments are folded in order
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kSumLanes = 16;           // at least a vector

struct CacheUnits {  // the units of one layer and KV head
  CacheType type = CacheType::f32;
  int head_dim = 0;
  int block_shift = 0;                                // log2(block_size)
  char* base = nullptr;                               // unit of block 0
  int64_t block_stride = 0;                           // bytes from a block's unit to the next block's
  int64_t values = 0, key_scales = 0, value_scales = 0;  // byte offsets in a unit
};

// Key positions [begin, end) of a sequence, within one segment; begin is a multiple of the tile.
struct KeyRange {
  const char* base = nullptr;       // CacheUnits::base
  const int32_t* blocks = nullptr;  // the sequence's block table
  int begin = 0, end = 0;
};

// Query rows of one KV head against a range of keys. A row sees the positions up to its own, within the window.
struct AttentionJob {
  CacheUnits cache;
  KeyRange keys;
  KeyRange next;                    // what this thread reads next (or nothing): fetched ahead
  const float* q = nullptr;         // [rows][head_dim]
  const int32_t* positions = nullptr;  // [rows]
  int rows = 0;
  bool same_rows = false;  // `work` was last used for the same q: it still holds what was made of them
  int window = 0;
  float scale = 1, softcap = 0;
  // The online softmax of the segment: started anew, or continued where earlier tiles of it have left it.
  // out[r] = accumulated / sum once all segments are folded.
  bool resume = false;
  float* maximum = nullptr;      // [rows]
  float* sum = nullptr;          // [rows][kSumLanes], to be added up at the end
  float* accumulated = nullptr;  // [rows][padded_dim]
  char* work = nullptr;          // attention_work_bytes(rows), 64-byte aligned
};

constexpr int64_t padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
// Scores, decays and the like per row, rows in bytes and in bfloat16, a tile of keys and values as floats, a segment of
// them as they are, and sums of tiles.
constexpr int64_t attention_work_bytes(int64_t rows) {
  const int64_t padded = (rows + 15) / 16 * 16;
  return padded * ((kAttentionTile + 24) * 4 + 6 * kMaxHeadDim + 2 * kAttentionTile) +
         2 * kAttentionTile * (2 + kMaxHeadDim) * 4 + kAttentionSegment * (2 * kMaxHeadDim + 3 * 4) + 24 * 1024;
}

// Tokens of one layer between the qkv product and attention: query and key heads are normed and rotated, keys and values
// go into the cache.
struct RopeJob {
  CacheUnits cache;         // of KV head 0
  int64_t unit_bytes = 0;   // from a KV head's unit to the next one's
  const float* qkv = nullptr;  // [tokens][(heads + 2 * kv_heads) * head_dim]
  float* q = nullptr;          // [tokens][heads * head_dim]
  int heads = 0, kv_heads = 0;
  const int32_t* positions = nullptr;     // [tokens]
  const int32_t* kv_positions = nullptr;  // [tokens]
  int64_t tokens = 0;
  int rotary_dim = 0;           // 0: no rotation
  const float* cos = nullptr;   // [positions][rotary_dim / 2]
  const float* sin = nullptr;
  const float* q_norm = nullptr;  // [head_dim] or null
  const float* k_norm = nullptr;
  float eps = 0;
};

struct AttentionKernels {
  void (*attend)(const AttentionJob& job);
  // Folds a later segment's state into an earlier one's, for one row.
  void (*fold)(float* maximum, float* sum, float* accumulated, const float* next_maximum, const float* next_sum,
               const float* next_accumulated, int head_dim);
  // out = accumulated / sum, for one row.
  void (*finish)(const float* accumulated, const float* sum, float* out, int head_dim);
  void (*rope)(const RopeJob& job);
};

}  // namespace noria
