// The kernel thread pool: one thread per physical core that this process may use, the caller being one of them.
// Tasks are taken dynamically, one index at a time, so that a descheduled thread holds nobody up; which thread runs a
// task must never change a bit of its result. Workers spin briefly inside a step and sleep between steps.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

namespace noria {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  int threads() const;
  // Runs task(index, thread) for index in [0, count); returns when all have run. Not reentrant. The callable must not
  // throw.
  template <class F> void run(int64_t count, F&& task) {
    using Task = std::remove_reference_t<F>;
    run_erased(count, [](void* context, int64_t index, int thread) { (*static_cast<Task*>(context))(index, thread); },
               const_cast<void*>(static_cast<const void*>(&task)));
  }

 private:
  using Erased = void (*)(void* context, int64_t index, int thread);
  void run_erased(int64_t count, Erased task, void* context);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace noria
