// Runs a group's collectives one at a time, in the order of submission.
//
// Invariants:
// 1. A collective's number is taken at submission, under the lock, so numbers and execution have
//    one order, and ranks that submit in the same order number alike.
// 2. At most one thread drives (executes) at a time. Synchronous calls drive in the calling thread;
//    asynchronous ones are left to one worker, started at first use; wait() on work that nobody has
//    begun drives everything up to it, so that no time is lost on waking another thread.
// 3. A driver executes the front of the queue only. So a collective never overtakes another.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <c10/util/intrusive_ptr.h>

#include "c10d/work.h"

namespace fccl::c10d_backend {

class Executor : public std::enable_shared_from_this<Executor> {
 public:
  using WorkPtr = c10::intrusive_ptr<CollectiveWork>;

  Executor() = default;
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Executes `body` after all earlier work and returns when it is done; throws what it throws.
  template <class Body>
  void run_now(const WorkPtr& work, Body body);
  // Leaves `body` to the worker, or to whoever waits for it first. If no thread can be started, executes it
  // before it returns.
  void run_later(const WorkPtr& work, std::function<void()> body);

  // Until `work` is done. Throws a DistBackendError when `timeout` passes (zero: no limit of its
  // own); the work goes on.
  void wait(CollectiveWork& work, std::chrono::milliseconds timeout);

  // Number of collectives submitted so far.
  std::uint64_t submitted() const;

  // Refuses further submissions, lets what is queued finish for up to `grace`, then calls `give_up`
  // (which must make the collective in progress fail soon), fails what is left and ends the worker.
  // False if a collective is still in progress after all that.
  bool stop(std::chrono::milliseconds grace, const std::function<void()>& give_up);

 private:
  bool begin_now(const WorkPtr& work);  // true: this thread drives
  void end_now();
  void finish_now(const WorkPtr& work, std::function<void()> body);
  void number(const WorkPtr& work);
  void refuse_nested(const CollectiveWork& work) const;
  bool start_worker();  // false: no thread to be had
  // Runs the queue's first work; returns what it ended with, if with an exception.
  std::exception_ptr run_front(std::unique_lock<std::mutex>& lock);
  void work_loop();

  mutable std::mutex mutex_;
  std::condition_variable done_;    // an item was finished
  std::condition_variable queued_;  // the worker has something to do
  std::deque<WorkPtr> queue_;
  bool driving_ = false;
  std::thread::id driver_;  // while driving_
  bool closed_ = false;
  bool stopping_ = false;
  bool worker_runs_ = false;
  int waiters_ = 0;
  std::uint64_t submitted_ = 0;
  std::thread worker_;
};

template <class Body>
void Executor::run_now(const WorkPtr& work, Body body) {
  // The usual case, nothing queued: two uncontended locks and no allocation.
  if (begin_now(work)) {
    work->run(body);
    end_now();
  } else {
    finish_now(work, std::function<void()>(std::move(body)));
  }
  work->rethrow();
}

}  // namespace fccl::c10d_backend
