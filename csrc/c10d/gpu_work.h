// One call that fccl's kernels carry out on a GPU, as torch sees it.
#pragma once

#include <memory>
#include <vector>

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/gpu_engine.h"

namespace fccl::c10d_backend {

class GpuWork final : public ::c10d::Work {
 public:
  // On `stream`, which the kernel has been put on and which is the current one. `keeps`: tensors that it
  // touches.
  GpuWork(int rank, ::c10d::OpType type, const char* title, std::shared_ptr<GpuEngine> engine,
          c10::Stream stream, std::vector<at::Tensor> outputs, std::vector<at::Tensor> keeps);
  ~GpuWork() override;

  // Whether the device is done with it.
  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  // Makes the current stream wait for the end; does not block the host. Raises what a kernel has reported so
  // far: what comes later is raised by the next call.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::shared_ptr<GpuEngine> engine_;
  const c10::Stream stream_;
  c10::Event end_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> keeps_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace fccl::c10d_backend
