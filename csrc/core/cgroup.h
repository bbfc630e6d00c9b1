// Processor and memory limits of the control groups, version 1 and 2, that this process is in.
#pragma once
#include <cstdint>
#include <string>

namespace noria {

struct CgroupLimits {
  double cpus = 0;           // processors' worth of time; 0: no limit
  int64_t memory_limit = 0;  // bytes of the tightest group; 0: no limit
  int64_t memory_left = 0;   // bytes until some group's limit is reached, page cache that can be dropped not counted
};

// The tightest limits from the process's group up to the root. `root` is put before /proc and /sys.
CgroupLimits read_cgroup_limits(const std::string& root);

}  // namespace noria
