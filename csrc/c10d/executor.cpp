#include "c10d/executor.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "c10d/process.h"
#include "cpu/wait.h"

namespace fccl::c10d_backend {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSlice = std::chrono::milliseconds(100);
constexpr auto kJoinLimit = std::chrono::seconds(5);

std::string describe(const CollectiveWork& work) {
  return std::string(work.title()) + " number " + std::to_string(work.getSequencenumber()) + " on rank " +
         std::to_string(work.rank());
}

}  // namespace

Executor::~Executor() {
  // stop() has joined the worker, or left it to itself because it is stuck in the kernel.
  if (worker_.joinable()) worker_.detach();
}

void Executor::number(const WorkPtr& work) {
  if (closed_) {
    C10_THROW_ERROR(DistBackendError, std::string(work->title()) + " on rank " +
                                          std::to_string(work->rank()) +
                                          ": the process group has been destroyed; initialise a new one");
  }
  work->set_number(++submitted_);
}

// A signal handler that runs while its thread waits in a collective cannot wait for another: the one it
// interrupted is before it, and cannot go on until the handler returns.
void Executor::refuse_nested(const CollectiveWork& work) const {
  if (!driving_ || driver_ != std::this_thread::get_id()) return;
  C10_THROW_ERROR(DistBackendError,
                  std::string(work.title()) + " on rank " + std::to_string(work.rank()) +
                      ": called from within another collective of the same group on the same "
                      "thread (a signal handler?), which it would have to wait for");
}

bool Executor::begin_now(const WorkPtr& work) {
  std::lock_guard lock(mutex_);
  if (driving_ || !queue_.empty()) {
    refuse_nested(*work);
    return false;
  }
  number(work);
  driving_ = true;
  driver_ = std::this_thread::get_id();
  return true;
}

void Executor::finish_now(const WorkPtr& work, std::function<void()> body) {
  work->set_body(std::move(body));
  {
    std::lock_guard lock(mutex_);
    number(work);
    queue_.push_back(work);
  }
  try {
    wait(*work, std::chrono::milliseconds::zero());
  } catch (...) {
    // Ctrl-C while others' work was in the way: this call still has its number, so it must be made.
    std::lock_guard lock(mutex_);
    start_worker();  // if that fails, by whoever waits next
    throw;
  }
}

void Executor::end_now() {
  std::lock_guard lock(mutex_);
  driving_ = false;
  if (waiters_ != 0) done_.notify_all();
  if (!queue_.empty()) queued_.notify_one();
}

void Executor::run_later(const WorkPtr& work, std::function<void()> body) {
  work->set_body(std::move(body));
  {
    std::lock_guard lock(mutex_);
    number(work);
    const bool has_worker = start_worker();
    queue_.push_back(work);
    if (has_worker) {
      if (!driving_) queued_.notify_one();
      return;
    }
  }
  // No thread to be had: here and now, rather than when somebody waits, who may wait for a Future only.
  wait(*work, std::chrono::milliseconds::zero());
}

bool Executor::start_worker() {
  if (worker_runs_) return true;
  SignalsBlocked blocked;
  try {
    worker_ = std::thread([self = shared_from_this()] { self->work_loop(); });
  } catch (const std::system_error&) {
    return false;
  }
  worker_runs_ = true;
  return true;
}

std::exception_ptr Executor::run_front(std::unique_lock<std::mutex>& lock) {
  WorkPtr work = std::move(queue_.front());
  queue_.pop_front();
  driving_ = true;
  driver_ = std::this_thread::get_id();
  lock.unlock();
  work->run();
  const std::exception_ptr error = work->exception();
  work.reset();  // may free tensors, which may want the interpreter's lock
  lock.lock();
  driving_ = false;
  if (waiters_ != 0) done_.notify_all();
  if (!queue_.empty()) queued_.notify_one();
  return error;
}

void Executor::work_loop() {
  pthread_setname_np(pthread_self(), "fccl-worker");
  cpu::set_background_thread(true);  // the caller computes meanwhile: no spinning where cores are scarce
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [this] { return stopping_ || (!queue_.empty() && !driving_); });
    if (stopping_) break;
    run_front(lock);
  }
  worker_runs_ = false;
  done_.notify_all();
}

void Executor::wait(CollectiveWork& work, std::chrono::milliseconds timeout) {
  const bool limited = timeout > std::chrono::milliseconds::zero();
  const Clock::time_point end = limited ? Clock::now() + timeout : Clock::time_point::max();
  std::unique_lock lock(mutex_);
  while (!work.is_done()) {
    refuse_nested(work);
    // With a limit of its own this thread must stay free to leave, so the worker drives.
    if (!driving_ && !queue_.empty()) {
      if (!limited || !start_worker()) {
        const std::uint64_t before = interrupts_seen();
        const std::exception_ptr error = run_front(lock);
        // Ctrl-C in a call that this thread made on behalf of another: it is meant for this one.
        if (error && interrupts_seen() != before) std::rethrow_exception(error);
        continue;
      }
      queued_.notify_one();
    }
    const Clock::time_point slice = std::min(end, Clock::now() + kSlice);
    ++waiters_;
    const bool timed_out = done_.wait_until(lock, slice) == std::cv_status::timeout;
    --waiters_;
    if (!timed_out || work.is_done()) continue;
    if (Clock::now() >= end) {
      C10_THROW_ERROR(DistBackendError, describe(work) + ": wait(timeout) timed out after " +
                                            std::to_string(timeout.count()) +
                                            " ms. The collective goes on; wait() for it again.");
    }
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
}

std::uint64_t Executor::submitted() const {
  std::lock_guard lock(mutex_);
  return submitted_;
}

bool Executor::stop(std::chrono::milliseconds grace, const std::function<void()>& give_up) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  const auto idle = [this] { return queue_.empty() && !driving_; };
  ++waiters_;
  if (!idle() && !done_.wait_for(lock, grace, idle)) {
    lock.unlock();
    give_up();
    lock.lock();
    while (!queue_.empty()) {
      WorkPtr work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work->complete(std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                                describe(*work) + ": the process group was destroyed before it began")));
      work.reset();
      lock.lock();
    }
    done_.notify_all();
    done_.wait_for(lock, kJoinLimit, idle);
  }
  stopping_ = true;
  queued_.notify_all();
  done_.wait_for(lock, kJoinLimit, [this] { return !worker_runs_; });
  --waiters_;
  const bool ended = !worker_runs_;
  const bool still = idle();
  std::thread worker = std::move(worker_);
  lock.unlock();
  if (!worker.joinable()) return still;
  if (ended && worker.get_id() != std::this_thread::get_id()) {
    worker.join();
  } else {
    worker.detach();
  }
  return still;
}

}  // namespace fccl::c10d_backend
