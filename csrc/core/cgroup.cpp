#include "core/cgroup.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

namespace noria {

namespace {

// A version 1 group without a limit reports the largest page-aligned number; nothing real is as large.
constexpr int64_t kUnlimited = int64_t{1} << 60;

bool has_word(const std::string& list, const std::string& word) { return ("," + list + ",").find("," + word + ",") != std::string::npos; }

// Reads a whole number; false if there is none ("max", no such file).
bool read_number(const std::string& path, int64_t& number) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return false;
  char* rest = nullptr;
  number = std::strtoll(word.c_str(), &rest, 10);
  return rest != word.c_str();
}

int64_t stat_field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  for (int64_t value; file >> name >> value;)
    if (name == key) return value;
  return 0;
}

// A hierarchy that this process is in: where it is mounted, and the process's group within the mount.
struct Hierarchy {
  bool v2 = false;
  std::string controllers;  // v1 only
  std::string mount, group;
};

// /proc/self/cgroup: "4:memory:/a/b" (version 1) or "0::/a/b" (version 2).
std::vector<Hierarchy> memberships(const std::string& root) {
  std::vector<Hierarchy> found;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t one = line.find(':'), two = line.find(':', one + 1);
    if (one == std::string::npos || two == std::string::npos) continue;
    Hierarchy h;
    h.controllers = line.substr(one + 1, two - one - 1);
    h.v2 = h.controllers.empty();
    h.group = line.substr(two + 1);
    found.push_back(h);
  }
  return found;
}

// /proc/self/mountinfo: "30 25 0:26 /root-of-mount /mount/point options … - cgroup source superoptions".
void find_mounts(const std::string& root, std::vector<Hierarchy>& hierarchies) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::stringstream head(line.substr(0, dash)), tail(line.substr(dash + 3));
    std::string skip, inside, point, type, source, options;
    head >> skip >> skip >> skip >> inside >> point;
    tail >> type >> source >> options;
    for (Hierarchy& h : hierarchies) {
      const size_t comma = h.controllers.find(',');
      const bool same = h.v2 ? type == "cgroup2" : type == "cgroup" && has_word(options, h.controllers.substr(0, comma));
      if (!same || !h.mount.empty()) continue;
      h.mount = root + point;
      // A container often mounts its own group as the whole hierarchy.
      if (inside != "/" && h.group.compare(0, inside.size(), inside) == 0) h.group = h.group.substr(inside.size());
    }
  }
}

void tighten_cpus(CgroupLimits& limits, int64_t quota, int64_t period) {
  if (quota <= 0 || period <= 0) return;
  const double cpus = static_cast<double>(quota) / static_cast<double>(period);
  limits.cpus = limits.cpus == 0 ? cpus : std::min(limits.cpus, cpus);
}

void tighten_memory(CgroupLimits& limits, int64_t limit, int64_t used, int64_t droppable) {
  if (limit <= 0 || limit >= kUnlimited) return;
  const int64_t left = std::max<int64_t>(0, limit - std::max<int64_t>(0, used - droppable));
  limits.memory_left = limits.memory_limit == 0 ? left : std::min(limits.memory_left, left);
  limits.memory_limit = limits.memory_limit == 0 ? limit : std::min(limits.memory_limit, limit);
}

void read_group(const Hierarchy& h, const std::string& folder, CgroupLimits& limits) {
  int64_t a = 0, b = 0;
  if (h.v2) {
    std::ifstream file(folder + "/cpu.max");
    std::string quota;
    if (file >> quota >> b && quota != "max") tighten_cpus(limits, std::strtoll(quota.c_str(), nullptr, 10), b);
    if (read_number(folder + "/memory.max", a) && read_number(folder + "/memory.current", b))
      tighten_memory(limits, a, b, stat_field(folder + "/memory.stat", "inactive_file"));
    return;
  }
  if (has_word(h.controllers, "cpu") && read_number(folder + "/cpu.cfs_quota_us", a) &&
      read_number(folder + "/cpu.cfs_period_us", b))
    tighten_cpus(limits, a, b);
  if (has_word(h.controllers, "memory") && read_number(folder + "/memory.limit_in_bytes", a) &&
      read_number(folder + "/memory.usage_in_bytes", b))
    tighten_memory(limits, a, b, stat_field(folder + "/memory.stat", "total_inactive_file"));
}

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& root) {
  CgroupLimits limits;
  std::vector<Hierarchy> hierarchies = memberships(root);
  find_mounts(root, hierarchies);
  for (const Hierarchy& h : hierarchies) {
    if (h.mount.empty()) continue;
    // From the process's own group to the root of the mount; groups that cannot be seen from here have no files.
    for (std::string group = h.group == "/" ? "" : h.group;;) {
      read_group(h, h.mount + group, limits);
      const size_t slash = group.rfind('/');
      if (slash == std::string::npos) break;
      group = group.substr(0, slash);
    }
  }
  return limits;
}

}  // namespace noria
