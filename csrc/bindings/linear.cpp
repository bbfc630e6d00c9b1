// Python: PackedWeight, packing from arrays, and the products on float32 rows for tests and measurements.
#include "ops/linear.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "bindings/module.h"
#include "ops/elementwise.h"
#include <nanobind/stl/optional.h>

namespace noria {
namespace {

template <class T> using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Float32 = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

const char* name_of(Scheme scheme) {
  static const char* names[] = {"f32", "bf16", "int8", "int4"};
  return names[static_cast<int>(scheme)];
}

void expect(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

template <class T>
void expect_groups(const Matrix<T>& codes, const Matrix<float>& values, int group, const char* what) {
  expect(group > 0, "the group size must be positive");
  const size_t groups = (codes.shape(1) + static_cast<size_t>(group) - 1) / static_cast<size_t>(group);
  expect(values.shape(0) == codes.shape(0) && values.shape(1) == groups,
         std::string(what) + " must be [" + std::to_string(codes.shape(0)) + ", " + std::to_string(groups) + "]");
}

template <class T, class Pack> PackedWeight pack_values(const Matrix<T>& values, Pack pack) {
  nb::gil_scoped_release release;
  return pack(values.data(), static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)));
}

PackedWeight pack_int8_array(const Matrix<int8_t>& codes, const Matrix<float>& scales, int group, bool wide) {
  expect_groups(codes, scales, group, "scales");
  return pack_values(codes, [&](const int8_t* c, int64_t n, int64_t k) { return pack_int8(c, scales.data(), n, k, group, wide); });
}

PackedWeight pack_int4_array(const Matrix<uint8_t>& codes, const Matrix<float>& scales, const Matrix<float>& minimums,
                             int group) {
  expect_groups(codes, scales, group, "scales");
  expect_groups(codes, minimums, group, "minimums");
  return pack_values(codes, [&](const uint8_t* c, int64_t n, int64_t k) {
    return pack_int4(c, scales.data(), minimums.data(), n, k, group);
  });
}

// Float32 rows in every form that some parts want.
struct Operands {
  std::vector<ActivationSpec> specs;
  std::vector<ActivationBuffer> buffers;
  std::vector<Activations> views;
  std::vector<int> of_part;

