#include "c10d/completion.h"

#include <c10/util/Exception.h>

#include <cxxabi.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "c10d/process.h"

namespace fccl::c10d_backend {
namespace {

constexpr auto kIdleLife = std::chrono::seconds(5);

class Pool {
 public:
  void post(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() <= idle_) {
      ready_.notify_one();
      return;
    }
    SignalsBlocked blocked;
    try {
      std::thread([this] { serve(); }).detach();
      ++threads_;
    } catch (const std::system_error&) {
      // No thread to be had: one that is busy takes the task later; if there is none, it is done here.
      if (threads_ != 0) return;
      std::function<void()> own = std::move(tasks_.back());
      tasks_.pop_back();
      lock.unlock();
      run(own);
    }
  }

  void drain(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    drained_.wait_for(lock, limit, [this] { return tasks_.empty() && running_ == 0; });
  }

 private:
  void serve() {
    pthread_setname_np(pthread_self(), "fccl-futures");
    std::unique_lock lock(mutex_);
    for (;;) {
      while (!tasks_.empty()) {
        std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        ++running_;
        lock.unlock();
        run(task);
        task = nullptr;  // what it holds is freed outside the lock
        lock.lock();
        --running_;
        if (tasks_.empty() && running_ == 0) drained_.notify_all();
      }
      ++idle_;
      const bool woken = ready_.wait_for(lock, kIdleLife, [this] { return !tasks_.empty(); });
      --idle_;
      if (!woken) {
        --threads_;
        return;
      }
    }
  }

  static void run(const std::function<void()>& task) {
    try {
      task();
    } catch (const abi::__forced_unwind&) {
      throw;  // the interpreter ends this thread, which may not be caught
    } catch (const std::exception& error) {
      TORCH_WARN("fccl: a callback of a Future threw: ", error.what());
    } catch (...) {
      TORCH_WARN("fccl: a callback of a Future threw something that is not an exception");
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  std::condition_variable drained_;
  std::size_t idle_ = 0;
  std::size_t running_ = 0;
  std::size_t threads_ = 0;
};

// Never destroyed, because its detached threads may outlive static destructors; replaced in the
// child of a fork, which has none of those threads.
std::atomic<Pool*> pool{new Pool()};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool()); });

}  // namespace

void complete_elsewhere(std::function<void()> task) { pool.load()->post(std::move(task)); }

void drain_completions(std::chrono::milliseconds limit) noexcept { pool.load()->drain(limit); }

}  // namespace fccl::c10d_backend
