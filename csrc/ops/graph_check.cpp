#include "ops/graph_check.h"

#include <stdexcept>
#include <string>

#include "ops/program_plan.h"

namespace noria {

namespace {

class Checker {
 public:
  explicit Checker(const Graph& graph) : graph_(graph), made_(graph.values.size(), false) {}

  void run() {
    for (op_ = 0; op_ < graph_.ops.size(); ++op_) {
      std::visit([&](const auto& op) { check(op); }, graph_.ops[op_]);
      const int out = output_of(graph_.ops[op_]);
      require(!made_[static_cast<size_t>(out)], "its result is made twice");
      made_[static_cast<size_t>(out)] = true;
    }
    if (graph_.hidden != kNone) input(graph_.hidden);
    if (!graph_.head) return;
    require(graph_.hidden != kNone, "the head needs a hidden value");
    require(graph_.head->k == input(graph_.hidden).width, "the head's width differs from the hidden value's");
  }

 private:
  void require(bool good, const char* message) const {
    if (!good) throw std::invalid_argument("op " + std::to_string(op_) + " of the graph: " + message);
  }

  const GraphValue& known(int v) const {
    require(v >= 0 && static_cast<size_t>(v) < graph_.values.size(), "a value is not in the graph");
    return graph_.values[static_cast<size_t>(v)];
  }

  const GraphValue& input(int v) const {
    const GraphValue& value = known(v);
    require(made_[static_cast<size_t>(v)], "it reads a value before that is made");
    return value;
  }

  void require_rows(int v, bool outputs) const { require(known(v).outputs == outputs, "rows (tokens, outputs) do not fit"); }

  void require_same(int v, const GraphValue& out) const {
    if (v == kNone) return;
    require(input(v).width == out.width, "widths differ");
    require_rows(v, out.outputs);
  }

  void require_product(const GraphValue& x, const PackedWeight* weight, const GraphValue& out) const {
    require(weight != nullptr, "a weight is missing");
    require(weight->k == x.width, "the weight's width differs from its operand's");
    require(x.outputs == out.outputs, "rows (tokens, outputs) do not fit");
  }

  void check(const EmbedOp& op) const {
    require(op.table && op.table->width == known(op.out).width, "the table's width differs from the result's");
    require_rows(op.out, false);
  }
  void check(const NormOp& op) const {
    require(op.x != kNone && op.weight, "an operand is missing");
    require_same(op.x, known(op.out));
    require_same(op.residual, known(op.out));
  }
  void check(const LinearOp& op) const {
    const GraphValue &x = input(op.x), &out = known(op.out);
    int64_t n = 0;
    require(!op.parts.empty(), "a product needs a weight");
    for (const PackedWeight* part : op.parts) {
      require_product(x, part, out);
      n += part->n;
    }
    require(n == out.width, "the parts' outputs differ from the result's width");
    require_same(op.residual, out);
  }
  void check(const GatedLinearOp& op) const {
    const GraphValue &x = input(op.x), &out = known(op.out);
    require_product(x, op.gate, out);
    require_product(x, op.up, out);
    require(op.gate->n == out.width && op.up->n == out.width, "gate, up and result differ in width");
  }
  void check(const RopeCacheOp& op) const {
    require_heads(op.layer, op.heads, op.kv_heads, op.head_dim);
    require(input(op.qkv).width == int64_t{op.heads + 2 * op.kv_heads} * op.head_dim, "qkv has the wrong width");
    require(known(op.out).width == int64_t{op.heads} * op.head_dim, "the queries have the wrong width");
    require(op.rotary_dim >= 0 && op.rotary_dim <= op.head_dim && op.rotary_dim % 2 == 0, "rotary_dim does not fit");
    require(op.rotary_dim == 0 || (op.cos && op.sin), "cos and sin are missing");
    require_rows(op.qkv, false);
    require_rows(op.out, false);
  }
  void check(const AttentionOp& op) const {
    require_heads(op.layer, op.heads, op.kv_heads, op.head_dim);
    const int64_t width = int64_t{op.heads} * op.head_dim;
    require(input(op.q).width == width && known(op.out).width == width, "queries or result have the wrong width");
    require(op.window >= 0, "the window is negative");
    require_rows(op.q, false);
    require_rows(op.out, false);
  }
  void check(const SelectOp& op) const {
    require(input(op.x).width == known(op.out).width, "widths differ");
    require_rows(op.x, false);
    require_rows(op.out, true);
  }

  void require_heads(int layer, int heads, int kv_heads, int head_dim) const {
    require(layer >= 0 && heads > 0 && kv_heads > 0 && head_dim > 0, "layer or heads are not positive");
    require(heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  }

  const Graph& graph_;
  std::vector<bool> made_;
  size_t op_ = 0;
};

}  // namespace

void check_graph(const Graph& graph) { Checker(graph).run(); }

}  // namespace noria
