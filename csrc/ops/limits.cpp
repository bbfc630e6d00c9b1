#include "ops/limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "core/isa.h"
#include "core/topology.h"
#include "kernels/limits.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace noria {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPieceBytes = 64 << 10;  // of a shared read; a panel of a weight is as large
constexpr std::chrono::milliseconds kAsleep{3};  // a pool's threads sleep long before

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

auto product_kernel(Scheme scheme) {
  const LimitKernels& table = *kernels().limits;
  return scheme == Scheme::f32 ? table.f32 : scheme == Scheme::bf16 ? table.bf16 : table.int8;
}

// Runs task(thread) on every thread of the pool. Nobody leaves before all are there: a thread holds one task, so that each
// must take one.
template <class F> void on_every_thread(Pool& pool, F&& task) {
  const int threads = pool.threads();
  std::atomic<int> present{0};
  pool.run(threads, [&](int64_t, int thread) {
    task(thread);
    ++present;
    while (present.load() < threads) std::this_thread::yield();
  });
}

}  // namespace

int64_t limit_products(Pool& pool, Scheme scheme, int64_t turns, int64_t tasks) {
  const auto run = product_kernel(scheme);
  std::atomic<int64_t> operations{0};
  pool.begin_step();
  pool.run(tasks, [&](int64_t, int) { operations += run(turns); });
  return operations;
}

const char* limit_instruction(Scheme scheme) {
  const LimitKernels& table = *kernels().limits;
  return scheme == Scheme::f32 ? table.f32_name : scheme == Scheme::bf16 ? table.bf16_name : table.int8_name;
}

LimitMemory::LimitMemory(Pool& pool, int64_t bytes) : data_(static_cast<size_t>(bytes)) {
  // Something else than the zeros that the system hands out, all of which may be one and the same page.
  char* data = data_.as<char>();
  pool.run((bytes + kPieceBytes - 1) / kPieceBytes, [&](int64_t piece, int) {
    const int64_t first = piece * kPieceBytes;
    std::memset(data + first, 1, static_cast<size_t>(std::min(kPieceBytes, bytes - first)));
  });
}

int64_t LimitMemory::read(Pool& pool, int64_t first, int64_t bytes, bool shared, int64_t ahead, int64_t repeats) const {
  const int64_t threads = pool.threads();
  if (first < 0 || bytes > this->bytes() - first) throw std::invalid_argument("there is less memory to read than that");
  const int64_t piece = shared ? std::min(kPieceBytes, bytes / threads / kReadBytes * kReadBytes)
                               : bytes / threads / kReadBytes * kReadBytes;
  if (piece < kReadBytes) throw std::invalid_argument("too little memory to read for so many threads");
  const auto run = kernels().limits->read;
  const char* data = data_.as<char>() + first;
  const int64_t pieces = shared ? bytes / piece : threads;
  pool.begin_step();
  if (shared) {
    for (int64_t i = 0; i < repeats; ++i)
      pool.run(pieces, [&](int64_t index, int) { run(data + index * piece, piece, ahead); });
  } else {
    pool.run(pieces * repeats, [&](int64_t, int thread) { run(data + thread * piece, piece, ahead); });
  }
  return pieces * piece * repeats;
}

bool limit_pin(Pool& pool, bool on) {
#if defined(__linux__)
  const Topology& here = machine();
  const size_t count = here.cpus.size();
  if (count != static_cast<size_t>(here.physical_cores) || count < static_cast<size_t>(pool.threads())) return false;
  on_every_thread(pool, [&](int thread) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (size_t i = 0; i < count; ++i)
      if (!on || i == static_cast<size_t>(thread)) CPU_SET(here.cpus[i], &set);
    sched_setaffinity(0, sizeof set, &set);
  });
  return true;
#else
  return false;
#endif
}

std::vector<double> limit_wake(Pool& pool, bool asleep, int repeats) {
  std::vector<double> times;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    if (asleep) std::this_thread::sleep_for(kAsleep);
    else on_every_thread(pool, [](int) {});
    const auto start = Clock::now();
    on_every_thread(pool, [](int) {});
    times.push_back(seconds_since(start));
  }
  return times;
}

double limit_run(Pool& pool, int repeats) {
  pool.begin_step();
  const auto start = Clock::now();
  for (int repeat = 0; repeat < repeats; ++repeat) pool.run(pool.threads(), [](int64_t, int) {});
  return seconds_since(start) / repeats;
}

}  // namespace noria
