// Python: building a graph from the ops of noria.backends.base, and running it. A graph and its programs keep the weights,
// tables and vectors that they point to alive. A batch is checked once per step, in one pass over its arrays.
#include "ops/program.h"

#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>

#include "bindings/module.h"

namespace noria {

namespace {

using Floats = Array<const float>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

void require(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

struct BoundGraph {
  Graph graph;
  std::vector<nb::object> kept;  // weights and tables
  std::vector<Floats> vectors;   // arrays, each holding a reference

  int value(int64_t width, bool outputs) {
    graph.values.push_back({width, outputs});
    return static_cast<int>(graph.values.size()) - 1;
  }

  const float* keep(const std::optional<Floats>& values, int64_t size) {
    if (!values) return nullptr;
    require(static_cast<int64_t>(values->size()) == size, "a vector has the wrong length");
    vectors.push_back(*values);
    return values->data();
  }

  template <class T> const T* keep(nb::handle object) {
    kept.push_back(nb::borrow(object));
    return nb::cast<const T*>(object);
  }

  int64_t width(int v) const {
    require(v >= 0 && static_cast<size_t>(v) < graph.values.size(), "a value is not in the graph");
    return graph.values[static_cast<size_t>(v)].width;
  }

  void embed(nb::handle table, float scale, int out) {
    graph.ops.push_back(EmbedOp{keep<EmbeddingTable>(table), scale, out});
  }

  void norm(int x, Floats weight, float eps, std::optional<int> residual, int out) {
    graph.ops.push_back(NormOp{x, keep(weight, width(x)), eps, residual.value_or(kNone), out});
  }

  void linear(int x, nb::list parts, std::optional<Floats> bias, std::optional<int> residual, int out) {
    LinearOp op;
    op.x = x;
    for (nb::handle part : parts) op.parts.push_back(keep<PackedWeight>(part));
    op.bias = keep(bias, width(out));
    op.residual = residual.value_or(kNone);
    op.out = out;
    graph.ops.push_back(op);
  }

  void gated_linear(int x, nb::handle gate, nb::handle up, const std::string& activation, std::optional<Floats> gate_bias,
                    std::optional<Floats> up_bias, int out) {
    require(activation == "silu" || activation == "gelu_tanh", "activation must be silu or gelu_tanh");
    GatedLinearOp op;
    op.x = x;
    op.gate = keep<PackedWeight>(gate);
    op.up = keep<PackedWeight>(up);
    op.gate_bias = keep(gate_bias, width(out));
    op.up_bias = keep(up_bias, width(out));
    op.activation = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
    op.out = out;
    graph.ops.push_back(op);
  }

  void rope_cache(int qkv, int layer, int heads, int kv_heads, int head_dim, std::optional<Floats> cos,
                  std::optional<Floats> sin, std::optional<Floats> q_norm, std::optional<Floats> k_norm, float eps, int out) {
    RopeCacheOp op;
    op.qkv = qkv;
    op.layer = layer;
    op.heads = heads;
    op.kv_heads = kv_heads;
    op.head_dim = head_dim;
    require(cos.has_value() == sin.has_value(), "cos and sin come together");
    if (cos) {
      require(cos->ndim() == 2 && sin->ndim() == 2 && cos->shape(0) == sin->shape(0) && cos->shape(1) == sin->shape(1),
              "cos and sin must be [positions, rotary_dim / 2]");
      op.positions = static_cast<int64_t>(cos->shape(0));
      op.rotary_dim = static_cast<int>(2 * cos->shape(1));
      op.cos = keep(cos, static_cast<int64_t>(cos->size()));
      op.sin = keep(sin, static_cast<int64_t>(sin->size()));
    }
    op.q_norm = keep(q_norm, head_dim);
    op.k_norm = keep(k_norm, head_dim);
    op.eps = eps;
    op.out = out;
    graph.ops.push_back(op);
  }

  void attention(int q, int layer, int heads, int kv_heads, int head_dim, float scale, int window, float softcap, int out) {
    graph.ops.push_back(AttentionOp{q, layer, heads, kv_heads, head_dim, scale, window, softcap, out});
  }

  void select(int x, int out) { graph.ops.push_back(SelectOp{x, out}); }

  void finish(std::optional<int> hidden, nb::object head, float scale, float softcap) {
    graph.hidden = hidden.value_or(kNone);
    graph.head = head.is_none() ? nullptr : keep<PackedWeight>(head);
    graph.logit_scale = scale;
    graph.logit_softcap = softcap;
  }
};

int64_t run(Program& program, Ints input_ids, Ints positions, Ints kv_positions, Ints query_starts, Ints kv_lengths,
            Ints slots, Table block_tables, Ints output_rows, KvCache* cache) {
  const size_t tokens = input_ids.size(), seqs = slots.size();
  require(positions.size() == tokens && kv_positions.size() == tokens, "input_ids, positions and kv_positions differ in length");
  require(query_starts.size() == seqs + 1 && kv_lengths.size() == seqs,
          "slots [seqs], kv_lengths [seqs] and query_starts [seqs + 1] do not agree");
  BatchView batch;
  batch.tokens = static_cast<int64_t>(tokens);
  batch.seqs = static_cast<int64_t>(seqs);
  batch.outputs = static_cast<int64_t>(output_rows.size());
  batch.input_ids = input_ids.data();
  batch.positions = positions.data();
  batch.kv_positions = kv_positions.data();
  batch.query_starts = query_starts.data();
  batch.kv_lengths = kv_lengths.data();
  batch.slots = slots.data();
  batch.block_tables = block_tables.data();
  batch.block_table_stride = static_cast<int64_t>(block_tables.shape(1));
  batch.output_rows = output_rows.data();
  nb::gil_scoped_release release;
  return program.run(batch, static_cast<int64_t>(block_tables.shape(0)), cache);
}

// The arrays look into the program's own buffers and keep it alive.
FloatRows view(nb::handle program, const float* data, int64_t rows, int64_t width) {
  return FloatRows(const_cast<float*>(data), {static_cast<size_t>(rows), static_cast<size_t>(width)}, program);
}

FloatRows logits(nb::handle self, int64_t start, int64_t stop) {
  auto& program = nb::cast<Program&>(self);
  const float* data = nullptr;
  {
    nb::gil_scoped_release release;
    data = program.logits(start, stop);
  }
  return view(self, data, stop - start, program.graph().head->n);
}

nb::ndarray<nb::numpy, int32_t> largest(Program& program, int64_t start, int64_t stop) {
  require(start >= 0 && start <= stop && stop <= program.hidden_rows(), "rows outside the hidden rows");
  auto* ids = new int32_t[static_cast<size_t>(stop - start) + 1];
  nb::capsule owner(ids, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  {
    nb::gil_scoped_release release;
    program.largest(start, stop, ids);
  }
  return nb::ndarray<nb::numpy, int32_t>(ids, {static_cast<size_t>(stop - start)}, owner);
}

FloatRows hidden(nb::handle self) {
  const auto& program = nb::cast<const Program&>(self);
  const float* data = program.hidden();
  const int64_t width = program.graph().values[static_cast<size_t>(program.graph().hidden)].width;
  return view(self, data, program.hidden_rows(), width);
}

nb::list times(const Program& program) {
  nb::list entries;
  for (const OpTime& time : program.times()) {
    if (time.calls == 0) continue;
    nb::dict entry;
    entry["name"] = time.name;
    entry["op"] = time.op == kNone ? nb::none() : nb::cast(time.op);
    entry["width"] = time.width;
    entry["seconds"] = 1e-9 * static_cast<double>(time.nanoseconds);
    entry["calls"] = time.calls;
    entry["rows"] = time.rows;
    entries.append(entry);
  }
  return entries;
}

void bind_graph(nb::module_& m) {
  const auto none = nb::none();
  nb::class_<BoundGraph>(m, "Graph", "A graph of ops over values, appended in execution order.")
      .def(nb::init<>())
      .def("value", &BoundGraph::value, nb::arg("width"), nb::arg("outputs"), "Adds a value and returns its index.")
      .def("embed", &BoundGraph::embed, nb::arg("table"), nb::arg("scale"), nb::arg("out"))
      .def("norm", &BoundGraph::norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("residual").none(),
           nb::arg("out"))
      .def("linear", &BoundGraph::linear, nb::arg("x"), nb::arg("parts"), nb::arg("bias").none(), nb::arg("residual").none(),
           nb::arg("out"))
      .def("gated_linear", &BoundGraph::gated_linear, nb::arg("x"), nb::arg("gate"), nb::arg("up"), nb::arg("activation"),
           nb::arg("gate_bias").none(), nb::arg("up_bias").none(), nb::arg("out"))
      .def("rope_cache", &BoundGraph::rope_cache, nb::arg("qkv"), nb::arg("layer"), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("q_norm").none(),
           nb::arg("k_norm").none(), nb::arg("eps"), nb::arg("out"))
      .def("attention", &BoundGraph::attention, nb::arg("q"), nb::arg("layer"), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("out"))
      .def("select", &BoundGraph::select, nb::arg("x"), nb::arg("out"))
      .def("finish", &BoundGraph::finish, nb::arg("hidden").none(), nb::arg("head").none(), nb::arg("logit_scale"),
           nb::arg("logit_softcap"), "Names the value that the head reads, and the head.");
}

}  // namespace

void bind_program(nb::module_& m) {
  bind_graph(m);
  nb::class_<Program>(m, "Program", "A graph with its plan and buffers.")
      .def(
          "__init__",
          [](Program* self, Pool& pool, const BoundGraph& graph, int64_t max_tokens, int64_t max_outputs, int64_t max_seqs) {
            new (self) Program(pool, graph.graph, {max_tokens, max_outputs, max_seqs});
          },
          nb::arg("pool"), nb::arg("graph"), nb::arg("max_tokens"), nb::arg("max_outputs"), nb::arg("max_seqs"),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      // Nothing is converted on the way in: a silent copy would hide a wrong type, and cost.
      .def("run", &run, nb::arg("input_ids").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("kv_positions").noconvert(), nb::arg("query_starts").noconvert(), nb::arg("kv_lengths").noconvert(),
           nb::arg("slots").noconvert(), nb::arg("block_tables").noconvert(), nb::arg("output_rows").noconvert(),
           nb::arg("cache").none(),
           "Computes a batch; returns the number of hidden rows.")
      .def("logits", &logits, nb::arg("start"), nb::arg("stop"),
           "Logits [stop - start, vocab] of hidden rows: a view, valid until the next call.")
      .def("largest", &largest, nb::arg("start"), nb::arg("stop"),
           "The lowest id of the largest logit of hidden rows, int32 [stop - start], without making the logits.")
      .def("hidden", &hidden, "Hidden rows [rows, width] of the last run: a view, valid until the next run.")
      .def_prop_ro("buffer_bytes", &Program::buffer_bytes)
      .def("set_timing", &Program::set_timing, nb::arg("on"))
      .def("clear_times", &Program::clear_times)
      .def("times", &times, "Time per op since cleared: [{name, op, width, seconds, calls, rows}].");
}

}  // namespace noria
