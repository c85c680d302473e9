#include "c10d/work.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>

#include <utility>

#include "c10d/completion.h"
#include "c10d/errors.h"
#include "c10d/executor.h"

namespace fccl::c10d_backend {

// Naming the call and its inputs costs a few hundred nanoseconds, spent only while somebody
// records.
CollectiveWork::CollectiveWork(int rank, ::c10d::OpType type, const char* title,
                               const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
                               std::shared_ptr<Executor> executor)
    : ::c10d::Work(rank, type, at::hasCallbacks() ? title : nullptr,
                   at::hasCallbacks() ? std::make_optional(inputs) : std::nullopt),
      title_(title),
      executor_(std::move(executor)),
      outputs_(std::move(outputs)) {}

std::exception_ptr CollectiveWork::caught() noexcept { return current_as_torch(); }

bool CollectiveWork::isSuccess() const { return is_done() && !exception_; }

std::exception_ptr CollectiveWork::exception() const { return is_done() ? exception_ : nullptr; }

void CollectiveWork::rethrow() const {
  if (is_done() && exception_) std::rethrow_exception(exception_);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (!is_done()) executor_->wait(*this, timeout);
  rethrow();
  return true;
}

void CollectiveWork::abort() {
  C10_THROW_ERROR(
      NotImplementedError,
      "fccl: one collective cannot be aborted alone, because its peers have begun it too; abort the "
      "group (torch.distributed.distributed_c10d._abort_process_group)");
}

void CollectiveWork::run() noexcept {
  run(body_);
  body_ = nullptr;
}

void CollectiveWork::complete(std::exception_ptr error) noexcept {
  // First: whoever waits may close the profile as soon as the work is done.
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    exception_ = std::move(error);
    completed_ = true;
    done_.store(true, std::memory_order_release);
    tasks.swap(at_completion_);
  }
  for (auto& task : tasks) complete_elsewhere(std::move(task));
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::future_of(bool of_result) {
  using Future = c10::ivalue::Future;
  std::unique_lock lock(mutex_);
  auto& slot = of_result ? future_result_ : future_;
  if (slot) return slot;
  slot = c10::make_intrusive<Future>(of_result ? c10::TypePtr(c10::IntType::get())
                                               : c10::TypePtr(c10::ListType::create(c10::TensorType::get())));
  auto finish = [future = slot, outputs = outputs_, of_result](const std::exception_ptr& error) {
    if (of_result) {
      future->markCompleted(c10::IValue(
          static_cast<std::int64_t>(error ? ::c10d::WorkResult::COMM_ERROR : ::c10d::WorkResult::SUCCESS)));
    } else if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  };
  auto future = slot;
  if (is_done()) {
    lock.unlock();
    finish(exception_);
    return future;
  }
  // Callbacks see the caller's grad mode, profiler and so on, as they would on the caller's thread.
  // `this` stays alive: the executor holds a work until it has completed, and this reference keeps
  // it until its Futures have.
  auto self = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(this);
  at_completion_.push_back([finish, self, state = at::ThreadLocalState()] {
    at::ThreadLocalStateGuard guard(state);
    finish(self->exception_);
  });
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() { return future_of(false); }

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFutureResult() { return future_of(true); }

}  // namespace fccl::c10d_backend
