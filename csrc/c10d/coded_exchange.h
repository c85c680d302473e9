// The exchange of a bucket that travels compressed: every rank sends each rank its shard of the codes, each
// averages its own shard and sends that to all.
//
// A sum over codes cannot be left to a backend's all_reduce, which knows no scales and, where it knows the
// type, rounds at every hop. Here the values are added in float32, in the order of the ranks, and rounded
// once for the way back: the same bits on every rank, over every backend, on CPU and on GPUs.
#pragma once

#include <memory>

#include "c10d/coded_bucket.h"
#include "c10d/device_exchange.h"
#include "c10d/hook_base.h"

namespace fccl::hooks {

// A hook has one of these.
class CodedExchange {
 public:
  // A dense bucket; the mean goes into its buffer, which the Future has. On an error the buffer holds
  // gradients: this rank's or, in part, the mean.
  //
  // On CPU, over fccl, it is asynchronous: all steps are one call of the group, in its order, `prepare` among
  // them. Over other backends it is done when this returns; their collectives must be issued from one thread
  // in one order on all ranks, and the second one depends on the first. For a GPU's buckets see
  // device_exchange.h.
  FuturePtr start(const ExchangeContext& context, const GradBucket& bucket, PrepareBucket prepare);

 private:
  // Shared with exchanges under way.
  const std::shared_ptr<WireMemoryPool> pool_ = std::make_shared<WireMemoryPool>();
  DeviceExchange on_devices_;
};

}  // namespace fccl::hooks
