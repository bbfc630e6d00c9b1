#include <vector>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "core/isa.h"
#include "core/pool.h"
#include "core/topology.h"

namespace noria {

namespace {

nb::dict describe(const Topology& t) {
  nb::dict d;
  d["cpu_model"] = t.cpu_model;
  d["cpus"] = nb::cast(t.cpus);
  d["physical_cores"] = t.physical_cores;
  d["cgroup_cpus"] = t.cgroup_cpus > 0 ? nb::cast(t.cgroup_cpus) : nb::none();
  d["usable_cpus"] = t.usable_cpus();
  d["threads"] = t.threads();
  d["l1d_bytes"] = t.l1d_bytes;
  d["l2_bytes"] = t.l2_bytes;
  d["l3_bytes"] = t.l3_bytes;
  d["l3_shared_by"] = t.l3_shared_by;
  d["memory_bytes"] = t.memory_bytes;
  d["memory_limit_bytes"] = t.memory_limit_bytes > 0 ? nb::cast(t.memory_limit_bytes) : nb::none();
  d["memory_available_bytes"] = t.memory_available_bytes;
  nb::list nodes;
  for (const NumaNode& node : t.nodes) {
    nb::dict n;
    n["id"] = node.id;
    n["cpus"] = nb::cast(node.cpus);
    n["memory_bytes"] = node.memory_bytes;
    n["free_bytes"] = node.free_bytes;
    nodes.append(n);
  }
  d["nodes"] = nodes;
  return d;
}

// Runs `repeats` runs of `count` tasks and returns how often each index ran, for the pool's own tests. Each task does a
// little work that depends on its index, so that threads overtake each other.
nb::object exercise(Pool& pool, int64_t count, int repeats, bool in_steps) {
  std::vector<int32_t> hits(static_cast<size_t>(count), 0);
  {
    nb::gil_scoped_release release;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      if (in_steps) pool.begin_step();
      pool.run(count, [&](int64_t index, int thread) {
        volatile int64_t work = 0;
        for (int64_t i = 0; i < (index * 7919 + repeat) % 512; ++i) work = work + i;
        const bool valid = thread >= 0 && thread < pool.threads();
        hits[static_cast<size_t>(index)] += valid ? 1 : 1000000;
      });
    }
  }
  return to_numpy(std::move(hits), {static_cast<size_t>(count)});
}

}  // namespace

void bind_core(nb::module_& m) {
  m.def("available_isas", &available_isas, "ISA levels that this processor can run, best last.");
  m.def("isa", [] { return std::string(kernels().name); }, "The ISA level in use.");
  m.def("select_isa", &select_isa, nb::arg("name"), "Chooses a level; weights must be packed anew.");
  m.def(
      "topology", [](const std::string& root, const std::vector<int>& cpus) { return describe(read_topology(root, cpus)); },
      nb::arg("root") = "", nb::arg("cpus") = std::vector<int>{},
      "Processors, caches and memory that this process may use. `root` is put before /proc and /sys; `cpus` stands in for "
      "the affinity mask.");
  nb::class_<Pool>(m, "Pool", "Kernel threads; the calling thread is one of them.")
      .def("__init__",
           [](Pool* self, int threads, double spin) {
             if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be in 1…1024");
             if (!(spin >= 0 && spin <= 3600)) throw std::invalid_argument("spin must be in 0…3600 seconds");
             new (self) Pool(threads, std::chrono::microseconds(static_cast<int64_t>(spin * 1e6)));
           },
           nb::arg("threads"), nb::arg("spin") = std::chrono::duration<double>(kSpin).count(),
           "spin: seconds that a thread waits awake before it sleeps; none if the threads outnumber the processors.")
      .def_prop_ro("threads", &Pool::threads)
      .def_prop_ro("asleep", &Pool::asleep, "How many of the threads sleep now.")
      .def("rest", &Pool::rest, "Lets the threads sleep at once, until the next step begins.")
      .def("exercise", &exercise, nb::arg("count"), nb::arg("repeats") = 1, nb::arg("in_steps") = false,
           "How often each of `count` task indices ran in `repeats` runs (int32 [count]); for tests.");
}

}  // namespace noria
