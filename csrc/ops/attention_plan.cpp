#include "ops/attention_plan.h"

namespace noria {

static constexpr int kFewerRows = 48;   // query rows of a task (or the heads of one token) where tasks are few
static constexpr int kRows = 144;       // most query rows of a task elsewhere: keys and values are fetched less often
static constexpr int kFewRows = 24;     // so many rows of a sequence, or one token's, may join others
static constexpr int kWorth = 256;      // key positions saved by sharing, in all, that pay for another round of tasks

namespace {

struct Planner {
  const BatchView& batch;
  const CacheShape& cache;
  int threads;
  AttentionPlan& plan;
  int group;  // query heads per KV head
  std::vector<int32_t> prefix_of, row_of;  // [seqs]

  int tokens(int32_t s) const { return batch.query_starts[s + 1] - batch.query_starts[s]; }
  const int32_t* table(int32_t s) const { return batch.block_tables + batch.slots[s] * batch.block_table_stride; }
  int full_blocks(int32_t s) const { return batch.kv_lengths[s] / cache.block_size; }
  int begin(const AttentionTask& task) const { return attention_begin(attention_position(batch, task), plan.window); }
  int end(const AttentionTask& task) const { return attention_end(batch, task); }
  int64_t state_floats(int64_t rows) const { return attention_state_floats(rows, cache.head_dim); }
  // Key positions times tokens that are the task's own.
  int64_t cost(const AttentionTask& task) const {
    int first = begin(task);
    if (task.prefix >= 0) first = std::max(first, plan.prefixes[static_cast<size_t>(task.prefix)].end);
    return int64_t{end(task) - first} * task.tokens;
  }

  // ---- shared prefixes

  struct Run {
    size_t first, last;
    int end;
  };

  // Full tiles that two contexts have in common, in key positions.
  int common(int32_t a, int32_t b) const {
    const int most = std::min(full_blocks(a), full_blocks(b));
    const auto found = std::mismatch(table(a), table(a) + most, table(b)).first - table(a);
    return static_cast<int>(found) * cache.block_size / kAttentionTile * kAttentionTile;
  }

  // Of neighbours in the order of their block tables, the runs to be taken together, so that most is saved. beside[i]: what
  // i and i + 1 have in common.
  int64_t choose(const std::vector<int>& beside, size_t first, size_t last, std::vector<Run>& runs) const {
    if (last - first < 2) return 0;
    size_t least = first;
    for (size_t i = first; i + 1 < last; ++i)
      if (beside[i] < beside[least]) least = i;
    const int64_t together = static_cast<int64_t>(last - first - 1) * beside[least];
    const size_t before = runs.size();
    const int64_t apart = choose(beside, first, least + 1, runs) + choose(beside, least + 1, last, runs);
    if (apart > together) return apart;
    runs.resize(before);
    if (together >= kWorth) runs.push_back({first, last, beside[least]});
    return together;
  }

  void find_prefixes() {
    std::vector<int32_t> order;
    for (int32_t s = 0; s < batch.seqs; ++s)
      if (tokens(s) == 1 || (tokens(s) > 0 && tokens(s) * group <= kFewRows)) order.push_back(s);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return std::lexicographical_compare(table(a), table(a) + full_blocks(a), table(b), table(b) + full_blocks(b));
    });
    std::vector<int> beside;
    for (size_t i = 0; i + 1 < order.size(); ++i) beside.push_back(common(order[i], order[i + 1]));
    std::vector<Run> runs;
    choose(beside, 0, order.size(), runs);
    for (const Run& run : runs) add_prefix(order, run);
  }

  int begin_of(int32_t s) const { return attention_begin(batch.positions[batch.query_starts[s]], plan.window); }

  // The members of a run whose windows reach into the common tiles, in prefixes of as many rows as a task takes.
  void add_prefix(const std::vector<int32_t>& order, const Run& run) {
    std::vector<int32_t> members;
    int first = run.end;
    int64_t rows = 0;
    for (size_t i = run.first; i < run.last; ++i) {
      if (begin_of(order[i]) >= run.end) continue;
      members.push_back(order[i]);
      first = std::min(first, begin_of(order[i]));
      rows += tokens(order[i]) * group;
    }
    if (static_cast<int64_t>(members.size() - 1) * (run.end - first) < kWorth || members.size() < 2) return;
    const int64_t tasks = (rows + kRows - 1) / kRows * cache.kv_heads * ((run.end - first) / kAttentionSegment + 1);
    const int64_t most = tasks < threads * 4 && threads > 1 ? kFewerRows : kRows;
    const int64_t each = (rows + (rows + most - 1) / most - 1) / ((rows + most - 1) / most);  // evenly
    for (size_t i = 0; i < members.size();) {
      AttentionPrefix prefix{static_cast<int32_t>(plan.members.size()), 0, 0, first, run.end, plan.partial_floats};
      for (; i < members.size() && (prefix.rows == 0 || prefix.rows + tokens(members[i]) * group <= each + group - 1); ++i) {
        prefix_of[static_cast<size_t>(members[i])] = static_cast<int32_t>(plan.prefixes.size());
        row_of[static_cast<size_t>(members[i])] = prefix.rows;
        prefix.rows += tokens(members[i]) * group;
        plan.members.push_back(members[i]);
        ++prefix.members;
      }
      const int segments = prefix.last_segment() - prefix.first_segment();
      plan.partial_floats += state_floats(prefix.rows) * cache.kv_heads * segments;
      plan.most_rows = std::max<int64_t>(plan.most_rows, prefix.rows);
      plan.prefixes.push_back(prefix);
    }
  }

