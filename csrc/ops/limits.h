// What the machine can do at best, as a pool of threads meets it: products, reads, and the pool's own cost. For
// measurements only; the caller holds the clock.
#pragma once
#include <vector>

#include "core/pool.h"
#include "core/types.h"

namespace noria {

// Register-resident products in the instructions of a scheme (int4 is multiplied as int8): `tasks` tasks of `turns` turns
// each. Returns the operations done, a multiply-add being two.
int64_t limit_products(Pool& pool, Scheme scheme, int64_t turns, int64_t tasks);
const char* limit_instruction(Scheme scheme);

// Memory to read from, touched when it is made.
class LimitMemory {
 public:
  // Throws std::bad_alloc.
  explicit LimitMemory(Pool& pool, int64_t bytes);
  int64_t bytes() const { return static_cast<int64_t>(data_.bytes()); }
  // Reads `bytes` from the offset `first` on `repeats` times and returns how much that was. `shared`: the threads take pieces of it, as they
  // take the panels of a weight; else each reads a stretch of its own, of `bytes / threads`, again and again. `ahead`: see
  // LimitKernels::read. Throws std::invalid_argument for more bytes than there are or than cover one line per thread.
  int64_t read(Pool& pool, int64_t first, int64_t bytes, bool shared, int64_t ahead, int64_t repeats) const;

 private:
  Buffer data_;
};

// Holds each thread of the pool, the caller's included, to a processor of its own, or lets all of them go again: a system
// that packs threads onto few processors would otherwise halve a limit now and then. False, and without effect, where the
// system cannot do it or where several processors may be one core.
bool limit_pin(Pool& pool, bool on);

// [repeats] seconds from the start of a run until every thread of the pool is in it. `asleep`: the threads have slept
// before; else they have just ended a run and wait awake.
std::vector<double> limit_wake(Pool& pool, bool asleep, int repeats);
// Seconds of one run of as many empty tasks as threads, over `repeats` runs in a row: the least that an op costs.
double limit_run(Pool& pool, int repeats);

}  // namespace noria
