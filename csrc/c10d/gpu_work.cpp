#include "c10d/gpu_work.h"

#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "c10d/errors.h"

namespace fccl::c10d_backend {

GpuWork::GpuWork(int rank, ::c10d::OpType type, const char* title, std::shared_ptr<GpuEngine> engine,
                 c10::Stream stream, std::vector<at::Tensor> outputs, std::vector<at::Tensor> keeps)
    : ::c10d::Work(rank, type, title, keeps),
      engine_(std::move(engine)),
      stream_(stream),
      end_(stream.device_type()),
      outputs_(std::move(outputs)),
      keeps_(std::move(keeps)) {
  end_.record(stream_);
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{stream_.device()});
  // Completed for the host; whoever takes the value waits on the device, by events that are recorded here.
  future_->markCompleted(c10::IValue(outputs_));
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
}

GpuWork::~GpuWork() {
  // Nobody has waited: the allocator must not give the memory away before the stream is done with it.
  for (const at::Tensor& tensor : keeps_) {
    try {
      tensor.record_stream(stream_);
    } catch (const std::exception&) {
      // Being captured, say: then the graph's own pool keeps it.
    }
  }
}

bool GpuWork::isSuccess() const { return !engine_->group().failure().has_value(); }

std::exception_ptr GpuWork::exception() const {
  const auto failure = engine_->group().failure();
  if (!failure) return nullptr;
  try {
    throw_as_torch(*failure);
  } catch (...) {
    return std::current_exception();
  }
}

bool GpuWork::wait(std::chrono::milliseconds) {
  const c10::impl::VirtualGuardImpl guard(stream_.device_type());
  end_.block(guard.getStream(stream_.device()));
  keeps_.clear();
  if (const auto failure = engine_->group().failure()) throw_as_torch(*failure);
  return true;
}

}  // namespace fccl::c10d_backend
