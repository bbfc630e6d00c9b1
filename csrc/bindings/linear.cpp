#include "bindings/module.h"

namespace noria {

void bind_linear(nb::module_& m) {}

}  // namespace noria
