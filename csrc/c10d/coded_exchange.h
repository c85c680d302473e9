// The exchange of a bucket that travels compressed: every rank sends each rank its shard of the codes, each
// averages its own shard and sends that to all.
//
// A sum over codes cannot be left to a backend's all_reduce, which knows no scales and, where it knows the
// type, rounds at every hop. Here the values are added in float32, in the order of the ranks, and rounded
// once for the way back: the same bits on every rank, over every backend.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "c10d/hook_base.h"
#include "common/description.h"
#include "cpu/bucket_coder.h"

namespace fccl::hooks {

// Two messages of a bucket. Kept from step to step, as fresh memory costs more than the coding.
struct WireMemory {
  at::Tensor sent;      // bytes; in shared memory where that helps
  at::Tensor received;  // as many
};

class WireMemoryPool {
 public:
  WireMemory take(std::uint64_t bytes, bool shared);
  // Only of an exchange that went well: after another one a backend may still be at it.
  void give_back(WireMemory memory);

 private:
  std::mutex mutex_;
  std::vector<WireMemory> free_;
};

struct CodedBucket {
  cpu::BucketCoder coder;
  Description call;  // how it is coded, for the peers to compare
  // What the coder's remainders lie in.
  std::vector<at::Tensor> keeps;
};

// Makes ready what an exchange needs of this rank. It may fail, for want of memory, and is then called where
// the peers can be told: a rank that skipped its call in silence would have its next bucket paired with this
// one of its peers.
using PrepareBucket = std::function<CodedBucket()>;

// `buffer`: dense, on CPU; the mean goes there. Over fccl it is asynchronous: all steps are one call of the
// group, in its order, `prepare` among them. Over other backends it is done when this returns; their
// collectives must be issued from one thread in one order on all ranks, and the second one depends on the
// first. The Future has the buffer. On an error the buffer holds gradients: this rank's or, in part, the
// mean.
FuturePtr exchange_coded(const ExchangeContext& context, const at::Tensor& buffer, PrepareBucket prepare,
                         const std::shared_ptr<WireMemoryPool>& pool);

}  // namespace fccl::hooks
