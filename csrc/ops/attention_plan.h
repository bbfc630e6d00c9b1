// How the attention of a step is cut into tasks. The cut never changes a result: segments are always computed apart, tile
// by tile, and folded in ascending order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/types.h"
#include "kernels/attention.h"

namespace noria {

// Neighbouring query tokens of a sequence and one KV head, over segments [first_segment, last_segment).
struct AttentionTask {
  int32_t sequence, kv_head, token, tokens;
  int32_t first_segment, last_segment;
  int64_t partial;  // floats into the partial results, -1: the task covers all segments and writes the output
  int32_t prefix;   // the shared prefix whose states the task goes on from, -1: none
  int32_t row;      // of the prefix's rows, the task's first
};

// Sequences with few query tokens whose contexts begin with the same blocks: their rows meet these keys together.
struct AttentionPrefix {
  int32_t first_member, members;  // in AttentionPlan::members
  int32_t rows;                   // of all members, per KV head
  int32_t begin, end;             // key positions, multiples of the tile
  int64_t partial;                // floats: states [kv_heads][segments]
  int first_segment() const { return begin / kAttentionSegment; }
  int last_segment() const { return (end - 1) / kAttentionSegment + 1; }
};
struct AttentionPrefixTask {
  int32_t prefix, kv_head, segment;
};

// Floats of the state of an online softmax.
constexpr int64_t attention_state_floats(int64_t rows, int head_dim) {
  return rows * (padded_dim(head_dim) + kSumLanes) + (rows + 15) / 16 * 16;
}

struct AttentionPlan {
  int heads = 0, window = 0;
  int64_t most_rows = 0;       // of a task
  int64_t partial_floats = 0;
  std::vector<int32_t> members;
  std::vector<AttentionPrefix> prefixes;
  // To be run in this order, each list by all threads at once.
  std::vector<AttentionPrefixTask> prefix_tasks;  // … together with `tasks`
  std::vector<AttentionTask> tasks;               // of sequences that share nothing
  std::vector<AttentionTask> tails;               // what follows a shared prefix
  std::vector<AttentionTask> shared;              // contexts whose segments several threads computed: to be folded
};

// First position of a task's tokens, and the key positions [begin, end) that they see; begin is on a tile.
inline int attention_position(const BatchView& batch, const AttentionTask& task) {
  return batch.positions[batch.query_starts[task.sequence] + task.token];
}
inline int attention_begin(int position, int window) {
  return window ? std::max(0, position - window + 1) / kAttentionTile * kAttentionTile : 0;
}
inline int attention_end(const BatchView& batch, const AttentionTask& task) {
  return attention_position(batch, task) + task.tokens;
}

// Refills `plan`, whose heads and window are set.
void plan_attention(const BatchView& batch, const CacheShape& cache, int threads, AttentionPlan& plan);

}  // namespace noria
