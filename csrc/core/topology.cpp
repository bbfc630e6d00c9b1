#include "core/topology.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "core/cgroup.h"

namespace noria {

namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "0-3,8" → 0 1 2 3 8; what cannot be read is left out.
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> found;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    char* rest = nullptr;
    const long low = std::strtol(part.c_str(), &rest, 10);
    if (rest == part.c_str()) continue;
    const long high = *rest == '-' ? std::strtol(rest + 1, nullptr, 10) : low;
    for (long cpu = low; cpu <= high && found.size() < 65536; ++cpu) found.push_back(static_cast<int>(cpu));
  }
  return found;
}

// "2048K" → bytes.
int64_t parse_size(const std::string& text) {
  char* rest = nullptr;
  const int64_t number = std::strtoll(text.c_str(), &rest, 10);
  if (*rest == 'K') return number << 10;
  if (*rest == 'M') return number << 20;
  return number;
}

std::vector<int> affinity() {
  std::vector<int> cpus;
#if defined(__linux__)
  for (int most = 1024; most <= 65536 && cpus.empty(); most *= 8) {
    cpu_set_t* set = CPU_ALLOC(most);
    const size_t bytes = CPU_ALLOC_SIZE(most);
    if (sched_getaffinity(0, bytes, set) == 0) {
      for (int cpu = 0; cpu < most; ++cpu)
        if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
  }
#endif
  const int count = cpus.empty() ? std::max(1u, std::thread::hardware_concurrency()) : 0;
  for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
  return cpus;
}

int count_cores(const std::string& root, const std::vector<int>& cpus) {
  std::set<std::string> cores;
  for (int cpu : cpus) {
    const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::string siblings = first_line(folder + "core_cpus_list");
    if (siblings.empty()) siblings = first_line(folder + "thread_siblings_list");
    cores.insert(siblings.empty() ? "cpu" + std::to_string(cpu) : siblings);
  }
  return std::max<int>(1, static_cast<int>(cores.size()));
}

void read_caches(const std::string& root, Topology& t) {
  for (int index = 0; index < 8; ++index) {
    const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(t.cpus.front()) + "/cache/index" +
                               std::to_string(index) + "/";
    const std::string level = first_line(folder + "level");
    if (level.empty()) continue;
    if (first_line(folder + "type") == "Instruction") continue;
    const int64_t bytes = parse_size(first_line(folder + "size"));
    if (level == "1") t.l1d_bytes = bytes;
    if (level == "2") t.l2_bytes = bytes;
    if (level != "3") continue;
    t.l3_bytes = bytes;
    t.l3_shared_by = static_cast<int>(parse_list(first_line(folder + "shared_cpu_list")).size());
  }
}

// The number behind `key` in a file of lines such as "MemTotal:  24096 kB" or "Node 0 MemFree: 512 kB", in bytes.
int64_t memory_field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find(key + ":");
    if (at != std::string::npos) return std::strtoll(line.c_str() + at + key.size() + 1, nullptr, 10) << 10;
  }
  return 0;
}

void read_nodes(const std::string& root, Topology& t) {
  const std::string base = root + "/sys/devices/system/node/";
  for (int id : parse_list(first_line(base + "online"))) {
    const std::string folder = base + "node" + std::to_string(id) + "/";
    NumaNode node;
    node.id = id;
    for (int cpu : parse_list(first_line(folder + "cpulist")))
      if (std::find(t.cpus.begin(), t.cpus.end(), cpu) != t.cpus.end()) node.cpus.push_back(cpu);
    node.memory_bytes = memory_field(folder + "meminfo", "MemTotal");
    node.free_bytes = memory_field(folder + "meminfo", "MemFree");
    t.nodes.push_back(node);
  }
}

std::string cpu_model(const std::string& root) {
  std::ifstream file(root + "/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 10, "model name") != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

}  // namespace

int Topology::usable_cpus() const {
  const int allowed = static_cast<int>(cpus.size());
  if (cgroup_cpus <= 0) return std::max(1, allowed);
  return std::max(1, std::min(allowed, static_cast<int>(std::floor(cgroup_cpus))));
}

int Topology::threads() const { return std::min(physical_cores, usable_cpus()); }

Topology read_topology(const std::string& root, const std::vector<int>& cpus) {
  Topology t;
  t.cpu_model = cpu_model(root);
  t.cpus = cpus.empty() ? affinity() : cpus;
  t.physical_cores = count_cores(root, t.cpus);
  read_caches(root, t);
  read_nodes(root, t);
  const CgroupLimits limits = read_cgroup_limits(root);
  t.cgroup_cpus = limits.cpus;
  t.memory_limit_bytes = limits.memory_limit;
  t.memory_bytes = memory_field(root + "/proc/meminfo", "MemTotal");
  t.memory_available_bytes = memory_field(root + "/proc/meminfo", "MemAvailable");
  if (limits.memory_limit > 0) t.memory_available_bytes = std::min(t.memory_available_bytes, limits.memory_left);
  return t;
}

const Topology& machine() {
  static const Topology topology = read_topology();
  return topology;
}

}  // namespace noria
