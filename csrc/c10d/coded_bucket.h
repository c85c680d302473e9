// How one bucket is coded, and the memory that its codes lie in.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>

#include "codec/bucket_runs.h"
#include "common/description.h"

namespace fccl::hooks {

struct CodedBucket {
  codec::BlockFormat format = codec::BlockFormat::kInt8;
  std::uint32_t block = 0;
  std::vector<codec::BucketRange> ranges;
  Description call;  // how it is coded, for the peers to compare
  // What the ranges' remainders lie in.
  std::vector<at::Tensor> keeps;
};

// Makes ready what an exchange needs of this rank. It may fail, for want of memory, and is then called where
// the peers can be told: a rank that skipped its call in silence would have its next bucket paired with this
// one of its peers.
using PrepareBucket = std::function<CodedBucket()>;

// Two messages of a bucket. Kept from step to step, as fresh memory costs more than the coding.
struct WireMemory {
  at::Tensor sent;      // bytes; in shared memory where that helps
  at::Tensor received;  // as many
};

class WireMemoryPool {
 public:
  explicit WireMemoryPool(c10::Device device = at::kCPU) : device_(device) {}

  WireMemory take(std::uint64_t bytes, bool shared);
  // Only of an exchange that went well: after another one a backend may still be at it.
  void give_back(WireMemory memory);

 private:
  const c10::Device device_;
  std::mutex mutex_;
  std::vector<WireMemory> free_;
};

}  // namespace fccl::hooks
