#include "bindings/module.h"

namespace noria {

void bind_sampling(nb::module_& m) {}

}  // namespace noria
