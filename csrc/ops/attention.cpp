// Runs the tasks that attention_plan.h makes of a step.
#include "ops/attention.h"

#include <algorithm>
#include <cstring>

#include "core/isa.h"
#include "kernels/attention.h"
#include "ops/attention_plan.h"
#include "ops/owners.h"

namespace noria {

// Tasks that a thread takes at once: few enough that the last ones end nearly together.
static constexpr int64_t kRunsPerThread = 32, kMostTasks = 8;

namespace {

struct Step {
  const AttentionKernels& kernels;
  const AttentionArgs& args;
  const BatchView& batch;
  const KvCache& cache;
  const AttentionPlan& plan;
  int layer;
  int group;      // query heads per KV head
  int64_t dim, padded;
  float* partials;

  int64_t state_floats(int64_t rows) const { return attention_state_floats(rows, static_cast<int>(dim)); }
  const int32_t* blocks(int32_t sequence) const {
    return batch.block_tables + batch.slots[sequence] * batch.block_table_stride;
  }
};

// State of the online softmax of some rows.
struct Softmax {
  float* maximum;
  float* sum;
  float* accumulated;
  Softmax(const Step& step, float* memory, int64_t rows)
      : maximum(memory + rows * (step.padded + kSumLanes)), sum(memory + rows * step.padded), accumulated(memory) {}
};

// Rows [from, from + rows) of `next` into `into`.
void fold(const Step& step, const Softmax& into, const Softmax& next, int64_t from, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    step.kernels.fold(into.maximum + r, into.sum + r * kSumLanes, into.accumulated + r * step.padded, next.maximum + from + r,
                      next.sum + (from + r) * kSumLanes, next.accumulated + (from + r) * step.padded,
                      static_cast<int>(step.dim));
}

void copy(const Step& step, const Softmax& to, const Softmax& source, int64_t from, int64_t rows) {
  const size_t size = static_cast<size_t>(rows) * sizeof(float);
  std::memcpy(to.maximum, source.maximum + from, size);
  std::memcpy(to.sum, source.sum + from * kSumLanes, size * kSumLanes);
  std::memcpy(to.accumulated, source.accumulated + from * step.padded, size * static_cast<size_t>(step.padded));
}

// Where the heads of a KV head of one token begin in q or out.
int64_t token_offset(const Step& step, int32_t kv_head, int64_t token) {
  return (token * step.args.heads + int64_t{kv_head} * step.group) * step.dim;
}

void finish(const Step& step, const AttentionTask& task, const Softmax& state) {
  const int64_t first = step.batch.query_starts[task.sequence] + task.token, rows = int64_t{task.tokens} * step.group;
  for (int64_t r = 0; r < rows; ++r)
    step.kernels.finish(state.accumulated + r * step.padded, state.sum + r * kSumLanes,
                        step.args.out + token_offset(step, task.kv_head, first + r / step.group) + r % step.group * step.dim,
                        static_cast<int>(step.dim));
}

// A thread's memory: the kernel's work space, query rows and their positions, two states.
struct Memory {
  char* work;
  float* q;
  int32_t* positions;
  float *total, *part;
  Memory(const Step& step, char* memory, int64_t rows) : work(memory) {
    q = reinterpret_cast<float*>(memory + (attention_work_bytes(rows) + 63) / 64 * 64);
    positions = reinterpret_cast<int32_t*>(q + (rows * step.dim + 15) / 16 * 16);
    total = reinterpret_cast<float*>(positions + (rows + 15) / 16 * 16);
    part = total + step.state_floats(rows);
  }
  static int64_t bytes(const Step& step, int64_t rows) {
    const int64_t words = rows * step.dim + rows + 32 + 2 * step.state_floats(rows);
    return (words * 4 + attention_work_bytes(rows) + 255) / 64 * 64;
  }
};

// Adds the rows of a KV head of neighbouring tokens.
void add_rows(const Step& step, int32_t kv_head, int64_t first, int64_t tokens, const Memory& memory, int64_t& rows) {
  for (int64_t t = first; t < first + tokens; ++t) {
    std::memcpy(memory.q + rows * step.dim, step.args.q + token_offset(step, kv_head, t),
                static_cast<size_t>(step.group * step.dim) * sizeof(float));
    for (int i = 0; i < step.group; ++i) memory.positions[rows++] = step.batch.positions[t];
  }
}

// Asks for the queries of the task to come: another thread may have written them.
void fetch_rows(const Step& step, const AttentionTask& task) {
  const int64_t first = step.batch.query_starts[task.sequence] + task.token;
  for (int64_t t = first; t < first + task.tokens; ++t) {
    const float* q = step.args.q + token_offset(step, task.kv_head, t);
    for (int64_t i = 0; i < step.group * step.dim; i += 16) __builtin_prefetch(q + i, 0, 2);
  }
}

AttentionJob new_job(const Step& step, int32_t kv_head, const Memory& memory, int64_t rows) {
  AttentionJob job;
  job.cache = step.cache.units(step.layer, kv_head);
  job.q = memory.q;
  job.positions = memory.positions;
  job.rows = static_cast<int>(rows);
  job.window = step.args.window;
  job.scale = step.args.scale;
  job.softcap = step.args.softcap;
  job.work = memory.work;
  return job;
}

void attend(const Step& step, AttentionJob& job, const Softmax& state) {
  job.maximum = state.maximum;
  job.sum = state.sum;
  job.accumulated = state.accumulated;
  step.kernels.attend(job);
}

const AttentionPrefix* prefix_of(const Step& step, const AttentionTask& task) {
  return task.prefix < 0 ? nullptr : &step.plan.prefixes[static_cast<size_t>(task.prefix)];
}

Softmax prefix_state(const Step& step, const AttentionPrefix& prefix, int32_t kv_head, int segment) {
  const int64_t segments = prefix.last_segment() - prefix.first_segment();
  const int64_t index = kv_head * segments + segment - prefix.first_segment();
  return Softmax(step, step.partials + prefix.partial + index * step.state_floats(prefix.rows), prefix.rows);
}

// The keys of a segment that the task has to read itself.
KeyRange key_range(const Step& step, const AttentionTask& task, int segment) {
  const AttentionPrefix* prefix = prefix_of(step, task);
  const int begin = attention_begin(attention_position(step.batch, task), step.args.window);
  KeyRange range;
  range.base = step.cache.units(step.layer, task.kv_head).base;
  range.blocks = step.blocks(task.sequence);
  range.begin = std::max({begin, prefix ? prefix->end : 0, segment * kAttentionSegment});
  range.end = std::min(attention_end(step.batch, task), (segment + 1) * kAttentionSegment);
  return range;
}

// `after`: the task that this thread runs next, or null.
void run_task(const Step& step, const AttentionTask& task, const AttentionTask* after, char* thread_memory) {
  const int64_t rows = int64_t{task.tokens} * step.group;
  const Memory memory(step, thread_memory, rows);
  int64_t added = 0;
  add_rows(step, task.kv_head, step.batch.query_starts[task.sequence] + task.token, task.tokens, memory, added);
  if (after) fetch_rows(step, *after);
  AttentionJob job = new_job(step, task.kv_head, memory, rows);
  const Softmax total(step, memory.total, rows), part(step, memory.part, rows);
  const AttentionPrefix* prefix = prefix_of(step, task);
  for (int segment = task.first_segment; segment < task.last_segment; ++segment) {
    Softmax state = segment == task.first_segment ? total : part;
    if (task.partial >= 0)
      state = Softmax(step, step.partials + task.partial + (segment - task.first_segment) * step.state_floats(rows), rows);
    job.resume = prefix && segment < prefix->last_segment();
    if (job.resume) copy(step, state, prefix_state(step, *prefix, task.kv_head, segment), task.row, rows);
    job.keys = key_range(step, task, segment);
    if (segment + 1 < task.last_segment) job.next = key_range(step, task, segment + 1);
    else job.next = after ? key_range(step, *after, after->first_segment) : KeyRange();
    if (job.keys.begin < job.keys.end) {
      attend(step, job, state);
      job.same_rows = true;
    }
    if (task.partial < 0 && segment > task.first_segment) fold(step, total, part, 0, rows);
  }
  if (task.partial < 0) finish(step, task, total);
}

// One segment of a shared prefix for the rows of all members.
void run_prefix(const Step& step, const AttentionPrefixTask& task, char* thread_memory) {
  const AttentionPrefix& prefix = step.plan.prefixes[static_cast<size_t>(task.prefix)];
  const Memory memory(step, thread_memory, prefix.rows);
  const int32_t* members = step.plan.members.data() + prefix.first_member;
  int64_t rows = 0;
  for (int i = 0; i < prefix.members; ++i) {
    const int64_t first = step.batch.query_starts[members[i]];
    add_rows(step, task.kv_head, first, step.batch.query_starts[members[i] + 1] - first, memory, rows);
  }
  AttentionJob job = new_job(step, task.kv_head, memory, rows);
  job.keys.base = job.cache.base;
  job.keys.blocks = step.blocks(members[0]);
  job.keys.begin = std::max(prefix.begin, task.segment * kAttentionSegment);
  job.keys.end = std::min(prefix.end, (task.segment + 1) * kAttentionSegment);
  attend(step, job, prefix_state(step, prefix, task.kv_head, task.segment));
}

// Folds the segments of a shared context.
void run_shared(const Step& step, const AttentionTask& task) {
  const int64_t rows = int64_t{task.tokens} * step.group, each = step.state_floats(rows);
  float* states = step.partials + task.partial;
  const Softmax total(step, states, rows);
  for (int i = 1; i < task.last_segment - task.first_segment; ++i)
    fold(step, total, Softmax(step, states + i * each, rows), 0, rows);
  finish(step, task, total);
}

void grow(Buffer& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.bytes()) < bytes) buffer = Buffer(static_cast<size_t>(bytes + bytes / 4));
}

