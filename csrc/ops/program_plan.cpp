#include "ops/program_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/graph_check.h"

namespace noria {

namespace {

// Whether rows of floats are laid out as the spec's own rows: no copy is needed.
bool floats_serve(const ActivationSpec& spec) { return spec.format == Format::f32 && spec.stride() == spec.k; }

class Planner {
 public:
  explicit Planner(const Graph& graph) : graph_(graph) {
    plan_.values.resize(graph.values.size());
    plan_.ops.resize(graph.ops.size());
  }

  Plan run() {
    const int count = static_cast<int>(graph_.ops.size());
    for (int i = 0; i < count; ++i) std::visit([&](const auto& op) { note_reads(op, i); }, graph_.ops[size(i)]);
    pin_hidden();
    for (int i = 0; i < count; ++i) decide_conversion(i);
    for (int i = 0; i < count; ++i) assign_buffers(i);
    return std::move(plan_);
  }

 private:
  static size_t size(int i) { return static_cast<size_t>(i); }
  ValuePlan& value(int v) { return plan_.values[size(v)]; }

  // ---- which forms are read, and until when

  void read_floats(int v, int op) {
    if (v == kNone) return;
    value(v).floats = true;
    value(v).last_read = op;
  }

  Operands read_forms(int v, const std::vector<const PackedWeight*>& parts, int op) {
    Operands operands;
    for (const PackedWeight* part : parts) {
      const int form = find_form(v, wanted(*part));
      value(v).forms[size(form)].last_read = op;
      if (floats_serve(value(v).forms[size(form)].spec)) read_floats(v, op);
      auto known = std::find(operands.forms.begin(), operands.forms.end(), form);
      operands.of_part.push_back(static_cast<int>(known - operands.forms.begin()));
      if (known == operands.forms.end()) operands.forms.push_back(form);
    }
    return operands;
  }

  int find_form(int v, const ActivationSpec& spec) {
    std::vector<Form>& forms = value(v).forms;
    for (size_t i = 0; i < forms.size(); ++i)
      if (forms[i].spec == spec) return static_cast<int>(i);
    forms.push_back({spec, kNone, kNone});
    return static_cast<int>(forms.size()) - 1;
  }

  void note_reads(const EmbedOp&, int) {}
  void note_reads(const NormOp& op, int i) {
    read_floats(op.x, i);
    read_floats(op.residual, i);
  }
  void note_reads(const LinearOp& op, int i) {
    plan_.ops[size(i)].operands = read_forms(op.x, op.parts, i);
    read_floats(op.residual, i);
  }
  void note_reads(const GatedLinearOp& op, int i) { plan_.ops[size(i)].operands = read_forms(op.x, {op.gate, op.up}, i); }
  void note_reads(const RopeCacheOp& op, int i) { read_floats(op.qkv, i); }
  void note_reads(const AttentionOp& op, int i) { read_floats(op.q, i); }
  void note_reads(const SelectOp& op, int i) { read_floats(op.x, i); }

  void pin_hidden() {
    if (graph_.hidden == kNone) return;
    const int end = static_cast<int>(graph_.ops.size());
    read_floats(graph_.hidden, end);
    if (graph_.head) plan_.head = read_forms(graph_.hidden, {graph_.head}, end);
    value(graph_.hidden).pinned = true;
  }

  // ---- who converts

  void decide_conversion(int i) {
    const int out = output_of(graph_.ops[size(i)]);
    OpPlan& op = plan_.ops[size(i)];
    for (size_t f = 0; f < value(out).forms.size(); ++f)
      if (!floats_serve(value(out).forms[f].spec)) op.converted.push_back(static_cast<int>(f));
    op.converts_self = std::holds_alternative<NormOp>(graph_.ops[size(i)]) || writes_form(i, value(out));
    // All others write float rows, from which the forms are then converted.
    if (!op.converts_self) value(out).floats = true;
    value(out).last_read = std::max(value(out).last_read, i);
    for (Form& form : value(out).forms) form.last_read = std::max(form.last_read, i);
  }

  // A gated product makes its result 64 columns at a time: the only form that is read of it, if it fits there.
  bool writes_form(int i, const ValuePlan& out) const {
    return std::holds_alternative<GatedLinearOp>(graph_.ops[size(i)]) && !out.floats && out.forms.size() == 1 &&
           fits_tiles(out.forms[0].spec);
  }

  // ---- buffers, in execution order

  void assign_buffers(int i) {
    const GraphOp& op = graph_.ops[size(i)];
    ValuePlan& out = value(output_of(op));
    if (out.floats && !take_over_residual(op, i)) out.buffer = take_floats(graph_.values[size(output_of(op))].width);
    for (int form : plan_.ops[size(i)].converted) {
      Form& made = out.forms[size(form)];
      made.buffer = take_activation(made.spec);
    }
    for (ValuePlan& held : plan_.values) release(held, i);
  }

  // A residual that is not read again is added to in place.
  bool take_over_residual(const GraphOp& op, int i) {
    int residual = kNone, x = kNone;
    if (const auto* linear = std::get_if<LinearOp>(&op)) residual = linear->residual, x = linear->x;
    if (const auto* norm = std::get_if<NormOp>(&op)) residual = norm->residual;
    if (residual == kNone || residual == x || value(residual).last_read != i || value(residual).pinned) return false;
    value(output_of(op)).buffer = value(residual).buffer;
    value(residual).handed_on = true;
    return true;
  }

  void release(ValuePlan& held, int i) {
    if (held.pinned) return;
    if (held.buffer != kNone && held.last_read == i && !held.handed_on) free_floats_.push_back(held.buffer);
    for (const Form& form : held.forms)
      if (form.buffer != kNone && form.last_read == i) free_activations_.push_back(form.buffer);
  }

  // The narrowest free buffer that is wide enough; else the widest free one, widened; else a new one.
  int take_floats(int64_t width) {
    const auto width_of = [&](int buffer) { return plan_.float_widths[size(buffer)]; };
    auto best = free_floats_.end();
    for (auto it = free_floats_.begin(); it != free_floats_.end(); ++it) {
      const bool fits = width_of(*it) >= width;
      if (best == free_floats_.end()) best = it;
      else if (fits != (width_of(*best) >= width)) best = fits ? it : best;
      else if (fits ? width_of(*it) < width_of(*best) : width_of(*it) > width_of(*best)) best = it;
    }
    if (best == free_floats_.end()) {
      plan_.float_widths.push_back(width);
      return static_cast<int>(plan_.float_widths.size()) - 1;
    }
    const int buffer = *best;
    free_floats_.erase(best);
    plan_.float_widths[size(buffer)] = std::max(width_of(buffer), width);
    return buffer;
  }

  int take_activation(const ActivationSpec& spec) {
    for (auto it = free_activations_.begin(); it != free_activations_.end(); ++it) {
      const int buffer = *it;
      if (!(plan_.activations[size(buffer)] == spec)) continue;
      free_activations_.erase(it);
      return buffer;
    }
    plan_.activations.push_back(spec);
    return static_cast<int>(plan_.activations.size()) - 1;
  }

  const Graph& graph_;
  Plan plan_;
  std::vector<int> free_floats_, free_activations_;
};

}  // namespace

int output_of(const GraphOp& op) {
  return std::visit([](const auto& known) { return known.out; }, op);
}

Plan plan_graph(const Graph& graph) {
  check_graph(graph);
  return Planner(graph).run();
}

}  // namespace noria
