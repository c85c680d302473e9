// The three passes of a compressed exchange over a bucket that lies on a GPU: what cpu::BucketCoder does for
// one on the CPU, with the same bits.
//
// Each pass is one kernel. What they need to know of the parameters are two tables of ranges in device
// memory; they hold addresses, so they are good for as long as the bucket and the remainders stay where they
// are, which is from step to step. Whoever uses this copies them there, ahead of the first pass on its
// stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/bucket_runs.h"
#include "cuda/bucket_args.h"
#include "cuda/runtime.h"

namespace fccl::cuda {

class BucketPasses {
 public:
  struct Coding {
    DType gradients = DType::kFloat32;  // kFloat32, kFloat16 or kBFloat16
    codec::BlockFormat code = codec::BlockFormat::kInt8;
    std::uint32_t block = 256;
  };

  // `bucket` and the ranges' remainders: device memory.
  BucketPasses(const Coding& coding, int world_size, const std::vector<codec::BucketRange>& ranges,
               void* bucket);

  const codec::BucketLayout& layout() const noexcept { return layout_; }
  std::uint64_t wire_bytes() const noexcept { return layout_.world * layout_.shard_bytes(); }
  // To be copied to the device: coded ranges, then exempt ones.
  std::span<const Range> tables() const noexcept { return tables_; }
  bool operator==(const BucketPasses& other) const noexcept;

  // Where a pass is put, and what it finds on the device.
  struct Place {
    Runtime& runtime;
    int sm_count;         // of the device
    const Range* tables;  // a copy of tables(), aligned to 16 bytes
    StreamHandle stream;
  };
  // All pointers are to device memory, aligned to 16 bytes. They throw what Runtime::launch() throws.
  // `wire`: one shard for every rank, wire_bytes() in all, every one of which is written.
  void encode(const Place& place, std::byte* wire) const;
  // `received`: this rank's shard as each rank has encoded it. Their sum, in the order of the ranks, over
  // `*divisor` goes into `shard`, every byte of which is written.
  void average(const Place& place, int rank, const std::byte* received, const float* divisor,
               std::byte* shard) const;
  // `wire`: the averaged shards of all ranks, in their order. Writes the bucket.
  void decode(const Place& place, const std::byte* wire) const;

 private:
  RangeTable coded(const Range* tables) const;
  RangeTable exempt(const Range* tables) const;
  // `warps`: of work; more than there are to do it is as good as it gets.
  void launch(const Place& place, BucketKernel kernel, std::uint64_t warps, const void* args) const;

  const Coding coding_;
  codec::BucketLayout layout_;
  std::vector<Range> tables_;
  std::size_t coded_count_ = 0;
};

}  // namespace fccl::cuda
