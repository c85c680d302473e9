// The hooks whose result is the plain mean of the gradients: exact, or exchanged in bfloat16.
#pragma once

#include "c10d/hook_base.h"

namespace fccl::hooks {

// The exact mean: summed in fp32 (fp64 for float64), divided once after the summation.
//
// Over fccl on CPU that is one averaging all_reduce in the bucket's own memory, with nothing added to
// it. Other backends are asked for a sum, which is divided afterwards; since they round 16-bit floats at
// every step of the sum, those are exchanged as float32. Sparse gradients are exchanged sparse.
class AllReduce final : public GradientHook {
 public:
  const char* name() const noexcept override { return "fccl.hooks.AllReduce"; }

 protected:
  FuturePtr exchange(const ExchangeContext& context, const at::Tensor& buffer) override;
};

// float32 and float64 buckets travel as bfloat16: half (a quarter of) the bytes. All others (16-bit,
// complex and sparse ones) are exchanged as AllReduce does.
//
// On CPU the bucket is narrowed inside its own memory and widened there afterwards: nothing is
// allocated, so no time goes into page faults, and a bucket in shared memory stays in it.
class BF16Compress final : public GradientHook {
 public:
  const char* name() const noexcept override { return "fccl.hooks.BF16Compress"; }

 protected:
  FuturePtr exchange(const ExchangeContext& context, const at::Tensor& buffer) override;
};

}  // namespace fccl::hooks
