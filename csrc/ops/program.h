// Runs a graph over batches: one call per step, no allocation and nothing of Python in it. The plan (program_plan.h) is
// made once; the buffers are sized by the limits and reused between ops.
#pragma once
#include <string>
#include <vector>

#include "ops/attention.h"
#include "ops/batch.h"
#include "ops/program_plan.h"

namespace noria {

struct ProgramLimits {
  int64_t max_tokens = 0;   // of a step
  int64_t max_outputs = 0;  // rows of logits at once
  int64_t max_seqs = 0;
};

// Time spent in one op of the graph, conversions of its result and the head apart.
struct OpTime {
  std::string name;  // "linear", "convert", …
  int op = kNone;    // index in the graph; kNone: the head
  int64_t width = 0; // of the result
  int64_t nanoseconds = 0, calls = 0, rows = 0;
};

class Program {
 public:
  // The pool and all that the graph points to must outlive the program. Throws std::invalid_argument.
  Program(Pool& pool, Graph graph, const ProgramLimits& limits);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Computes a batch and returns the number of hidden rows. `cache` may be null if no op uses it. Throws
  // std::invalid_argument for a batch that does not fit; the cache is then untouched.
  int64_t run(const BatchView& batch, int64_t table_rows, KvCache* cache);
  // Logits [stop - start][vocab] of hidden rows of the last run; valid until the next call.
  const float* logits(int64_t start, int64_t stop);
  // The lowest id of the largest logit of each of these rows, as Sampler would take it, without making the logits.
  void largest(int64_t start, int64_t stop, int32_t* ids);
  // Hidden rows [rows][width] of the last run; valid until the next run.
  const float* hidden() const;
  int64_t hidden_rows() const { return hidden_rows_; }

  const Graph& graph() const { return graph_; }
  const ProgramLimits& limits() const { return limits_; }
  int64_t buffer_bytes() const;

  void set_timing(bool on) { timing_ = on; }
  // Times since they were last cleared; conversions and the head as entries of their own.
  const std::vector<OpTime>& times() const { return times_; }
  void clear_times();

 private:
  void scan_uses();
  void allocate();
  void name_times();
  void list_reads();
  void expect_after(size_t index);
  void check_cache(const KvCache* cache) const;
  void execute(size_t index, const BatchView& batch, KvCache* cache);
  void convert_result(size_t index);
  LinearArgs head_args(int64_t start, int64_t stop);
  template <class F> void timed(size_t entry, int64_t rows, F&& work);

  void run_op(const EmbedOp& op, const OpPlan& plan, const BatchView& batch, KvCache* cache);
  void run_op(const NormOp& op, const OpPlan& plan, const BatchView& batch, KvCache* cache);
  void run_op(const LinearOp& op, const OpPlan& plan, const BatchView& batch, KvCache* cache);
  void run_op(const GatedLinearOp& op, const OpPlan& plan, const BatchView& batch, KvCache* cache);
  void run_op(const RopeCacheOp& op, const OpPlan& plan, const BatchView& batch, KvCache* cache);
  void run_op(const AttentionOp& op, const OpPlan& plan, const BatchView& batch, KvCache* cache);
  void run_op(const SelectOp& op, const OpPlan& plan, const BatchView& batch, KvCache* cache);

  int64_t rows_of(int value) const { return graph_.values[static_cast<size_t>(value)].outputs ? outputs_ : tokens_; }
  int64_t width_of(int value) const { return graph_.values[static_cast<size_t>(value)].width; }
  float* floats(int value);
  Activations form_view(int value, int form, int64_t first, int64_t rows);
  void view_operands(int value, const Operands& operands, int64_t first, int64_t rows);
  void list_targets(int value, const OpPlan& plan);

  Pool& pool_;
  Graph graph_;
  ProgramLimits limits_;
  Plan plan_;
  std::vector<Buffer> float_buffers_;
  std::vector<ActivationBuffer> activation_buffers_;
  Buffer logits_;
  Buffer largest_, largest_ids_;  // [threads][rows], of up to max_tokens rows
  AttentionScratch scratch_;
  int64_t tokens_ = 0, outputs_ = 0, hidden_rows_ = 0;

  // What the graph asks of batch and cache.
  int64_t vocab_ = 0, positions_ = 0;
  int layers_ = 0, kv_heads_ = 0, head_dim_ = 0;  // 0: the cache is not used

  // Reused from op to op.
  std::vector<Activations> views_;
  std::vector<ActivationSpec> target_specs_;
  std::vector<ActivationBuffer*> targets_;

  // Of each product, the head being the last: what its threads read first (Pool::expect).
  std::vector<std::vector<std::vector<Span>>> reads_;
  std::vector<size_t> product_after_;  // [ops]: of a product, the index in reads_ of the next one; else 0

  bool timing_ = false;
  std::vector<OpTime> times_;
};

}  // namespace noria
