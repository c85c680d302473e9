// A point on the monotonic clock after which waiting is pointless.
#pragma once

#include <algorithm>
#include <chrono>

namespace fccl {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Never expires.
  Deadline() = default;
  // Expires `timeout` from now; a timeout of 24 days or more (what torch's "no limit" looks like)
  // never expires.
  static Deadline after(std::chrono::milliseconds timeout) {
    Deadline deadline;
    if (timeout < std::chrono::hours(24 * 24)) {
      deadline.start_ = Clock::now();
      deadline.end_ = deadline.start_ + timeout;
    }
    return deadline;
  }

  bool expired() const { return end_ != Clock::time_point::max() && Clock::now() >= end_; }

  // Time left, at least zero and at most `limit`.
  std::chrono::milliseconds left(std::chrono::milliseconds limit) const {
    if (end_ == Clock::time_point::max()) return limit;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now());
    return std::clamp(left, std::chrono::milliseconds(0), limit);
  }

  // The whole span this deadline was made with, for messages; zero if it never expires.
  std::chrono::milliseconds span() const {
    if (end_ == Clock::time_point::max()) return std::chrono::milliseconds(0);
    return std::chrono::round<std::chrono::milliseconds>(end_ - start_);
  }

 private:
  Clock::time_point start_{};
  Clock::time_point end_ = Clock::time_point::max();
};

}  // namespace fccl
