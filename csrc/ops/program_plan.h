// Plans a graph's execution once: which forms of each value are made (float rows, bfloat16, int8 codes …), by whom, and
// in which buffer, a buffer being reused as soon as what it holds is no longer read.
#pragma once
#include <vector>

#include "ops/graph.h"

namespace noria {

// One form of a value that a product reads.
struct Form {
  ActivationSpec spec;
  int buffer = kNone;  // in Plan::activations; kNone: the float rows serve as they are
  int last_read = kNone;
};

struct ValuePlan {
  std::vector<Form> forms;
  bool floats = false;      // float rows are made
  int last_read = kNone;    // of the float rows: index of an op
  int buffer = kNone;       // of the float rows, in Plan::float_widths
  bool handed_on = false;   // its last reader writes its own result there
  bool pinned = false;      // read after the last op
};

// What a product reads: distinct forms of its operand, and which one each part takes.
struct Operands {
  std::vector<int> forms;    // indices into ValuePlan::forms
  std::vector<int> of_part;  // indices into `forms`
};

struct OpPlan {
  Operands operands;          // products only
  bool converts_self = false; // the op writes its result's forms itself (a norm, mostly a gated product)
  std::vector<int> converted; // forms of the result that have a buffer: what to convert it into
};

struct Plan {
  std::vector<ValuePlan> values;
  std::vector<OpPlan> ops;
  Operands head;
  std::vector<int64_t> float_widths;        // floats per row of each float buffer
  std::vector<ActivationSpec> activations;  // of each activation buffer
};

// The value that an op makes.
int output_of(const GraphOp& op);
// Throws std::invalid_argument where widths, rows or order do not fit together.
Plan plan_graph(const Graph& graph);

}  // namespace noria
