// What users want done when a group fails (torch 2.14's abort hooks): a dump of what every thread is at, say.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "c10d/process.h"

namespace fccl::c10d_backend {

// Thread-safety: any thread may call anything. A hook runs without the lock, so it may add and remove hooks.
class FailureHooks {
 public:
  void add(std::int64_t id, std::function<void()> hook) {
    const std::lock_guard lock(mutex_);
    hooks_[id] = std::move(hook);
  }
  void remove(std::int64_t id) {
    std::function<void()> freed;  // outside the lock: it may hold objects of Python's
    const std::lock_guard lock(mutex_);
    const auto it = hooks_.find(id);
    if (it == hooks_.end()) return;
    freed = std::move(it->second);
    hooks_.erase(it);
  }

  // Runs them in the order of their ids. What one throws is a warning: the group's own error is what counts.
  void run() noexcept {
    try {
      std::map<std::int64_t, std::function<void()>> hooks;
      {
        const std::lock_guard lock(mutex_);
        hooks = hooks_;
      }
      for (const auto& [id, hook] : hooks) {
        try {
          hook();
        } catch (const std::exception& error) {
          warn("fccl: abort hook " + std::to_string(id) + " failed: " + error.what());
        }
      }
    } catch (...) {
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, std::function<void()>> hooks_;
};

}  // namespace fccl::c10d_backend
