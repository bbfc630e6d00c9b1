#include "core/pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace noria {

struct Pool::State {
  std::mutex mutex;
  std::condition_variable wake, done;
  std::vector<std::thread> workers;
  Erased task = nullptr;
  void* context = nullptr;
  int64_t count = 0;
  std::atomic<int64_t> next{0};
  uint64_t generation = 0;
  int busy = 0;
  bool stop = false;

  void drain(int thread) {
    for (int64_t i; (i = next.fetch_add(1)) < count;) task(context, i, thread);
  }
  void loop(int thread) {
    uint64_t seen = 0;
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      lock.unlock();
      drain(thread);
      lock.lock();
      if (--busy == 0) done.notify_one();
    }
  }
};

Pool::Pool(int threads) : state_(new State) {
  for (int i = 1; i < threads; ++i) state_->workers.emplace_back([this, i] { state_->loop(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (auto& worker : state_->workers) worker.join();
}

int Pool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void Pool::run_erased(int64_t count, Erased task, void* context) {
  State& s = *state_;
  if (s.workers.empty() || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.task = task;
    s.context = context;
    s.count = count;
    s.next.store(0);
    s.busy = static_cast<int>(s.workers.size());
    ++s.generation;
  }
  s.wake.notify_all();
  s.drain(0);
  std::unique_lock<std::mutex> lock(s.mutex);
  s.done.wait(lock, [&] { return s.busy == 0; });
}

}  // namespace noria
