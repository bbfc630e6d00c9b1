#include "bindings/module.h"
#include "core/isa.h"
#include "core/pool.h"

namespace noria {

void bind_core(nb::module_& m) {
  m.def("available_isas", &available_isas, "ISA levels that this processor can run, best last.");
  m.def("isa", [] { return std::string(kernels().name); }, "The ISA level in use.");
  m.def("select_isa", &select_isa, nb::arg("name"), "Chooses a level; weights must be packed anew.");
  nb::class_<Pool>(m, "Pool").def(nb::init<int>(), nb::arg("threads")).def_prop_ro("threads", &Pool::threads);
}

}  // namespace noria
