// What users want done when a group fails (torch 2.14's abort hooks): a dump of what every thread is at, say.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "c10d/process.h"

namespace fccl::c10d_backend {

// Thread-safety: any thread may call anything. Hooks are run, copied and freed without the lock: they hold
// objects of Python's, whose lock the thread that wants ours may hold.
class FailureHooks {
 public:
  using Hook = std::function<void()>;

  void add(std::int64_t id, Hook hook) { exchange(id, std::make_shared<const Hook>(std::move(hook))); }
  void remove(std::int64_t id) { exchange(id, nullptr); }

  // Runs them in the order of their ids. What one throws is a warning: the group's own error is what counts.
  void run() noexcept {
    try {
      std::map<std::int64_t, std::shared_ptr<const Hook>> hooks;
      {
        const std::lock_guard lock(mutex_);
        hooks = hooks_;
      }
      for (const auto& [id, hook] : hooks) {
        try {
          (*hook)();
        } catch (const std::exception& error) {
          warn("fccl: abort hook " + std::to_string(id) + " failed: " + error.what());
        }
      }
    } catch (...) {
    }
  }

 private:
  void exchange(std::int64_t id, std::shared_ptr<const Hook> hook) {
    std::shared_ptr<const Hook> old = std::move(hook);  // freed when the lock no longer is held
    const std::lock_guard lock(mutex_);
    if (old) {
      hooks_[id].swap(old);
    } else if (const auto it = hooks_.find(id); it != hooks_.end()) {
      old = std::move(it->second);
      hooks_.erase(it);
    }
  }

  std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<const Hook>> hooks_;
};

}  // namespace fccl::c10d_backend