// Runs the prefix tasks and then `tasks`. A thread takes several neighbouring tasks at once. Where each has a share of its
// own, a task fetches the first keys of the next one even if that is of the next run: nearly always the same thread runs
// it.
void run_tasks(Pool& pool, const Step& step, const std::vector<AttentionPrefixTask>& prefix_tasks,
               const std::vector<AttentionTask>& tasks, char* memory, int64_t each) {
  const int64_t prefixes = static_cast<int64_t>(prefix_tasks.size()), count = static_cast<int64_t>(tasks.size());
  const int64_t run = std::clamp<int64_t>(count / (pool.threads() * kRunsPerThread), 1, kMostTasks);
  const auto run_some = [&](int64_t first, int64_t end, int64_t last, int thread) {
    for (int64_t i = first; i < end; ++i)
      run_task(step, tasks[static_cast<size_t>(i)], i + 1 < last ? &tasks[static_cast<size_t>(i) + 1] : nullptr,
               memory + thread * each);
  };
  if (prefixes == 0) {  // sequences ascend: each thread begins with those of its own rows
    const int owners = std::min(pool.threads(), kMostOwners);
    const int64_t runs = ((count + owners - 1) / owners + run - 1) / run;
    return run_owned(pool, owners, runs, [&](int owner, int64_t item, int thread) {
      const int64_t first = count * owner / owners, last = count * (owner + 1) / owners;
      run_some(first + item * run, std::min(first + (item + 1) * run, last), last, thread);
    });
  }
  pool.run(prefixes + (count + run - 1) / run, [&](int64_t index, int thread) {
    const int64_t first = (index - prefixes) * run, end = std::min(first + run, count);
    if (first >= 0) return run_some(first, end, end, thread);
    run_prefix(step, prefix_tasks[static_cast<size_t>(index)], memory + thread * each);
  });
}

}  // namespace