  Operands(Pool& pool, const Matrix<float>& x, const std::vector<const PackedWeight*>& parts) {
    const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
    for (const PackedWeight* part : parts) {
      const ActivationSpec spec = wanted(*part);
      expect(spec.k == width, "x must be [rows, " + std::to_string(spec.k) + "]");
      const auto known = std::find(specs.begin(), specs.end(), spec);
      of_part.push_back(static_cast<int>(known - specs.begin()));
      if (known == specs.end()) specs.push_back(spec);
    }
    std::vector<ActivationBuffer*> targets;
    buffers.reserve(specs.size());
    for (const ActivationSpec& spec : specs) targets.push_back(&buffers.emplace_back(spec, rows));
    nb::gil_scoped_release release;
    convert(pool, x.data(), rows, width, specs.data(), targets.data(), static_cast<int>(specs.size()));
    for (size_t i = 0; i < specs.size(); ++i) views.push_back(buffers[i].view(specs[i], rows));
  }
};

Float32 new_rows(size_t rows, size_t width) {
  auto* memory = new Buffer(rows * width * sizeof(float));
  nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
  return Float32(memory->as<float>(), {rows, width}, owner);
}

const float* optional_vector(const std::optional<Vector<float>>& values, size_t n, const char* what) {
  if (!values) return nullptr;
  expect(values->shape(0) == n, std::string(what) + " must be [" + std::to_string(n) + "]");
  return values->data();
}

Float32 linear_array(Pool& pool, const Matrix<float>& x, const std::vector<const PackedWeight*>& parts,
                     const std::optional<Vector<float>>& bias, const std::optional<Matrix<float>>& residual, float scale,
                     float softcap, int repeats) {
  expect(!parts.empty(), "a product needs at least one part");
  size_t n = 0;
  for (const PackedWeight* part : parts) n += static_cast<size_t>(part->n);
  const Operands operands(pool, x, parts);
  Float32 out = new_rows(x.shape(0), n);
  LinearArgs args;
  args.x = operands.views.data();
  args.x_of_part = operands.of_part.data();
  args.parts = parts.data();
  args.part_count = static_cast<int>(parts.size());
  args.bias = optional_vector(bias, n, "bias");
  if (residual) {
    expect(residual->shape(0) == x.shape(0) && residual->shape(1) == n, "residual must be as the result");
    args.residual = residual->data();
  }
  args.out = out.data();
  args.out_stride = static_cast<int64_t>(n);
  args.scale = scale;
  args.softcap = softcap;
  nb::gil_scoped_release release;
  for (int i = 0; i < repeats; ++i) linear(pool, args);
  return out;
}

Float32 gated_linear_array(Pool& pool, const Matrix<float>& x, const PackedWeight& gate, const PackedWeight& up,
                           const std::string& activation, const std::optional<Vector<float>>& gate_bias,
                           const std::optional<Vector<float>>& up_bias, int repeats) {
  expect(activation == "silu" || activation == "gelu_tanh", "activation must be silu or gelu_tanh");
  const Operands operands(pool, x, {&gate, &up});
  const size_t n = static_cast<size_t>(gate.n);
  Float32 out = new_rows(x.shape(0), n);
  GatedLinearArgs args;
  args.gate_x = &operands.views[static_cast<size_t>(operands.of_part[0])];
  args.up_x = &operands.views[static_cast<size_t>(operands.of_part[1])];
  args.gate = &gate;
  args.up = &up;
  args.gate_bias = optional_vector(gate_bias, n, "gate_bias");
  args.up_bias = optional_vector(up_bias, n, "up_bias");
  args.activation = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
  args.out = out.data();
  args.out_stride = gate.n;
  nb::gil_scoped_release release;
  for (int i = 0; i < repeats; ++i) gated_linear(pool, args);
  return out;
}

void bind_packing(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight", "A weight [n, k] packed for the products.")
      .def_prop_ro("scheme", [](const PackedWeight& w) { return name_of(w.scheme); })
      .def_ro("n", &PackedWeight::n)
      .def_ro("k", &PackedWeight::k)
      .def_ro("group", &PackedWeight::group, "products per scale along k; 0 for f32 and bf16")
      .def_ro("wide", &PackedWeight::wide, "whether activations have 16 bits")
      .def_prop_ro("nbytes", [](const PackedWeight& w) { return w.bytes(); });
  m.def("pack_f32", [](const Matrix<float>& values) {
    return pack_values(values, [](const float* v, int64_t n, int64_t k) { return pack_f32(v, n, k); });
  }, nb::arg("values"), "Packs float32 [n, k].");
  m.def("pack_bf16", [](const Matrix<uint16_t>& values) {
    return pack_values(values, [](const uint16_t* v, int64_t n, int64_t k) { return pack_bf16(v, n, k); });
  }, nb::arg("values"), "Packs bfloat16 [n, k], given as its bits in uint16, or float32 [n, k], rounded to nearest even.");
  m.def("pack_bf16", [](const Matrix<float>& values) {
    return pack_values(values, [](const float* v, int64_t n, int64_t k) { return pack_bf16(v, n, k); });
  }, nb::arg("values"));
  m.def("pack_int8", &pack_int8_array, nb::arg("codes"), nb::arg("scales"), nb::arg("group"),
        nb::arg("wide") = false,
        "Packs int8 codes -127…127 [n, k] with float32 scales [n, ceil(k / group)]; wide: for activations of 16 bits, with "
        "one group per row.");
  m.def("pack_int4", &pack_int4_array, nb::arg("codes"), nb::arg("scales"), nb::arg("minimums"), nb::arg("group"),
        "Packs uint8 codes 0…15 [n, k] with float32 scales and minimums [n, ceil(k / group)].");
}

}  // namespace

void bind_linear(nb::module_& m) {
  bind_packing(m);
  m.def("linear", &linear_array, nb::arg("pool"), nb::arg("x"), nb::arg("parts"), nb::arg("bias") = nb::none(),
        nb::arg("residual") = nb::none(), nb::arg("scale") = 1.0f, nb::arg("softcap") = 0.0f, nb::arg("repeats") = 1,
        "softcap * tanh(scale * (x @ concat(parts).T + bias) / softcap) + residual for float32 x [rows, k]; converts x "
        "as the parts want it, then computes the product `repeats` times (for measurements).");
  m.def("gated_linear", &gated_linear_array, nb::arg("pool"), nb::arg("x"), nb::arg("gate"), nb::arg("up"),
        nb::arg("activation"), nb::arg("gate_bias") = nb::none(), nb::arg("up_bias") = nb::none(), nb::arg("repeats") = 1,
        "activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias) for float32 x [rows, k].");
}

}  // namespace noria
