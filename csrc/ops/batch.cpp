#include "ops/batch.h"

#include <stdexcept>
#include <string>

namespace noria {

namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check_range(const char* name, const int32_t* values, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < 0 || values[i] >= end)
      refuse(std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(values[i]) + " is outside 0…" +
             std::to_string(end - 1));
  }
}

void check_limit(const char* name, int64_t count, int64_t limit) {
  if (count > limit) refuse(std::to_string(count) + " " + name + " in one step, at most " + std::to_string(limit));
}

// A sequence's tokens end at kv_length - 1, and every block up to there is one of the cache's.
void check_sequence(const BatchView& batch, int64_t seq, const CacheShape& cache) {
  const int64_t first = batch.query_starts[seq], last = batch.query_starts[seq + 1];
  const int64_t length = batch.kv_lengths[seq];
  const std::string name = "sequence " + std::to_string(seq);
  if (first > last || last > batch.tokens) refuse(name + ": query_starts must ascend within the tokens");
  if (length < last - first) refuse(name + ": kv_length is below its number of tokens");
  const int64_t blocks = (length + cache.block_size - 1) / cache.block_size;
  if (blocks > batch.block_table_stride) refuse(name + ": kv_length is beyond its block table");
  for (int64_t i = first; i < last; ++i)
    if (batch.positions[i] != length - (last - i)) refuse(name + ": positions must be consecutive and end at kv_length - 1");
  const int32_t* table = batch.block_tables + batch.slots[seq] * batch.block_table_stride;
  check_range("block_tables", table, blocks, cache.num_blocks);
}

void check_cache_use(const BatchView& batch, const BatchBounds& bounds, const CacheShape& cache) {
  check_range("kv_positions", batch.kv_positions, batch.tokens, cache.num_blocks * cache.block_size);
  check_range("slots", batch.slots, batch.seqs, bounds.table_rows);
  if (batch.query_starts[0] != 0 || batch.query_starts[batch.seqs] != batch.tokens)
    refuse("query_starts must begin at 0 and end at the number of tokens");
  for (int64_t seq = 0; seq < batch.seqs; ++seq) check_sequence(batch, seq, cache);
}

}  // namespace

void check_batch(const BatchView& batch, const BatchBounds& bounds, const CacheShape* cache) {
  check_limit("tokens", batch.tokens, bounds.max_tokens);
  check_limit("sequences", batch.seqs, bounds.max_seqs);
  check_limit("output rows", batch.outputs, bounds.max_tokens);
  if (bounds.vocab) check_range("input_ids", batch.input_ids, batch.tokens, bounds.vocab);
  if (bounds.positions) check_range("positions", batch.positions, batch.tokens, bounds.positions);
  check_range("output_rows", batch.output_rows, batch.outputs, batch.tokens);
  if (cache) check_cache_use(batch, bounds, *cache);
}

}  // namespace noria