AttentionScratch::AttentionScratch() = default;
AttentionScratch::~AttentionScratch() = default;

const AttentionPlan& AttentionScratch::plan(const BatchView& batch, const CacheShape& cache, int heads, int window,
                                            int threads) {
  for (size_t i = 0; i < planned_; ++i)
    if (plans_[i]->heads == heads && plans_[i]->window == window) return *plans_[i];
  if (planned_ == plans_.size()) plans_.push_back(std::make_unique<AttentionPlan>());
  AttentionPlan& plan = *plans_[planned_++];
  plan.heads = heads;
  plan.window = window;
  plan_attention(batch, cache, threads, plan);
  return plan;
}

void attention(Pool& pool, const AttentionArgs& args, const BatchView& batch, const KvCache& cache, int layer,
               AttentionScratch& scratch) {
  const CacheShape& shape = cache.shape();
  const AttentionPlan& plan = scratch.plan(batch, shape, args.heads, args.window, pool.threads());
  Step step{*kernels().attention, args, batch, cache, plan, layer, args.heads / shape.kv_heads, shape.head_dim,
            padded_dim(shape.head_dim), nullptr};
  const int64_t each = Memory::bytes(step, plan.most_rows);
  grow(scratch.partials, plan.partial_floats * 4);
  grow(scratch.memory, each * pool.threads());
  step.partials = scratch.partials.as<float>();
  char* memory = scratch.memory.as<char>();
  run_tasks(pool, step, plan.prefix_tasks, plan.tasks, memory, each);
  if (!plan.tails.empty()) run_tasks(pool, step, {}, plan.tails, memory, each);
  if (plan.shared.empty()) return;
  pool.run(static_cast<int64_t>(plan.shared.size()),
           [&](int64_t index, int) { run_shared(step, plan.shared[static_cast<size_t>(index)]); });
}

}  // namespace noria
