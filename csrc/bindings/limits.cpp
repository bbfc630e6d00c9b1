// Python: what the machine can do at best. The caller measures the time.
#include "ops/limits.h"

#include <stdexcept>

#include "bindings/module.h"

namespace noria {

namespace {

Scheme scheme_of(const std::string& name) {
  if (name == "f32") return Scheme::f32;
  if (name == "bf16") return Scheme::bf16;
  if (name == "int8") return Scheme::int8;
  if (name == "int4") return Scheme::int4;
  throw std::invalid_argument("scheme must be f32, bf16, int8 or int4");
}

void require_positive(int64_t value, const char* name) {
  if (value < 1) throw std::invalid_argument(std::string(name) + " must be positive");
}

int64_t products(Pool& pool, const std::string& scheme, int64_t turns, int64_t tasks) {
  require_positive(turns, "turns");
  require_positive(tasks, "tasks");
  const Scheme known = scheme_of(scheme);
  nb::gil_scoped_release release;
  return limit_products(pool, known, turns, tasks);
}

int64_t read(const LimitMemory& memory, Pool& pool, int64_t bytes, bool shared, int64_t ahead, int64_t repeats,
             int64_t first) {
  require_positive(repeats, "repeats");
  if (ahead < 0) throw std::invalid_argument("ahead must not be negative");
  nb::gil_scoped_release release;
  return memory.read(pool, first, bytes, shared, ahead, repeats);
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("limit_products", &products, nb::arg("pool"), nb::arg("scheme"), nb::arg("turns"), nb::arg("tasks"),
        "Does products of a scheme in registers, in `tasks` tasks, and returns the operations (a multiply-add is two).");
  m.def("limit_instruction", [](const std::string& scheme) { return std::string(limit_instruction(scheme_of(scheme))); },
        nb::arg("scheme"), "The instruction that a scheme's products are made of at the level in use.");
  nb::class_<LimitMemory>(m, "LimitMemory", "Memory to read from.")
      .def("__init__",
           [](LimitMemory* self, Pool& pool, int64_t bytes) {
             require_positive(bytes, "bytes");
             nb::gil_scoped_release release;
             new (self) LimitMemory(pool, bytes);
           },
           nb::arg("pool"), nb::arg("bytes"))
      .def_prop_ro("bytes", &LimitMemory::bytes)
      .def("read", &read, nb::arg("pool"), nb::arg("bytes"), nb::arg("shared"), nb::arg("ahead") = 0, nb::arg("repeats") = 1,
           nb::arg("first") = 0,
           "Reads `bytes` from the offset `first` on `repeats` times: pieces of it by whoever is free (shared), or a stretch for each thread. "
           "Returns the bytes read.");
  m.def("limit_pin", &limit_pin, nb::arg("pool"), nb::arg("on"), nb::call_guard<nb::gil_scoped_release>(),
        "Holds each of the pool's threads, the calling one included, to a processor of its own, or lets them go.");
  m.def("limit_wake",
        [](Pool& pool, bool asleep, int repeats) {
          require_positive(repeats, "repeats");
          nb::gil_scoped_release release;
          return limit_wake(pool, asleep, repeats);
        },
        nb::arg("pool"), nb::arg("asleep"), nb::arg("repeats"), "[repeats] seconds until every thread is in a run.");
  m.def("limit_run",
        [](Pool& pool, int repeats) {
          require_positive(repeats, "repeats");
          nb::gil_scoped_release release;
          return limit_run(pool, repeats);
        },
        nb::arg("pool"), nb::arg("repeats"), "Seconds of a run of empty tasks.");
}

}  // namespace noria
