// What of this machine the process may use: processors within its affinity mask and cgroup, caches, memory, NUMA nodes.
// Read from the kernel's files once; knows nothing of kernels or threads.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace noria {

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;  // allowed ones only
  int64_t memory_bytes = 0;
  int64_t free_bytes = 0;
};

struct Topology {
  std::string cpu_model;
  std::vector<int> cpus;       // logical processors in the affinity mask
  int physical_cores = 1;      // distinct cores among them
  double cgroup_cpus = 0;      // processors' worth of time that the tightest cgroup allows; 0: no limit
  int64_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;  // of one instance; 0 where unknown
  int l3_shared_by = 0;        // logical processors
  int64_t memory_bytes = 0;    // of the machine
  int64_t memory_limit_bytes = 0;      // of the tightest cgroup; 0: no limit
  int64_t memory_available_bytes = 0;  // what can be allocated now, within the cgroup too
  std::vector<NumaNode> nodes;

  int usable_cpus() const;  // logical processors, or what the cgroup allows of them; at least 1
  int threads() const;      // how many kernel threads are best: one per physical core within the cgroup's limit
};

// `root` is put before /proc and /sys (for tests); `cpus` replaces the affinity mask if it is not empty.
Topology read_topology(const std::string& root = "", const std::vector<int>& cpus = {});
// This machine, read on first use.
const Topology& machine();

}  // namespace noria
