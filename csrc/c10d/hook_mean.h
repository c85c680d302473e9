// The exact mean, of which every hook is made or falls back to, and the hook that is nothing else.
#pragma once

#include "c10d/hook_base.h"

namespace fccl::hooks {

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
Exchange start_sum(const ExchangeContext& context, const at::Tensor& tensor);

// The mean over the ranks, in the bucket's own memory where it is dense: summed in fp32 (fp64 for float64),
// divided once after the summation.
//
// Over fccl on CPU that is one averaging all_reduce with nothing added to it. Other backends are asked for a
// sum, which is divided afterwards; since they round 16-bit floats at every step of the sum, those are
// exchanged as float32. Sparse gradients are exchanged sparse.
FuturePtr exact_mean(const ExchangeContext& context, const at::Tensor& buffer);

// What carries the group's CPU tensors; null if nothing does, or a group in Python.
c10::intrusive_ptr<::c10d::Backend> cpu_backend(const ProcessGroupPtr& group);

// The mean of a float32 or float64 bucket by one all_reduce of bfloat16 (hook_bfloat16.cpp), and whether that
// rounds the mean once only, when it is on CPU: the engine adds in float32, and divides there by the world
// size.
FuturePtr bfloat16_mean(const ExchangeContext& context, const at::Tensor& buffer);
bool reduces_bfloat16_exactly(const ExchangeContext& context);

class AllReduce final : public GradientHook {
 public:
  const char* name() const noexcept override { return "fccl.hooks.AllReduce"; }
};

}  // namespace fccl::hooks
