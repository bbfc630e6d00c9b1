// Cuts the attention of a step into tasks: a few neighbouring query tokens of a sequence with one KV head, over all their
// segments, or over one where a context is so long that threads must share it. The cut never changes a result: segments
// are always computed apart and folded in ascending order.
#include "ops/attention.h"

#include <algorithm>
#include <cstring>

#include "core/isa.h"
#include "kernels/attention.h"

namespace noria {

static constexpr int kRows = 48;  // most query rows of a task (or the heads of one token)

namespace {

struct Step {
  const AttentionKernels& kernels;
  const AttentionArgs& args;
  const BatchView& batch;
  const KvCache& cache;
  int layer;
  int group;      // query heads per KV head
  int64_t dim, padded;
  float* partials;

  int position(const AttentionTask& task) const { return batch.positions[batch.query_starts[task.sequence] + task.token]; }
  // Key positions [begin, end) that the task's tokens see; begin on a tile.
  int begin(const AttentionTask& task) const {
    const int low = args.window ? std::max(0, position(task) - args.window + 1) : 0;
    return low / kAttentionTile * kAttentionTile;
  }
  int end(const AttentionTask& task) const { return position(task) + task.tokens; }
  int64_t partial_floats(int64_t rows) const { return rows * (padded + kSumLanes) + (rows + 15) / 16 * 16; }
};

// State of the online softmax of some rows.
struct Softmax {
  float* maximum;
  float* sum;
  float* accumulated;
  Softmax(const Step& step, float* memory, int64_t rows)
      : maximum(memory + rows * (step.padded + kSumLanes)), sum(memory + rows * step.padded), accumulated(memory) {}
};

void fold(const Step& step, const Softmax& into, const Softmax& next, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    step.kernels.fold(into.maximum + r, into.sum + r * kSumLanes, into.accumulated + r * step.padded, next.maximum + r,
                      next.sum + r * kSumLanes, next.accumulated + r * step.padded, static_cast<int>(step.dim));
}

// Address of row r of a task in q or out.
int64_t row_offset(const Step& step, const AttentionTask& task, int64_t r) {
  const int64_t token = step.batch.query_starts[task.sequence] + task.token + r / step.group;
  return (token * step.args.heads + int64_t{task.kv_head} * step.group + r % step.group) * step.dim;
}

void finish(const Step& step, const AttentionTask& task, const Softmax& state) {
  const int64_t rows = int64_t{task.tokens} * step.group;
  for (int64_t r = 0; r < rows; ++r)
    step.kernels.finish(state.accumulated + r * step.padded, state.sum + r * kSumLanes, step.args.out + row_offset(step, task, r),
                        static_cast<int>(step.dim));
}

int64_t thread_bytes(const Step& step, int64_t rows) {
  const int64_t floats = rows * step.dim + 2 * step.partial_floats(rows);
  return (floats * 4 + attention_work_bytes(rows) + 255) / 64 * 64;
}

KeyRange key_range(const Step& step, const AttentionTask& task, int segment) {
  KeyRange range;
  range.base = step.cache.units(step.layer, task.kv_head).base;
  range.blocks = step.batch.block_tables + step.batch.slots[task.sequence] * step.batch.block_table_stride;
  range.begin = std::max(step.begin(task), segment * kAttentionSegment);
  range.end = std::min(step.end(task), (segment + 1) * kAttentionSegment);
  return range;
}

// `after`: the task that this thread runs next, or null.
void run_task(const Step& step, const AttentionTask& task, const AttentionTask* after, char* memory) {
  const int64_t rows = int64_t{task.tokens} * step.group;
  AttentionJob job;
  job.work = memory;
  float* q = reinterpret_cast<float*>(memory + (attention_work_bytes(rows) + 63) / 64 * 64);
  for (int64_t t = 0; t < task.tokens; ++t)  // the heads of a KV head are neighbours
    std::memcpy(q + t * step.group * step.dim, step.args.q + row_offset(step, task, t * step.group),
                static_cast<size_t>(step.group * step.dim) * 4);
  float* states = q + (rows * step.dim + 15) / 16 * 16;
  const Softmax total(step, states, rows), part(step, states + step.partial_floats(rows), rows);
  job.cache = step.cache.units(step.layer, task.kv_head);
  job.q = q;
  job.rows = static_cast<int>(rows);
  job.rows_per_token = step.group;
  job.first_position = step.position(task);
  job.window = step.args.window;
  job.scale = step.args.scale;
  job.softcap = step.args.softcap;
  for (int segment = task.first_segment; segment < task.last_segment; ++segment) {
    Softmax state = segment == task.first_segment ? total : part;
    if (task.partial >= 0)
      state = Softmax(step, step.partials + task.partial + (segment - task.first_segment) * step.partial_floats(rows), rows);
    job.keys = key_range(step, task, segment);
    if (segment + 1 < task.last_segment) job.next = key_range(step, task, segment + 1);
    else job.next = after ? key_range(step, *after, after->first_segment) : KeyRange();
    job.maximum = state.maximum;
    job.sum = state.sum;
    job.accumulated = state.accumulated;
    step.kernels.attend(job);
    if (task.partial < 0 && segment > task.first_segment) fold(step, total, part, rows);
  }
  if (task.partial < 0) finish(step, task, total);
}

// Folds the segments of a shared context.
void run_shared(const Step& step, const AttentionTask& task) {
  const int64_t rows = int64_t{task.tokens} * step.group;
  const Softmax total(step, step.partials + task.partial, rows);
  for (int segment = task.first_segment + 1; segment < task.last_segment; ++segment)
    fold(step, total,
         Softmax(step, step.partials + task.partial + (segment - task.first_segment) * step.partial_floats(rows), rows), rows);
  finish(step, task, total);
}

// All tasks of the step over whole contexts; returns their cost in key positions times rows.
int64_t list_tasks(const Step& step, std::vector<AttentionTask>& tasks) {
  const int run = std::max(1, kRows / step.group);
  int64_t cost = 0;
  tasks.clear();
  for (int32_t s = 0; s < step.batch.seqs; ++s) {
    const int tokens = step.batch.query_starts[s + 1] - step.batch.query_starts[s];
    for (int t = 0; t < tokens; t += run) {
      for (int32_t h = 0; h < step.cache.shape().kv_heads; ++h) {
        AttentionTask task{s, h, t, std::min(run, tokens - t), 0, 0, -1};
        task.first_segment = step.begin(task) / kAttentionSegment;
        task.last_segment = (step.end(task) - 1) / kAttentionSegment + 1;
        cost += int64_t{step.end(task) - step.begin(task)} * task.tokens;
        tasks.push_back(task);
      }
    }
  }
  return cost;
}

// Replaces tasks that would hold the other threads up by one task per segment; returns the floats of partial results.
int64_t share_long_contexts(const Step& step, int64_t cost, int threads, AttentionScratch& scratch) {
  scratch.shared.clear();
  if (threads == 1) return 0;
  const int64_t fair = cost / (threads * 4);
  int64_t floats = 0;
  const size_t count = scratch.tasks.size();
  for (size_t i = 0; i < count; ++i) {
    AttentionTask task = scratch.tasks[i];
    const int segments = task.last_segment - task.first_segment;
    if (segments < 2 || int64_t{step.end(task) - step.begin(task)} * task.tokens <= fair) continue;
    const int64_t each = step.partial_floats(int64_t{task.tokens} * step.group);
    task.partial = floats;
    scratch.shared.push_back(task);
    for (int segment = 0; segment < segments; ++segment) {
      AttentionTask part = task;
      part.first_segment = task.first_segment + segment;
      part.last_segment = part.first_segment + 1;
      part.partial = floats + segment * each;
      if (segment == 0) scratch.tasks[i] = part;
      else scratch.tasks.push_back(part);
    }
    floats += segments * each;
  }
  return floats;
}

void grow(Buffer& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.bytes()) < bytes) buffer = Buffer(static_cast<size_t>(bytes + bytes / 4));
}

}  // namespace

