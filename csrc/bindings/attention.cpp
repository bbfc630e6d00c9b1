#include "bindings/module.h"

namespace noria {

void bind_attention(nb::module_& m) {}

}  // namespace noria
