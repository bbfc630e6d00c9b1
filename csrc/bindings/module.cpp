#include "bindings/module.h"

NB_MODULE(_native, m) {
  m.doc() = "Noria's native CPU kernels";
  noria::bind_core(m);
  noria::bind_linear(m);
  noria::bind_elementwise(m);
  noria::bind_attention(m);
  noria::bind_sampling(m);
  noria::bind_program(m);
  noria::bind_limits(m);
}
