// Compressed exchanges of buckets that lie on GPUs: the steps are those on the CPU, each a kernel or a
// collective of the group's, on a stream of their own beside the backward pass.
//
// Nothing here blocks the host, as the backends for GPUs have it, but for one thing: when a bucket is
// exchanged for the first time, and whenever it is coded in another way than last time, the ranks compare how
// they code it. That is when settings can differ, and a difference would give wrong numbers or a hang; in all
// other steps there is nothing to compare. (Gloo blocks the host at every exchange.)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include "c10d/coded_bucket.h"
#include "c10d/hook_base.h"
#include "cuda/bucket_passes.h"

namespace fccl::hooks {

// Whether this build has the kernels.
bool codes_on_gpus();

class DeviceExchange {
 public:
  // The Future has the bucket's buffer and its device: to wait for it makes the current stream wait. What
  // fails after the peers have begun, they learn by their timeout.
  FuturePtr start(const ExchangeContext& context, const GradBucket& bucket, const PrepareBucket& prepare);

 private:
  struct Device {
    explicit Device(c10::Device device);
    c10::Stream side;
    // Its memory is used on `side` alone, in its order: `side` also waits for the collectives that read and
    // write it. So it may be given back, and used by the next bucket, before the device has come to this one.
    WireMemoryPool pool;
    std::shared_ptr<cuda::Runtime> runtime;
    int sm_count;
  };

  // What is kept of a bucket from step to step. DDP exchanges a bucket when the step before is over, so one
  // thread at a time is at it.
  struct Known {
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;  // the bucket's first one
    std::optional<Description> agreed;                   // how all ranks coded it last
    std::optional<cuda::BucketPasses> passes;
    at::Tensor
        tables;  // its tables, on the device; other ones are a new tensor: kernels may still read these
    at::Tensor values;   // of buckets that no kernel reads: a copy as float32
    at::Tensor divisor;  // float32: the world size
  };

  Device& device_of(c10::Device device);
  std::shared_ptr<Known> known(const GradBucket& bucket);
  static void agree(const ExchangeContext& context, c10::Device device, Known& known,
                    const Description& call);
  // On the side stream, which is the current one.
  static void exchange(const ExchangeContext& context, Device& device, Known& known, const at::Tensor& buffer,
                       const CodedBucket& bucket);

  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::unique_ptr<Device>> devices_;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Known>> buckets_;
};

}  // namespace fccl::hooks