void attention(Pool& pool, const AttentionArgs& args, const BatchView& batch, const KvCache& cache, int layer,
               AttentionScratch& scratch) {
  const CacheShape& shape = cache.shape();
  Step step{*kernels().attention, args, batch, cache, layer, args.heads / shape.kv_heads, shape.head_dim,
            padded_dim(shape.head_dim), nullptr};
  const int64_t cost = list_tasks(step, scratch.tasks);
  const int64_t floats = share_long_contexts(step, cost, pool.threads(), scratch);
  const int64_t rows = std::max(kRows, step.group), each = thread_bytes(step, rows);
  grow(scratch.partials, floats * 4);
  grow(scratch.memory, each * pool.threads());
  step.partials = scratch.partials.as<float>();
  // A thread takes several neighbouring tasks at once, so that it knows what to fetch ahead.
  const int64_t count = static_cast<int64_t>(scratch.tasks.size());
  const int64_t run = std::clamp<int64_t>(count / (pool.threads() * 8), 1, 16);
  pool.run((count + run - 1) / run, [&](int64_t index, int thread) {
    const int64_t end = std::min((index + 1) * run, count);
    for (int64_t i = index * run; i < end; ++i)
      run_task(step, scratch.tasks[i], i + 1 < end ? &scratch.tasks[i + 1] : nullptr, scratch.memory.as<char>() + thread * each);
  });
  if (scratch.shared.empty()) return;
  pool.run(static_cast<int64_t>(scratch.shared.size()), [&](int64_t index, int) { run_shared(step, scratch.shared[index]); });
}

}  // namespace noria
