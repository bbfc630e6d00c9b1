// Which thread computes which rows of a step. From op to op a row stays with the thread that has it in its nearest caches:
// fetching what another core has just written costs more than most ops compute. Only a preference: a thread that has
// done its own rows goes on with others', and no bit depends on it.
#pragma once
#include <algorithm>
#include <atomic>

#include "core/pool.h"

namespace noria {

constexpr int64_t kOwnedRows = 32;   // per thread; with fewer, products are better cut along their outputs
constexpr int64_t kOwnedAlign = 16;  // rows of a tile in matrix registers
constexpr int kMostOwners = 64;      // threads beyond share rows

// Threads that rows are shared out to; 1: no thread has rows of its own.
inline int owners_of(const Pool& pool, int64_t rows) {
  const int threads = std::min(pool.threads(), kMostOwners);
  return rows >= kOwnedRows * threads ? threads : 1;
}
inline int64_t owned_from(int64_t rows, int owners, int64_t owner) {
  return owner >= owners ? rows : rows * owner / owners / kOwnedAlign * kOwnedAlign;
}

// Runs body(list, item, thread) for items first(list) … first(list + 1) - 1 of every list, in ascending order, those of the
// thread's own list first; then it goes on with the others'. Threads that keep to their lists share no counter: taking a
// small item from a common one costs as much as computing it.
template <class First, class F> void run_lists(Pool& pool, int lists, First first, F body) {
  struct alignas(64) Next {
    std::atomic<int64_t> item{0};
  };
  Next next[kMostOwners];
  for (int list = 0; list < lists; ++list) next[list].item.store(first(list), std::memory_order_relaxed);
  pool.run(std::min<int64_t>(pool.threads(), first(lists) - first(0)), [&](int64_t, int thread) {
    for (int i = 0; i < lists; ++i) {
      const int list = (thread + i) % lists;
      const int64_t end = first(list + 1);
      while (next[list].item.load(std::memory_order_relaxed) < end) {
        const int64_t item = next[list].item.fetch_add(1, std::memory_order_relaxed);
        if (item < end) body(list, item, thread);
      }
    }
  });
}

// Runs body(owner, item, thread) for `each` items of every owner, those of the thread's own first, in ascending order.
template <class F> void run_owned(Pool& pool, int owners, int64_t each, F body) {
  run_lists(pool, owners, [=](int owner) { return owner * each; },
            [&](int owner, int64_t item, int thread) { body(owner, item - owner * each, thread); });
}

// Runs body(first, count) over runs of rows: as many tasks as are worth it, but no more than `per_thread` for each thread.
template <class F> void run_rows(Pool& pool, int64_t rows, int64_t worth, int64_t per_thread, F body) {
  if (rows < 1) return;
  const int owners = owners_of(pool, rows);
  const int64_t most = owners > 1 ? per_thread : per_thread * pool.threads();
  const int64_t each = std::max<int64_t>(1, std::min({rows, worth / owners, most}));
  run_owned(pool, owners, each, [&](int owner, int64_t task, int) {
    const int64_t from = owned_from(rows, owners, owner), own = owned_from(rows, owners, owner + 1) - from;
    const int64_t first = own * task / each, last = own * (task + 1) / each;
    if (last > first) body(from + first, last - first);
  });
}

}  // namespace noria
