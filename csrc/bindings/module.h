// Python bindings, one file per op family. Arrays come in as views, the GIL is released around work, nothing is owned.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace noria {

template <class T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

void bind_core(nb::module_& m);         // isa, pool
void bind_linear(nb::module_& m);       // packing, products
void bind_elementwise(nb::module_& m);  // norm, quantise, embed
void bind_attention(nb::module_& m);    // cache, rope, attention
void bind_sampling(nb::module_& m);     // sampler
void bind_program(nb::module_& m);      // graph execution
void bind_limits(nb::module_& m);       // what the machine can do at best

}  // namespace noria
