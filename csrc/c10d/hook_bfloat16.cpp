// BF16Compress where one all_reduce of bfloat16 is right: in the engine, which adds in float32, and in NCCL.
#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/ATen.h>

#include "c10d/backend.h"
#include "c10d/hook_mean.h"

namespace fccl::hooks {
namespace {

using c10::ivalue::Future;

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
    exchange = start_sum(context, front_of(buffer));
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
  const Exchange exchange = start_sum(context, sent);
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

bool reduces_bfloat16_exactly(const ExchangeContext& context) {
  if (context.divides_by_active_ranks()) return false;  // a sum, divided after it was rounded
  const auto backend = cpu_backend(context.group);
  const auto* fccl = dynamic_cast<const c10d_backend::FcclBackend*>(backend.get());
  return fccl != nullptr && fccl->engine() == "shared-memory";
}

FuturePtr bfloat16_mean(const ExchangeContext& context, const at::Tensor& buffer) {
  return converts_in_place(buffer) ? bf16_mean_in_place(context, buffer) : bf16_mean(context, buffer);
}

}  // namespace fccl::hooks
