#include "c10d/completion.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "c10d/process.h"

namespace fccl::c10d_backend {
namespace {

constexpr auto kIdleLife = std::chrono::seconds(5);

class Pool {
 public:
  void post(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() <= idle_) {
      ready_.notify_one();
      return;
    }
    SignalsBlocked blocked;
    std::thread([this] { serve(); }).detach();
  }

 private:
  void serve() {
    pthread_setname_np(pthread_self(), "fccl-futures");
    std::unique_lock lock(mutex_);
    for (;;) {
      while (!tasks_.empty()) {
        std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        run(task);
        task = nullptr;  // what it holds is freed outside the lock
        lock.lock();
      }
      ++idle_;
      const bool woken = ready_.wait_for(lock, kIdleLife, [this] { return !tasks_.empty(); });
      --idle_;
      if (!woken) return;
    }
  }

  static void run(const std::function<void()>& task) {
    try {
      task();
    } catch (const std::exception& error) {
      TORCH_WARN("fccl: a callback of a Future threw: ", error.what());
    } catch (...) {
      TORCH_WARN("fccl: a callback of a Future threw something that is not an exception");
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  std::size_t idle_ = 0;
};

// Never destroyed, because its detached threads may outlive static destructors; replaced in the
// child of a fork, which has none of those threads.
std::atomic<Pool*> pool{new Pool()};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool()); });

}  // namespace

void complete_elsewhere(std::function<void()> task) { pool.load()->post(std::move(task)); }

}  // namespace fccl::c10d_backend
