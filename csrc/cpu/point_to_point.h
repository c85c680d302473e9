// send and receive between two ranks of a group: posting, waiting and progress.
//
// A matcher (matcher.h) does the work whenever somebody calls it: the thread that waits for a request, or,
// when nobody has waited for a millisecond, a thread of our own, so that what was begun goes on while the
// program computes. It is started by the first request that is not done at once, looks once a millisecond
// while there is traffic, and sleeps for good when there is none. It keeps out of the way of those that wait:
// two threads on one rank's core would take it from each other at every step.
//
// Sleeping: a thread tells the peers concerned that it sleeps, notes their bells, makes progress once more,
// and sleeps until one of the bells has changed (futex_waitv): wait.h has the reasoning. A word of our own is
// among them, for what comes from other threads of this process.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/deadline.h"
#include "cpu/matcher.h"

namespace fccl::cpu {

// Thread-safe.
class PointToPoint {
 public:
  explicit PointToPoint(Group::State& state);
  ~PointToPoint();
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  // Begins a send or a receive; its memory must stay until it is done. Throws the group's failure.
  void post(const RequestPtr& request);
  // Until the request is done; throws what it failed with. Throws kTimeout when `deadline` passes, or what an
  // interrupt check throws; the request goes on then.
  void wait(Request& request, const Deadline& deadline);
  // Whether it is done, after a look.
  bool test(Request& request);

  // Makes threads that sleep look up: the group has failed.
  void wake() noexcept;
  // Takes a receive back that no message has been found for yet; false if there is one, or it is done.
  bool withdraw(const RequestPtr& request) noexcept;
  // Lets sends, and answers to the peers, go out for up to `grace`.
  void drain(std::chrono::milliseconds grace) noexcept;
  // Fails what is left with `why`, and ends the thread. Idempotent.
  void stop(const Error& why) noexcept;

 private:
  class Waiting;
  class Sleeping;

  // One round of progress; false if nothing moved. Calls what is to be called at requests' ends.
  bool progress();
  // Runs `step` on the matcher, under the lock; whatever it throws fails the group and every request.
  template <typename Step>
  void guarded(Step&& step);
  void end_all(std::unique_lock<std::mutex>& lock);
  void sleep_until_news(std::chrono::nanoseconds limit, const Request* request);
  // What could have gone wrong: fails the group if it has, and somebody needs who is gone.
  void look_around();
  std::optional<Error> trouble_with(int peer) const;
  void start_worker();
  void check_fork(const Request& request) const;
  void work();
  void work_until_stopped();
  Error timed_out(const Request& request, const Deadline& deadline);

  Group::State& state_;
  std::mutex mutex_;  // the matcher
  Matcher matcher_;
  bool stopped_ = false;

  std::atomic<int> waiting_{0};             // threads in wait()
  std::atomic<std::uint64_t> turns_{0};     // grows whenever one comes or goes
  std::atomic<int> sleeping_{0};            // threads in a futex
  std::atomic<std::uint32_t> own_bell_{0};  // what wakes them from inside this process
  std::atomic<bool> stopping_{false};
  // Wakes the worker from its long sleep. A pointer, so that a forked child can leave it alone: destroying it
  // waits for those that wait for it, and the worker is the parent's.
  std::unique_ptr<std::condition_variable> busy_ = std::make_unique<std::condition_variable>();
  std::atomic<bool> worker_rests_{false};
  std::atomic<bool> worker_works_{false};
  bool worker_runs_ = false;
  std::thread worker_;
};

}  // namespace fccl::cpu
