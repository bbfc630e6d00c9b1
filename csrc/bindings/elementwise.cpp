#include "ops/elementwise.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <optional>
#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "core/isa.h"
#include "kernels/elementwise.h"

namespace noria {

namespace {

using Floats = Array<const float>;
using FormatList = std::vector<std::pair<std::string, int>>;

Format parse_format(const std::string& name) {
  if (name == "f32") return Format::f32;
  if (name == "bf16") return Format::bf16;
  if (name == "s8") return Format::s8;
  if (name == "s16") return Format::s16;
  throw std::invalid_argument("format must be f32, bf16, s8 or s16, got " + name);
}

void check(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

// Buffers for some formats of the same rows.
struct Conversions {
  std::vector<ActivationSpec> specs;
  std::vector<ActivationBuffer> buffers;
  std::vector<ActivationBuffer*> targets;

  Conversions(const FormatList& formats, int64_t rows, int64_t width) {
    for (const auto& [name, group] : formats) specs.push_back({parse_format(name), group, width});
    for (const ActivationSpec& spec : specs) buffers.emplace_back(spec, rows);
    for (ActivationBuffer& buffer : buffers) targets.push_back(&buffer);
  }
  int count() const { return static_cast<int>(specs.size()); }
};

template <class T> nb::object copy_out(const Buffer& buffer, size_t rows, size_t columns) {
  return to_numpy(std::vector<T>(buffer.as<T>(), buffer.as<T>() + rows * columns), {rows, columns});
}

nb::object data_of(const ActivationBuffer& buffer, const ActivationSpec& spec, size_t rows) {
  const size_t stride = static_cast<size_t>(spec.stride());
  switch (spec.format) {
    case Format::f32: return copy_out<float>(buffer.data, rows, stride);
    case Format::bf16: return copy_out<uint16_t>(buffer.data, rows, stride);
    case Format::s8: return copy_out<int8_t>(buffer.data, rows, stride);
    default: return copy_out<int8_t>(buffer.data, rows, 2 * stride);
  }
}

// [(data [rows, stride], scales [rows, groups], sums [rows, groups])] per format; s16: data [rows, 2 * stride], sums [rows, 2].
nb::list results(const Conversions& made, size_t rows) {
  nb::list out;
  for (int i = 0; i < made.count(); ++i) {
    const ActivationSpec& spec = made.specs[static_cast<size_t>(i)];
    const ActivationBuffer& buffer = made.buffers[static_cast<size_t>(i)];
    const auto groups = static_cast<size_t>(spec.groups());
    out.append(nb::make_tuple(data_of(buffer, spec, rows), copy_out<float>(buffer.scales, rows, groups),
                              copy_out<int32_t>(buffer.sums, rows, static_cast<size_t>(spec.sums()))));
  }
  return out;
}

nb::list py_convert(Pool& pool, Floats x, const FormatList& formats) {
  check(x.ndim() == 2, "x must be [rows, width]");
  const auto rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  Conversions made(formats, rows, width);
  {
    nb::gil_scoped_release release;
    convert(pool, x.data(), rows, width, made.specs.data(), made.targets.data(), made.count());
  }
  return results(made, x.shape(0));
}

nb::tuple py_norm(Pool& pool, Floats x, Floats weight, float eps, std::optional<Floats> residual, const FormatList& formats,
                  bool floats) {
  check(x.ndim() == 2, "x must be [rows, width]");
  check(weight.ndim() == 1 && weight.shape(0) == x.shape(1), "weight must be [width]");
  check(!residual || (residual->ndim() == 2 && residual->shape(0) == x.shape(0) && residual->shape(1) == x.shape(1)),
        "residual must be shaped as x");
  const auto rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  Conversions made(formats, rows, width);
  std::vector<float> out(floats ? x.size() : 0);
  {
    nb::gil_scoped_release release;
    norm(pool, x.data(), weight.data(), eps, residual ? residual->data() : nullptr, rows, width,
         floats ? out.data() : nullptr, made.specs.data(), made.targets.data(), made.count());
  }
  return nb::make_tuple(floats ? to_numpy(std::move(out), {x.shape(0), x.shape(1)}) : nb::none(),
                        results(made, x.shape(0)));
}

nb::object py_embed(Pool& pool, const EmbeddingTable& table, Array<const int32_t> ids, float scale) {
  check(ids.ndim() == 1, "ids must be [rows]");
  for (size_t i = 0; i < ids.size(); ++i)
    check(ids.data()[i] >= 0 && ids.data()[i] < table.vocab, "a token id is outside the vocabulary");
  std::vector<float> out(ids.size() * static_cast<size_t>(table.width));
  {
    nb::gil_scoped_release release;
    embed(pool, table, ids.data(), static_cast<int64_t>(ids.size()), scale, out.data());
  }
  return to_numpy(std::move(out), {ids.shape(0), static_cast<size_t>(table.width)});
}

nb::object py_select(Pool& pool, Floats x, Array<const int32_t> rows) {
  check(x.ndim() == 2 && rows.ndim() == 1, "x must be [rows, width], rows [count]");
  for (size_t i = 0; i < rows.size(); ++i)
    check(rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(x.shape(0)), "a row is outside of x");
  std::vector<float> out(rows.size() * x.shape(1));
  {
    nb::gil_scoped_release release;
    select(pool, x.data(), rows.data(), static_cast<int64_t>(rows.size()), static_cast<int64_t>(x.shape(1)), out.data());
  }
  return to_numpy(std::move(out), {rows.shape(0), x.shape(1)});
}

nb::object py_evaluate(const std::string& name, Floats x) {
  const char* names[] = {"exp", "sigmoid", "tanh", "silu", "gelu_tanh"};
  for (int i = 0; i < 5; ++i) {
    if (name != names[i]) continue;
    std::vector<float> out(x.size());
    kernels().elementwise->evaluate(static_cast<Function>(i), x.data(), static_cast<int64_t>(x.size()), out.data());
    return to_numpy(std::move(out), {x.size()});
  }
  throw std::invalid_argument("no function " + name);
}

template <class T> EmbeddingTable py_table(Array<const T> values) {
  check(values.ndim() == 2, "values must be [vocab, width]");
  return make_table(values.data(), sizeof(T) == 2, static_cast<int64_t>(values.shape(0)),
                    static_cast<int64_t>(values.shape(1)));
}

}  // namespace

void bind_elementwise(nb::module_& m) {
  nb::class_<EmbeddingTable>(m, "EmbeddingTable", "Token embeddings [vocab, width] in float32 or bfloat16.")
      .def_prop_ro("vocab", [](const EmbeddingTable& t) { return t.vocab; })
      .def_prop_ro("width", [](const EmbeddingTable& t) { return t.width; })
      .def_prop_ro("nbytes", [](const EmbeddingTable& t) { return t.data.bytes(); });
  m.def("table_of", [](const PackedWeight& weight) { return make_table(weight); }, nb::arg("weight"), nb::keep_alive<0, 1>(),
        "The rows of an f32 or bf16 weight, read where they are.");
  m.def("table_f32", &py_table<float>, nb::arg("values"), "Copies float32 [vocab, width].");
  m.def("table_bf16", &py_table<uint16_t>, nb::arg("values"), "Copies bfloat16 bits, uint16 [vocab, width].");
  m.def("convert", &py_convert, nb::arg("pool"), nb::arg("x"), nb::arg("formats"),
        "Rows in each of `formats`, a list of (f32|bf16|s8|s16, group): [(data, scales, sums)].");
  m.def("norm", &py_norm, nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("residual").none(),
        nb::arg("formats"), nb::arg("floats") = true, "RMS norm: (float32 or None, [(data, scales, sums)]).");
  m.def("embed", &py_embed, nb::arg("pool"), nb::arg("table"), nb::arg("ids"), nb::arg("scale"),
        "Rows of a table times a scale, float32 [rows, width].");
  m.def("evaluate", &py_evaluate, nb::arg("function"), nb::arg("x"),
        "exp, sigmoid, tanh, silu or gelu_tanh of a vector, as the kernels compute them; for tests.");
  m.def("select", &py_select, nb::arg("pool"), nb::arg("x"), nb::arg("rows"), "x[rows].");
}

}  // namespace noria
