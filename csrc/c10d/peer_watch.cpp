#include "c10d/peer_watch.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "c10d/process.h"

namespace fccl::c10d_backend {

PeerWatch::PeerWatch(std::function<std::optional<std::string>()> look,
                     std::function<void(const std::string&)> tell)
    : look_(std::move(look)), tell_(std::move(tell)) {
  try {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
    ::pthread_setname_np(thread_.native_handle(), "fccl-watch");
  } catch (const std::system_error&) {
  }
}

PeerWatch::~PeerWatch() { stop(); }

void PeerWatch::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool PeerWatch::sleep() {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, kPeriod, [this] { return stopped_; });
}

void PeerWatch::run() {
  while (sleep()) {
    if (const auto trouble = look_()) {
      if (sleep()) tell_(*trouble);  // 2.
      return;
    }
  }
}

}  // namespace fccl::c10d_backend
