// The three steps of a compressed exchange of gradients, as far as they are this rank's own work: encode a
// bucket for all ranks, average what came for one's own shard, decode what came of all shards.
//
// codec/bucket_layout.h says how a bucket lies on the wire, codec/block.h what a code means. The results
// are those of the kernels in cuda/bucket_kernels.h, to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/block.h"
#include "codec/bucket_runs.h"

namespace fccl::cpu {

using codec::BucketRange;

// How one bucket is coded. Keeps nothing of the bucket itself: const members may run in any thread, but
// encode() and average() write into the remainders.
class BucketCoder {
 public:
  // `block`: elements of a block, a multiple of 64 up to kLargestBlock. Ranges may lie in any order.
  BucketCoder(codec::BlockFormat format, std::uint32_t block, int world_size,
              const std::vector<BucketRange>& ranges);

  const codec::BucketLayout& layout() const noexcept { return runs_.layout; }
  std::uint64_t wire_bytes() const noexcept { return layout().world * layout().shard_bytes(); }

  // `wire`: one shard for every rank, wire_bytes() in all, every one of which is written.
  void encode(const float* bucket, std::byte* wire) const;
  // `received`: this rank's shard as each rank has encoded it, in their order. The mean of those, which is
  // their sum in that order over `divisor`, goes into `shard`, every byte of which is written.
  void average(int rank, const std::byte* received, int divisor, std::byte* shard) const;
  // `wire`: the averaged shards of all ranks, in their order.
  void decode(const std::byte* wire, float* bucket) const;

 private:
  // A part of a run that lies in one shard.
  struct Part {
    std::uint64_t shard;
    std::uint64_t at;     // its first block, or exempt element, of the shard
    std::uint64_t begin;  // its first element of the bucket
    std::uint64_t count;  // elements
    float* remainder;
  };
  template <class Visit>
  void for_each_coded(Visit visit) const;
  template <class Visit>
  void for_each_exempt(Visit visit) const;
  void clear_unused(std::uint64_t rank, std::byte* shard) const;

  codec::BlockFormat format_;
  codec::BucketRuns runs_;
};

}  // namespace fccl::cpu
