// The kernel thread pool: one thread per physical core that this process may use, the caller being one of them.
// Tasks are taken dynamically, one index at a time, so that a descheduled thread holds nobody up; which thread runs a
// task must never change a bit of its result.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace noria {

// Memory that will be read from its start to its end.
struct Span {
  const char* first = nullptr;
  int64_t bytes = 0;
};

// How long a worker waits awake for the next run of a step, and the caller for the last tasks of its run. Longer than
// the serial stretches between two ops, shorter than what a neighbour on the same core would notice.
inline constexpr std::chrono::microseconds kSpin{100};

class Pool {
 public:
  // At least one thread. Throws std::system_error if the system will not start them.
  explicit Pool(int threads, std::chrono::microseconds spin = kSpin);
  ~Pool();
  int threads() const;
  int asleep() const;  // workers that wait asleep, now

  // Runs task(index, thread) for index in [0, count), 0 <= thread < threads(); returns when all have run. Callers on
  // several threads take turns; a task must not call run. The callable must not throw.
  template <class F> void run(int64_t count, F&& task) {
    using Task = std::remove_reference_t<F>;
    run_erased(count, [](void* context, int64_t index, int thread) { (*static_cast<Task*>(context))(index, thread); },
               const_cast<void*>(static_cast<const void*>(&task)));
  }

  // A step begins: wakes the workers, so that they are there when its first run comes. A worker waits awake for a tenth
  // of a millisecond after its last task, which costs a microsecond between two ops where waking a thread costs fifty;
  // then it sleeps. So a pool that has nothing to do uses no processor time.
  void begin_step();

  // Nothing will come before the next step: the workers go to sleep at once. What else wants a processor then finds one
  // idle, instead of taking the caller's.
  void rest();

  // What each thread will read after the next run, [threads()] lists: while it waits for the others or for another run, it asks
  // for that into its second-level cache. Only a hint. The lists must stay as they are until others are set, null being none;
  // with null, no thread looks at the last ones any more when this returns.
  void expect(const std::vector<Span>* reads);

 private:
  using Erased = void (*)(void* context, int64_t index, int thread);
  void run_erased(int64_t count, Erased task, void* context);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace noria
