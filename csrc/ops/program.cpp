#include "ops/program.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "kernels/elementwise.h"

namespace noria {

namespace {

struct OpName {
  const char* operator()(const EmbedOp&) const { return "embed"; }
  const char* operator()(const NormOp&) const { return "norm"; }
  const char* operator()(const LinearOp&) const { return "linear"; }
  const char* operator()(const GatedLinearOp&) const { return "gated_linear"; }
  const char* operator()(const RopeCacheOp&) const { return "rope_cache"; }
  const char* operator()(const AttentionOp&) const { return "attention"; }
  const char* operator()(const SelectOp&) const { return "select"; }
};

// What a thread may ask for ahead: a part of its second-level cache.
constexpr int64_t kReadBytes = 256 << 10;
// Products of more rows compute longer than they wait for memory.
constexpr int64_t kReadingTokens = 16;

}  // namespace

Program::Program(Pool& pool, Graph graph, const ProgramLimits& limits)
    : pool_(pool), graph_(std::move(graph)), limits_(limits), plan_(plan_graph(graph_)) {
  if (limits.max_tokens < 1 || limits.max_outputs < 1 || limits.max_seqs < 1)
    throw std::invalid_argument("limits of a program must be positive");
  scan_uses();
  allocate();
  name_times();
  list_reads();
}

Program::~Program() { pool_.expect(nullptr); }

void Program::scan_uses() {
  const auto use_cache = [&](int layer, int kv_heads, int head_dim) {
    if (layers_ && (kv_heads != kv_heads_ || head_dim != head_dim_))
      throw std::invalid_argument("the layers of a graph must agree in kv_heads and head_dim");
    layers_ = std::max(layers_, layer + 1);
    kv_heads_ = kv_heads;
    head_dim_ = head_dim;
  };
  const auto tighten = [](int64_t& bound, int64_t limit) { bound = bound == 0 ? limit : std::min(bound, limit); };
  for (const GraphOp& op : graph_.ops) {
    if (const auto* embed = std::get_if<EmbedOp>(&op)) tighten(vocab_, embed->table->vocab);
    if (const auto* attention = std::get_if<AttentionOp>(&op))
      use_cache(attention->layer, attention->kv_heads, attention->head_dim);
    const auto* rope = std::get_if<RopeCacheOp>(&op);
    if (!rope) continue;
    use_cache(rope->layer, rope->kv_heads, rope->head_dim);
    if (rope->rotary_dim) tighten(positions_, rope->positions);
  }
}

void Program::allocate() {
  for (int64_t width : plan_.float_widths)
    float_buffers_.emplace_back(static_cast<size_t>(limits_.max_tokens * width) * sizeof(float));
  for (const ActivationSpec& spec : plan_.activations) activation_buffers_.emplace_back(spec, limits_.max_tokens);
  if (graph_.head) {
    logits_ = Buffer(static_cast<size_t>(limits_.max_outputs * graph_.head->n) * sizeof(float));
    const size_t rows = static_cast<size_t>(pool_.threads() * limits_.max_tokens);
    largest_ = Buffer(rows * sizeof(float));
    largest_ids_ = Buffer(rows * sizeof(int32_t));
  }
  size_t most = 1;
  for (const ValuePlan& value : plan_.values) most = std::max(most, value.forms.size());
  views_.resize(most);
  target_specs_.resize(most);
  targets_.resize(most);
}

// Two entries per op, itself and the conversion of its result, then the head.
void Program::name_times() {
  for (size_t i = 0; i < graph_.ops.size(); ++i) {
    const int64_t width = width_of(output_of(graph_.ops[i]));
    times_.push_back({std::visit(OpName{}, graph_.ops[i]), static_cast<int>(i), width});
    times_.push_back({"convert", static_cast<int>(i), width});
  }
  times_.push_back({"head", kNone, graph_.head ? graph_.head->n : 0});
}

void Program::clear_times() {
  for (OpTime& time : times_) time.nanoseconds = time.calls = time.rows = 0;
}

int64_t Program::buffer_bytes() const {
  size_t bytes = logits_.bytes() + largest_.bytes() + largest_ids_.bytes();
  for (const Buffer& buffer : float_buffers_) bytes += buffer.bytes();
  for (const ActivationBuffer& buffer : activation_buffers_)
    bytes += buffer.data.bytes() + buffer.scales.bytes() + buffer.sums.bytes();
  return static_cast<int64_t>(bytes);
}

template <class F> void Program::timed(size_t entry, int64_t rows, F&& work) {
  if (!timing_) return work();
  const auto start = std::chrono::steady_clock::now();
  work();
  const auto spent = std::chrono::steady_clock::now() - start;
  OpTime& time = times_[entry];
  time.nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
  time.rows += rows;
  ++time.calls;
}

// ---------------------------------------------------------------------------------------------------- reading ahead

void Program::list_reads() {
  const int threads = pool_.threads();
  for (const GraphOp& op : graph_.ops) {
    const size_t before = reads_.size();
    if (const auto* linear = std::get_if<LinearOp>(&op))
      reads_.push_back(first_reads(linear->parts.data(), static_cast<int>(linear->parts.size()), false, threads, kReadBytes));
    if (const auto* gated = std::get_if<GatedLinearOp>(&op)) {
      const PackedWeight* parts[] = {gated->gate, gated->up};
      reads_.push_back(first_reads(parts, 2, true, threads, kReadBytes));
    }
    product_after_.push_back(reads_.size() > before ? reads_.size() : 0);
  }
  if (graph_.head) reads_.push_back(first_reads(&graph_.head, 1, false, threads, kReadBytes));
}

// From a product on, whoever waits asks for the weights of the next one.
void Program::expect_after(size_t index) {
  const size_t next = product_after_[index];
  if (next && tokens_ <= kReadingTokens) pool_.expect(reads_[next % reads_.size()].data());
}

// ---------------------------------------------------------------------------------------------------- a step

void Program::check_cache(const KvCache* cache) const {
  if (!layers_) return;
  if (!cache) throw std::invalid_argument("this graph needs a cache");
  if (cache->layers() < layers_ || cache->shape().kv_heads != kv_heads_ || cache->shape().head_dim != head_dim_)
    throw std::invalid_argument("the cache's layers, kv_heads or head_dim are not the graph's");
}

int64_t Program::run(const BatchView& batch, int64_t table_rows, KvCache* cache) {
  check_cache(cache);
  check_batch(batch, {limits_.max_tokens, limits_.max_seqs, vocab_, positions_, table_rows},
              layers_ ? &cache->shape() : nullptr);
  tokens_ = batch.tokens;
  outputs_ = batch.outputs;
  hidden_rows_ = 0;
  if (tokens_ == 0) return 0;
  pool_.begin_step();
  scratch_.begin_step();
  for (size_t i = 0; i < graph_.ops.size(); ++i) execute(i, batch, cache);
  hidden_rows_ = graph_.hidden == kNone ? 0 : rows_of(graph_.hidden);
  return hidden_rows_;
}

void Program::execute(size_t index, const BatchView& batch, KvCache* cache) {
  const int out = output_of(graph_.ops[index]);
  if (rows_of(out) == 0) return;
  const OpPlan& plan = plan_.ops[index];
  expect_after(index);
  timed(2 * index, rows_of(out), [&] {
    std::visit([&](const auto& op) { run_op(op, plan, batch, cache); }, graph_.ops[index]);
  });
  if (!plan.converts_self && !plan.converted.empty()) timed(2 * index + 1, rows_of(out), [&] { convert_result(index); });
}

void Program::convert_result(size_t index) {
  const int out = output_of(graph_.ops[index]);
  const OpPlan& plan = plan_.ops[index];
  list_targets(out, plan);
  convert(pool_, floats(out), rows_of(out), width_of(out), target_specs_.data(), targets_.data(),
          static_cast<int>(plan.converted.size()));
}

void Program::run_op(const EmbedOp& op, const OpPlan&, const BatchView& batch, KvCache*) {
  embed(pool_, *op.table, batch.input_ids, batch.tokens, op.scale, floats(op.out));
}

void Program::run_op(const NormOp& op, const OpPlan& plan, const BatchView&, KvCache*) {
  list_targets(op.out, plan);
  const float* residual = op.residual == kNone ? nullptr : floats(op.residual);
  float* out = plan_.values[static_cast<size_t>(op.out)].floats ? floats(op.out) : nullptr;
  norm(pool_, floats(op.x), op.weight, op.eps, residual, rows_of(op.out), width_of(op.out), out, target_specs_.data(),
       targets_.data(), static_cast<int>(plan.converted.size()));
}

void Program::run_op(const LinearOp& op, const OpPlan& plan, const BatchView&, KvCache*) {
  view_operands(op.x, plan.operands, 0, rows_of(op.x));
  LinearArgs args;
  args.x = views_.data();
  args.x_of_part = plan.operands.of_part.data();
  args.parts = op.parts.data();
  args.part_count = static_cast<int>(op.parts.size());
  args.bias = op.bias;
  args.residual = op.residual == kNone ? nullptr : floats(op.residual);
  args.out = floats(op.out);
  args.out_stride = width_of(op.out);
  linear(pool_, args);
}

void Program::run_op(const GatedLinearOp& op, const OpPlan& plan, const BatchView&, KvCache*) {
  view_operands(op.x, plan.operands, 0, rows_of(op.x));
  GatedLinearArgs args;
  args.gate_x = &views_[static_cast<size_t>(plan.operands.of_part[0])];
  args.up_x = &views_[static_cast<size_t>(plan.operands.of_part[1])];
  args.gate = op.gate;
  args.up = op.up;
  args.gate_bias = op.gate_bias;
  args.up_bias = op.up_bias;
  args.activation = op.activation;
  if (plan.converts_self) {
    list_targets(op.out, plan);
    args.form = targets_[0];
    args.form_spec = target_specs_[0];
  } else {
    args.out = floats(op.out);
    args.out_stride = width_of(op.out);
  }
  gated_linear(pool_, args);
}

void Program::run_op(const RopeCacheOp& op, const OpPlan&, const BatchView& batch, KvCache* cache) {
  RopeCacheArgs args;
  args.qkv = floats(op.qkv);
  args.q = floats(op.out);
  args.heads = op.heads;
  args.rotary_dim = op.rotary_dim;
  args.cos = op.cos;
  args.sin = op.sin;
  args.q_norm = op.q_norm;
  args.k_norm = op.k_norm;
  args.eps = op.eps;
  rope_cache(pool_, args, batch, *cache, op.layer);
}

void Program::run_op(const AttentionOp& op, const OpPlan&, const BatchView& batch, KvCache* cache) {
  AttentionArgs args;
  args.q = floats(op.q);
  args.out = floats(op.out);
  args.heads = op.heads;
  args.scale = op.scale;
  args.window = op.window;
  args.softcap = op.softcap;
  attention(pool_, args, batch, *cache, op.layer, scratch_);
}

void Program::run_op(const SelectOp& op, const OpPlan&, const BatchView& batch, KvCache*) {
  select(pool_, floats(op.x), batch.output_rows, batch.outputs, width_of(op.out), floats(op.out));
}

// ---------------------------------------------------------------------------------------------------- the head

const float* Program::hidden() const {
  if (graph_.hidden == kNone) throw std::invalid_argument("this graph has no hidden value");
  return float_buffers_[static_cast<size_t>(plan_.values[static_cast<size_t>(graph_.hidden)].buffer)].as<float>();
}

LinearArgs Program::head_args(int64_t start, int64_t stop) {
  if (!graph_.head) throw std::invalid_argument("this graph has no head");
  if (start < 0 || stop < start || stop > hidden_rows_)
    throw std::invalid_argument("rows " + std::to_string(start) + "…" + std::to_string(stop) + " of " +
                                std::to_string(hidden_rows_) + " hidden rows");
  pool_.begin_step();
  if (hidden_rows_ <= kReadingTokens) pool_.expect(reads_[0].data());
  view_operands(graph_.hidden, plan_.head, start, stop - start);
  LinearArgs args;
  args.x = views_.data();
  args.x_of_part = plan_.head.of_part.data();
  args.parts = &graph_.head;
  args.part_count = 1;
  args.scale = graph_.logit_scale;
  args.softcap = graph_.logit_softcap;
  return args;
}

const float* Program::logits(int64_t start, int64_t stop) {
  if (stop - start > limits_.max_outputs)
    throw std::invalid_argument("logits of " + std::to_string(stop - start) + " hidden rows; at most " +
                                std::to_string(limits_.max_outputs) + " at once");
  LinearArgs args = head_args(start, stop);
  args.out = logits_.as<float>();
  args.out_stride = graph_.head->n;
  if (start != stop) timed(times_.size() - 1, stop - start, [&] { linear(pool_, args); });
  return logits_.as<float>();
}

void Program::largest(int64_t start, int64_t stop, int32_t* ids) {
  LinearArgs args = head_args(start, stop);
  const int64_t rows = stop - start;
  args.largest = largest_.as<float>();
  args.largest_ids = largest_ids_.as<int32_t>();
  args.largest_stride = rows;
  const int64_t count = pool_.threads() * rows;
  std::fill_n(args.largest, count, kNoLogit);
  std::fill_n(args.largest_ids, count, 0);
  if (rows) timed(times_.size() - 1, rows, [&] { linear(pool_, args); });
  for (int64_t row = 0; row < rows; ++row) {
    float most = args.largest[row];
    ids[row] = args.largest_ids[row];
    for (int64_t at = row + rows; at < count; at += rows) {
      if (args.largest[at] < most || (args.largest[at] == most && args.largest_ids[at] >= ids[row])) continue;
      most = args.largest[at];
      ids[row] = args.largest_ids[at];
    }
  }
}

// ---------------------------------------------------------------------------------------------------- views

float* Program::floats(int value) {
  return float_buffers_[static_cast<size_t>(plan_.values[static_cast<size_t>(value)].buffer)].as<float>();
}

Activations Program::form_view(int value, int form, int64_t first, int64_t rows) {
  const Form& made = plan_.values[static_cast<size_t>(value)].forms[static_cast<size_t>(form)];
  if (made.buffer != kNone) return activation_buffers_[static_cast<size_t>(made.buffer)].view(made.spec, first, rows);
  Activations x;
  x.spec = made.spec;
  x.rows = rows;
  x.data = floats(value) + first * width_of(value);
  return x;
}

void Program::view_operands(int value, const Operands& operands, int64_t first, int64_t rows) {
  for (size_t i = 0; i < operands.forms.size(); ++i) views_[i] = form_view(value, operands.forms[i], first, rows);
}

void Program::list_targets(int value, const OpPlan& plan) {
  for (size_t i = 0; i < plan.converted.size(); ++i) {
    const Form& form = plan_.values[static_cast<size_t>(value)].forms[static_cast<size_t>(plan.converted[i])];
    target_specs_[i] = form.spec;
    targets_[i] = &activation_buffers_[static_cast<size_t>(form.buffer)];
  }
}

}  // namespace noria
