#include "c10d/hook_mean.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace fccl::hooks {
namespace {

using c10::ivalue::Future;

// Whether ReduceOp::AVG means: accumulate in fp32 or better, divide there, round once. Only fccl
// promises that, and only for dense CPU tensors: NCCL, which fccl hands CUDA tensors to, multiplies by
// 1/n rounded to the tensor's type.
bool averages_exactly(const ProcessGroupPtr& group, const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.is_sparse()) return false;
  const auto devices = group->getDeviceTypes();
  if (std::find(devices.begin(), devices.end(), c10::Device(at::kCPU)) == devices.end()) return false;
  return group->getBackend(at::kCPU)->getBackendName() == "fccl";
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

// What a finished sum must be divided by to be the mean; 1 if the engine has divided already.
struct Divisor {
  int64_t ranks = 1;
  // In join mode, instead of `ranks`: a Future that was started before the sum's, and the int64 tensor
  // (no dimensions) that holds the number of ranks that have data once it is completed.
  FuturePtr counted;
  at::Tensor active_ranks;

  bool is_one() const { return !counted && ranks == 1; }

  // Only once the sum is there. That the count is there too, or will be without the help of this
  // thread, follows from the order in which both were started. Raises the count's error, if it has one.
  void wait() const {
    if (counted) counted->waitAndThrow();
  }

  // In place. Never by 0: the hook runs because some rank has data.
  void divide(at::Tensor sum) const {
    if (!counted) {
      if (ranks != 1) sum.div_(ranks);
    } else if (active_ranks.is_cpu()) {
      sum.div_(active_ranks.item<int64_t>());
    } else {
      sum.div_(active_ranks);  // on the device: reading the count would wait for its stream
    }
  }
};

// An all_reduce under way. (Callbacks on `reduced` keep the divisor only: a Future that its own
// callback held would never be freed if it was never completed.)
struct Exchange {
  FuturePtr reduced;
  Divisor divisor;
};

// Starts the all_reduce of `tensor`, in place where it is dense.
Exchange start(const ExchangeContext& context, const at::Tensor& tensor) {
  const ProcessGroupPtr& group = context.group;
  Exchange exchange;
  if (context.divides_by_active_ranks()) {
    // Every rank sends a one or a zero along. DDP has counted already, but keeps the number in private
    // members of its reducer; one tiny exchange per bucket needs no guess at where an iteration begins,
    // and is paid inside such a join context only.
    const int64_t has_data = context.join->has_data.load(std::memory_order_relaxed) ? 1 : 0;
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

// Whether `buffer` must travel as float32 to be averaged exactly.
bool needs_widening(const ExchangeContext& context, const at::Tensor& buffer) {
  const bool is_16_bit = buffer.scalar_type() == at::kHalf || buffer.scalar_type() == at::kBFloat16;
  return is_16_bit && (context.divides_by_active_ranks() || !averages_exactly(context.group, buffer));
}

FuturePtr exact_mean(const ExchangeContext& context, const at::Tensor& buffer) {
  // Collectives know no complex numbers; a mean does not need them.
  const at::Tensor real = buffer.is_complex() ? at::view_as_real(buffer) : buffer;
  const at::Tensor sent = needs_widening(context, real) ? real.to(at::kFloat) : real;
  const Exchange exchange = start(context, sent);
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

// ---- bfloat16 ----

// Elements converted at a time: stays in the second-level cache, and is as much as torch converts without
// waking its thread pool (which each thread that asks for it, the completing one too, would get anew).
constexpr int64_t kChunk = 32768;

bool converts_in_place(const at::Tensor& buffer) {
  return buffer.is_cpu() && buffer.dim() == 1 && buffer.is_contiguous();
}

// The bfloat16 tensor that fills the front of the buffer's own memory.
at::Tensor front_of(const at::Tensor& buffer) {
  return buffer.view(at::kBFloat16).narrow(0, 0, buffer.numel());
}

// Front to back: what is written has been read.
void narrow_in_place(const at::Tensor& buffer) {
  const at::Tensor narrow = front_of(buffer);
  const at::Tensor scratch = at::empty({std::min(kChunk, buffer.numel())}, narrow.options());
  for (int64_t begin = 0; begin < buffer.numel(); begin += kChunk) {
    const int64_t count = std::min(kChunk, buffer.numel() - begin);
    at::Tensor chunk = scratch.narrow(0, 0, count);
    chunk.copy_(buffer.narrow(0, begin, count));
    narrow.narrow(0, begin, count).copy_(chunk);
  }
}

// Back to front, for the same reason. Divides in the wide type.
void widen_in_place(const at::Tensor& buffer, const Divisor& divisor) {
  const at::Tensor narrow = front_of(buffer);
  const at::Tensor scratch = at::empty({std::min(kChunk, buffer.numel())}, narrow.options());
  for (int64_t end = buffer.numel(); end > 0;) {
    const int64_t begin = (end - 1) / kChunk * kChunk;
    at::Tensor chunk = scratch.narrow(0, 0, end - begin);
    chunk.copy_(narrow.narrow(0, begin, end - begin));
    at::Tensor wide = buffer.narrow(0, begin, end - begin);
    wide.copy_(chunk);
    divisor.divide(wide);
    end = begin;
  }
}

FuturePtr bf16_mean_in_place(const ExchangeContext& context, const at::Tensor& buffer) {
  narrow_in_place(buffer);
  Exchange exchange;
  try {
    exchange = start(context, front_of(buffer));
  } catch (...) {
    widen_in_place(buffer, Divisor{});  // gradients, not the bytes of another type
    throw;
  }
  return exchange.reduced->then(
      [divisor = exchange.divisor, buffer](Future& reduced) -> c10::IValue {
        const at::NoGradGuard no_grad;
        try {
          if (reduced.hasError()) std::rethrow_exception(reduced.exception_ptr());
          divisor.wait();
        } catch (...) {
          widen_in_place(buffer, Divisor{});
          throw;
        }
        widen_in_place(buffer, divisor);
        return buffer;
      },
      c10::TensorType::get());
}

FuturePtr bf16_mean(const ExchangeContext& context, const at::Tensor& buffer) {
  const at::Tensor sent = buffer.to(at::kBFloat16);
  const Exchange exchange = start(context, sent);
  return exchange.reduced->then(
      [divisor = exchange.divisor, buffer, sent](Future& reduced) -> c10::IValue {
        const at::NoGradGuard no_grad;
        if (reduced.hasError()) std::rethrow_exception(reduced.exception_ptr());
        divisor.wait();
        buffer.copy_(sent);
        divisor.divide(buffer);
        return buffer;
      },
      c10::TensorType::get());
}

}  // namespace

FuturePtr AllReduce::exchange(const ExchangeContext& context, const at::Tensor& buffer) {
  return exact_mean(context, buffer);
}

FuturePtr BF16Compress::exchange(const ExchangeContext& context, const at::Tensor& buffer) {
  const bool compresses =
      !buffer.is_sparse() && (buffer.scalar_type() == at::kFloat || buffer.scalar_type() == at::kDouble);
  if (!compresses) return exact_mean(context, buffer);
  return converts_in_place(buffer) ? bf16_mean_in_place(context, buffer) : bf16_mean(context, buffer);
}

}  // namespace fccl::hooks
