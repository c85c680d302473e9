// One call, as torch sees it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fccl::c10d_backend {

class Executor;

class CollectiveWork : public ::c10d::Work {
 public:
  // `title` is "fccl:all_reduce", with static lifetime; torch's profiler shows it with the sizes of
  // `inputs`.
  CollectiveWork(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs, std::shared_ptr<Executor> executor);

  bool isCompleted() override { return is_done(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  // Waits for the collective, whose own deadline is the group's. An explicit `timeout` bounds this
  // wait only: when it passes, this throws and the collective goes on.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::uint64_t getSequencenumber() const override { return number_; }

  bool is_done() const noexcept { return done_.load(std::memory_order_acquire); }
  const char* title() const noexcept { return title_; }
  int rank() const noexcept { return rank_; }
  // The exception the collective ended with, if any.
  void rethrow() const;

  // ---- for the executor ----

  void set_number(std::uint64_t number) noexcept { number_ = number; }
  void set_body(std::function<void()> body) { body_ = std::move(body); }
  // Runs the body and completes.
  void run() noexcept;
  template <class Body>
  void run(Body& body) noexcept;
  void complete(std::exception_ptr error) noexcept;

 private:
  // The exception in flight, as torch's.
  static std::exception_ptr caught() noexcept;
  c10::intrusive_ptr<c10::ivalue::Future> future_of(bool of_result);

  const char* title_;
  std::shared_ptr<Executor> executor_;
  std::vector<at::Tensor> outputs_;
  std::function<void()> body_;
  std::uint64_t number_ = 0;
  std::atomic<bool> done_{false};
  // What to do at completion: complete the Futures handed out before. Guarded by mutex_.
  std::vector<std::function<void()>> at_completion_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> future_result_;
};

template <class Body>
void CollectiveWork::run(Body& body) noexcept {
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = caught();
  }
  complete(std::move(error));
}

}  // namespace fccl::c10d_backend
