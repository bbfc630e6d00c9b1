#include "bindings/module.h"

namespace noria {

void bind_program(nb::module_& m) {}

}  // namespace noria
