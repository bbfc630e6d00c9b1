#include "core/pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#endif

#include "core/topology.h"

namespace noria {

namespace {

constexpr int kPausesPerCheck = 16;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits awake until `ready` or until the time is up; says whether `ready`. Does something useful meanwhile, as long as there
// is: busy() does a little of it, or returns false.
template <class F, class Busy> bool spin_until(std::chrono::microseconds limit, F ready, Busy busy) {
  if (ready()) return true;
  if (limit.count() == 0) return false;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerCheck; ++i) {
      if (!busy()) pause();
      if (ready()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

constexpr int64_t kLine = 64;
// Asked for at once, between two looks at whether the wait is over.
constexpr int64_t kAskedBytes = 4 * kLine;

// How far a thread has asked for what it will read.
struct alignas(64) Reader {
  std::atomic<bool> looks{false};  // at the lists; nobody may free them meanwhile
  const std::vector<Span>* lists = nullptr;
  size_t span = 0;
  int64_t asked = 0;  // bytes of the span

  // Asks for a little more. False if there is no more.
  bool ask(const std::vector<Span>* now, size_t thread) {
    if (!now) return false;
    if (now != lists) {
      lists = now;
      span = 0;
      asked = 0;
    }
    if (span >= now[thread].size()) return false;
    const Span& at = now[thread][span];
    const int64_t end = asked + kAskedBytes < at.bytes ? asked + kAskedBytes : at.bytes;
    for (; asked < end; asked += kLine) __builtin_prefetch(at.first + asked, 0, 2);
    if (asked < at.bytes) return true;
    ++span;
    asked = 0;
    return true;
  }
};

// So that `top -H` and profilers tell kernel threads from others.
void name_this_thread(int thread) {
#if defined(__linux__)
  const std::string name = "noria-" + std::to_string(thread);
  pthread_setname_np(pthread_self(), name.c_str());
#endif
}

}  // namespace

// A run is published in one word: its number in the upper half and the tasks not yet taken in the lower one, the first being
// the caller's without that. A thread owns a task once it has lowered that word by one. It can then rely on task, context and
// count: they are not written again before every taken task is done. A thread that wakes late finds nothing left, and nobody
// waits for it: the caller waits for tasks, not for threads.
//
// A cache line that one thread has written costs another a tenth of a microsecond, as much as a whole small op. So what a
// waiting worker looks at lies in the one line that says what to do, and the caller's own things where no worker looks.
struct Pool::State {
  alignas(64) std::atomic<uint64_t> open{0};
  Erased task = nullptr;
  void* context = nullptr;
  int64_t first = 0;   // index of the run's first task (runs of over 2^31 tasks are published in pieces)
  uint32_t count = 0;
  uint32_t run_number = 0;
  std::atomic<const std::vector<Span>*> expected{nullptr};
  std::atomic<bool> resting{false};

  alignas(64) std::atomic<uint32_t> done{0};  // tasks that workers have done, of all runs together

  alignas(64) std::atomic<uint32_t> step{0};
  std::atomic<bool> stop{false};
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::chrono::microseconds spin{0};
  std::vector<Reader> readers;

  alignas(64) std::mutex callers;  // held for a whole run
  uint32_t given = 0;              // what `done` is when the workers have done all that they took
  std::atomic<const std::vector<Span>*> expected_next{nullptr};  // by the next run's threads

  alignas(64) std::mutex mutex;  // guards falling asleep only
  std::condition_variable wake, finished;
  std::vector<std::thread> workers;

  // Sequentially consistent, against expect(nullptr): either that sees that this thread looks, or this thread sees null.
  bool ask_ahead(int thread) {
    if (!expected.load(std::memory_order_relaxed)) return false;
    Reader& reader = readers[static_cast<size_t>(thread)];
    reader.looks.store(true);
    const bool more = reader.ask(expected.load(), static_cast<size_t>(thread));
    reader.looks.store(false, std::memory_order_release);
    return more;
  }

  static uint32_t left(uint64_t word) { return static_cast<uint32_t>(word); }

  // Takes and runs tasks until none is left; returns how many it ran.
  uint32_t drain(int thread) {
    uint32_t ran = 0;
    uint64_t word = open.load(std::memory_order_acquire);
    while (left(word) != 0) {
      if (!open.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      task(context, first + (count - left(word)), thread);
      ++ran;
      word = open.load(std::memory_order_acquire);
    }
    return ran;
  }

  void loop(int thread) {
    name_this_thread(thread);
    for (;;) {
      if (const uint32_t ran = drain(thread)) report(ran);
      const uint32_t seen = step.load(std::memory_order_acquire);
      const auto tasks = [&] { return left(open.load(std::memory_order_relaxed)) != 0; };
      spin_until(spin, [&] { return tasks() || resting.load(std::memory_order_relaxed); }, [&] { return ask_ahead(thread); });
      if (!tasks() && !sleep(seen)) return;
    }
  }

  void report(uint32_t ran) {
    // Sequentially consistent, against caller_sleeps: either this thread sees the flag or the caller sees the count.
    done.fetch_add(ran);
    if (!caller_sleeps.load()) return;
    { std::lock_guard<std::mutex> lock(mutex); }
    finished.notify_one();
  }

  // Sleeps until there are tasks or a step after `seen` has begun. False when the pool closes.
  bool sleep(uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex);
    sleepers.fetch_add(1);
    wake.wait(lock, [&] { return stop.load() || left(open.load()) != 0 || step.load() != seen; });
    sleepers.fetch_sub(1);
    return !stop.load();
  }

  // Wakes up to `most` workers.
  void wake_sleepers(uint32_t most) {
    const int asleep = sleepers.load();
    if (asleep == 0) return;
    { std::lock_guard<std::mutex> lock(mutex); }
    if (most >= static_cast<uint32_t>(asleep)) return wake.notify_all();
    for (uint32_t i = 0; i < most; ++i) wake.notify_one();
  }

  void publish(Erased new_task, void* new_context, int64_t new_first, uint32_t new_count) {
    task = new_task;
    context = new_context;
    first = new_first;
    count = new_count;
    expected.store(expected_next.load(std::memory_order_relaxed), std::memory_order_relaxed);
    open.store(static_cast<uint64_t>(++run_number) << 32 | (new_count - 1));
    wake_sleepers(new_count - 1);
  }

  // Runs `new_count` tasks together with the workers.
  void run(Erased new_task, void* new_context, int64_t new_first, uint32_t new_count) {
    publish(new_task, new_context, new_first, new_count);
    new_task(new_context, new_first, 0);
    given += new_count - 1 - drain(0);
    wait();
  }

  void wait() {
    const auto ready = [&] { return done.load(std::memory_order_acquire) == given; };
    if (spin_until(spin, ready, [&] { return ask_ahead(0); })) return;
    std::unique_lock<std::mutex> lock(mutex);
    caller_sleeps.store(true);
    finished.wait(lock, [&] { return done.load() == given; });
    caller_sleeps.store(false);
  }
};

Pool::Pool(int threads, std::chrono::microseconds spin) : state_(new State) {
  state_->readers = std::vector<Reader>(static_cast<size_t>(threads < 1 ? 1 : threads));
  // With more threads than processors a waiting thread that is awake keeps a working one from running.
  if (threads <= machine().usable_cpus()) state_->spin = spin;
  for (int i = 1; i < threads; ++i) state_->workers.emplace_back([s = state_.get(), i] { s->loop(i); });
}

Pool::~Pool() {
  rest();
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop.store(true);
  }
  state_->wake.notify_all();
  for (auto& worker : state_->workers) worker.join();
}

int Pool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

int Pool::asleep() const { return state_->sleepers.load(); }

void Pool::rest() { state_->resting.store(true, std::memory_order_relaxed); }

void Pool::begin_step() {
  state_->resting.store(false, std::memory_order_relaxed);
  if (state_->spin.count() == 0) return;  // they would not wait for the first run
  state_->step.fetch_add(1);
  state_->wake_sleepers(UINT32_MAX);
}

void Pool::expect(const std::vector<Span>* reads) {
  if (reads) return state_->expected_next.store(reads, std::memory_order_relaxed);
  std::lock_guard<std::mutex> turn(state_->callers);  // no run hands them on meanwhile
  state_->expected_next.store(nullptr, std::memory_order_relaxed);
  state_->expected.store(nullptr);
  for (const Reader& reader : state_->readers)
    while (reader.looks.load()) pause();
}

void Pool::run_erased(int64_t count, Erased task, void* context) {
  State& s = *state_;
  std::lock_guard<std::mutex> turn(s.callers);
  if (s.workers.empty() || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
    return;
  }
  constexpr int64_t kMost = int64_t{1} << 31;
  for (int64_t first = 0; first < count; first += kMost)
    s.run(task, context, first, static_cast<uint32_t>(count - first < kMost ? count - first : kMost));
}

}  // namespace noria
