#include "c10d/hook_base.h"

#include <exception>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "c10d/hook_mean.h"

namespace fccl::hooks {
namespace {

// A Future that has already failed. It carries the bucket's device, as DDP expects of a CUDA Future.
FuturePtr failed_future(const at::Tensor& buffer, std::exception_ptr error) {
  std::vector<c10::Device> devices;
  if (buffer.defined() && !buffer.device().is_cpu()) devices.push_back(buffer.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
  future->setError(std::move(error));
  return future;
}

// DDP hands complex gradients over as pairs of real numbers, which the bucket's own gradients do not
// describe.
bool is_complex(const GradBucket& bucket) {
  const std::vector<at::Tensor> parameters = bucket.getParameters();  // of one dtype
  return bucket.getBuffer().is_complex() || (!parameters.empty() && parameters[0].is_complex());
}

}  // namespace

FuturePtr GradientHook::run(const ExchangeContext& context, GradBucket& bucket) noexcept {
  const at::Tensor& buffer = bucket.getBuffer();
  try {
    // backward(create_graph=True) leaves gradients that require gradients in the bucket.
    const at::NoGradGuard no_grad;
    TORCH_CHECK(at::isFloatingType(buffer.scalar_type()) || buffer.is_complex(), name(),
                " averages floating-point gradients, and this bucket holds ", buffer.scalar_type());
    const bool compressed = !buffer.is_sparse() && compresses(buffer.scalar_type()) && !is_complex(bucket);
    return compressed ? exchange(context, bucket) : exact_mean(context, buffer);
  } catch (...) {
    return failed_future(buffer, std::current_exception());
  }
}

FuturePtr GradientHook::exchange(const ExchangeContext& context, GradBucket& bucket) {
  return exact_mean(context, bucket.getBuffer());
}

DdpHook::DdpHook(std::shared_ptr<GradientHook> hook, ProcessGroupPtr group, std::shared_ptr<JoinState> join)
    : hook_(std::move(hook)), context_{std::move(group), join.get()}, join_(std::move(join)) {}

FuturePtr DdpHook::runHook(GradBucket& bucket) { return hook_->run(context_, bucket); }

at::Tensor DdpHook::parseHookResult(const c10::IValue& result) {
  return ::c10d::detail::parseCppCommHookResult(result);
}

}  // namespace fccl::hooks
