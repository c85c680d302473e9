#include "c10d/hook_mean.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace fccl::hooks {

c10::intrusive_ptr<::c10d::Backend> cpu_backend(const ProcessGroupPtr& group) {
  const auto devices = group->getDeviceTypes();
  if (std::find(devices.begin(), devices.end(), c10::Device(at::kCPU)) == devices.end()) return nullptr;
  return group->getBackend(at::kCPU);
}

namespace {

using c10::ivalue::Future;

// Whether ReduceOp::AVG means: accumulate in fp32 or better, divide there, round once. Only fccl
// promises that, and only for dense CPU tensors: NCCL, which fccl hands CUDA tensors to, multiplies by
// 1/n rounded to the tensor's type.
bool averages_exactly(const ProcessGroupPtr& group, const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.is_sparse()) return false;
  const auto backend = cpu_backend(group);
  return backend && backend->getBackendName() == "fccl";
}

FuturePtr all_reduce(const ProcessGroupPtr& group, const at::Tensor& tensor, ::c10d::ReduceOp op) {
  std::vector<at::Tensor> tensors = {tensor};
  ::c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  options.asyncOp = true;
  const auto work = group->allreduce(tensors, options);
  auto future = work ? work->getFuture() : nullptr;
  TORCH_CHECK(
      future,
      "the process group's backend returned no Future for an all_reduce, which a gradient hook needs");
  return future;
}

}  // namespace

Exchange start_sum(const ExchangeContext& context, const at::Tensor& tensor) {
  const ProcessGroupPtr& group = context.group;
  Exchange exchange;
  if (context.divides_by_active_ranks()) {
    // Every rank sends a one or a zero along. DDP has counted already, but keeps the number in private
    // members of its reducer; one tiny exchange per bucket needs no guess at where an iteration begins,
    // and is paid inside such a join context only.
    const int64_t has_data = context.has_data() ? 1 : 0;
    exchange.divisor.active_ranks = at::full({}, has_data, at::device(tensor.device()).dtype(at::kLong));
    exchange.divisor.counted = all_reduce(group, exchange.divisor.active_ranks, ::c10d::ReduceOp::SUM);
    exchange.reduced = all_reduce(group, tensor, ::c10d::ReduceOp::SUM);
  } else if (averages_exactly(group, tensor)) {
    exchange.reduced = all_reduce(group, tensor, ::c10d::ReduceOp::AVG);
  } else {
    exchange.reduced = all_reduce(group, tensor, ::c10d::ReduceOp::SUM);
    exchange.divisor.ranks = group->getSize();
  }
  return exchange;
}

namespace {

// Whether `buffer` must travel as float32 to be averaged exactly.
bool needs_widening(const ExchangeContext& context, const at::Tensor& buffer) {
  const bool is_16_bit = buffer.scalar_type() == at::kHalf || buffer.scalar_type() == at::kBFloat16;
  return is_16_bit && (context.divides_by_active_ranks() || !averages_exactly(context.group, buffer));
}

}  // namespace

FuturePtr exact_mean(const ExchangeContext& context, const at::Tensor& buffer) {
  // Collectives know no complex numbers; a mean does not need them.
  const at::Tensor real = buffer.is_complex() ? at::view_as_real(buffer) : buffer;
  const at::Tensor sent = needs_widening(context, real) ? real.to(at::kFloat) : real;
  const Exchange exchange = start_sum(context, sent);
  if (exchange.divisor.is_one() && sent.is_same(buffer)) return exchange.reduced;

  return exchange.reduced->then(
      [divisor = exchange.divisor, buffer, real, sent](Future& reduced) -> c10::IValue {
        const at::NoGradGuard no_grad;
        // A sparse result has indices of its own: only the Future has it.
        const at::Tensor mean = ::c10d::detail::parseCppCommHookResult(reduced.value());
        divisor.wait();
        divisor.divide(mean);
        if (buffer.is_sparse()) return mean.to(buffer.scalar_type());
        if (!sent.is_same(real)) real.copy_(mean);
        return buffer;
      },
      c10::TensorType::get());
}

}  // namespace fccl::hooks
