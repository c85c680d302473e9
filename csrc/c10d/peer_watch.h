// Notices that a rank of a group will not come any more, though nobody calls into fccl: the host may sit
// inside CUDA, behind a kernel that waits for that rank.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace fccl::c10d_backend {

// Invariants:
//  1. Both functions are called by the watch's own thread only, and not after stop() has returned; they touch
//     neither torch nor Python, whose locks the thread that calls stop() may hold.
//  2. `tell` comes a whole period after `look` has first seen trouble. By then every launch is over that the
//  lost
//     rank had its part in: a rank ends a launch only after all its peers have begun theirs (protocol.h, 3.),
//     and what it had to send has been sent. Whoever still waits, waits in vain.
//  3. The thread belongs to the process that made it. A forked child has none, and must leave the object as
//  it
//     lies.
class PeerWatch {
 public:
  static constexpr std::chrono::milliseconds kPeriod{250};

  // `look` returns what is the matter with a rank, if anything; `tell` is called at most once. Without a
  // thread to be had nothing is watched, and timeouts are all there is.
  PeerWatch(std::function<std::optional<std::string>()> look, std::function<void(const std::string&)> tell);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  void stop() noexcept;

 private:
  void run();
  // Whether the period is over; false: stop() was called.
  bool sleep();

  const std::function<std::optional<std::string>()> look_;
  const std::function<void(const std::string&)> tell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace fccl::c10d_backend