  // Full segments come first: the last tasks, which one thread may be left alone with, are then the short ones.
  void list_prefix_tasks() {
    int last = 0;
    for (const AttentionPrefix& prefix : plan.prefixes) last = std::max(last, prefix.last_segment());
    for (int segment = 0; segment < last; ++segment)
      for (int32_t h = 0; h < cache.kv_heads; ++h)
        for (size_t i = 0; i < plan.prefixes.size(); ++i)
          if (segment >= plan.prefixes[i].first_segment() && segment < plan.prefixes[i].last_segment())
            plan.prefix_tasks.push_back({static_cast<int32_t>(i), h, segment});
  }

  // ---- tasks

  // All tasks of the step over whole contexts.
  void list_tasks() {
    int64_t many = 0;
    for (int32_t s = 0; s < batch.seqs; ++s) many += (tokens(s) * group + kRows - 1) / kRows * cache.kv_heads;
    const int run = std::max(1, (threads > 1 && many < threads * 8 ? kFewerRows : kRows) / group);
    for (int32_t s = 0; s < batch.seqs; ++s) {
      const int32_t prefix = prefix_of[static_cast<size_t>(s)], count = tokens(s);
      // A head's keys and values stay in the cache for all tokens. The last come first: what one thread may be left alone
      // with is then short.
      for (int32_t h = 0; h < cache.kv_heads; ++h) {
        for (int t = (count - 1) / run * run; count > 0 && t >= 0; t -= run) {
          AttentionTask task{s, h, t, std::min(run, count - t), 0, 0, -1, prefix, row_of[static_cast<size_t>(s)]};
          task.first_segment = begin(task) / kAttentionSegment;
          task.last_segment = (end(task) - 1) / kAttentionSegment + 1;
          (prefix < 0 ? plan.tasks : plan.tails).push_back(task);
        }
      }
    }
    plan.most_rows = std::max<int64_t>(plan.most_rows, std::max(run * group, group));
  }

  // Replaces tasks that would hold the other threads up by one task per segment.
  void share_long_contexts(std::vector<AttentionTask>& tasks) {
    if (threads == 1) return;
    int64_t all = 0;
    for (const AttentionTask& task : tasks) all += cost(task);
    const size_t count = tasks.size();
    for (size_t i = 0; i < count; ++i) {
      AttentionTask task = tasks[i];
      const int segments = task.last_segment - task.first_segment;
      if (segments < 2 || cost(task) <= std::max<int64_t>(kAttentionSegment, all / (threads * 4))) continue;
      const int64_t each = state_floats(int64_t{task.tokens} * group);
      task.partial = plan.partial_floats;
      plan.shared.push_back(task);
      for (int segment = 0; segment < segments; ++segment) {
        AttentionTask part = task;
        part.first_segment = task.first_segment + segment;
        part.last_segment = part.first_segment + 1;
        part.partial = task.partial + segment * each;
        if (segment == 0) tasks[i] = part;
        else tasks.push_back(part);
      }
      plan.partial_floats += segments * each;
    }
  }
};

}  // namespace

void plan_attention(const BatchView& batch, const CacheShape& cache, int threads, AttentionPlan& plan) {
  plan.members.clear();
  plan.prefixes.clear();
  plan.prefix_tasks.clear();
  plan.tasks.clear();
  plan.tails.clear();
  plan.shared.clear();
  plan.partial_floats = plan.most_rows = 0;
  const size_t seqs = static_cast<size_t>(batch.seqs);
  Planner planner{batch, cache, threads, plan, plan.heads / cache.kv_heads, std::vector<int32_t>(seqs, -1),
                  std::vector<int32_t>(seqs, 0)};
  planner.find_prefixes();
  planner.list_prefix_tasks();
  planner.list_tasks();
  planner.share_long_contexts(plan.tasks);
  planner.share_long_contexts(plan.tails);
}

}  // namespace noria
