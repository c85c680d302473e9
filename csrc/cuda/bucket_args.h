// What the bucket kernels are given, for the host too, which launches them: no word of the seam here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/block.h"
#include "codec/bucket_layout.h"
#include "common/dtype.h"

namespace fccl::cuda {

// A run of elements that lie together. Tables of them lie in device memory, ordered by `first`.
struct Range {
  std::byte* data;
  float* remainder;      // what earlier codes did not say (error feedback), one per element; null: none
  std::uint64_t length;  // elements
  std::uint64_t first;   // the number of its first block, or of its first element, in the whole table
};

struct RangeTable {
  const Range* ranges;
  std::uint32_t count;
};

struct EncodeBucketArgs {
  codec::BucketLayout layout;
  RangeTable coded;   // `first` counts blocks
  RangeTable exempt;  // `first` counts elements
  std::byte* wire;    // world shards
};

struct ReduceShardArgs {
  codec::BucketLayout layout;
  RangeTable coded;        // for remainders; only those of the own shard are touched
  const std::byte* wires;  // the own shard, as each rank has sent it
  std::byte* out;          // one shard
  const float* divisor;    // in device memory: how many ranks the mean is over
  std::uint32_t rank;
};

struct DecodeBucketArgs {
  codec::BucketLayout layout;
  RangeTable coded;
  RangeTable exempt;
  const std::byte* wire;      // world shards
  std::uint32_t* not_finite;  // set to 1 if any gradient is inf or NaN; null: nobody asks
};

enum class BucketKernel : std::uint8_t {
  kEncode,  // EncodeBucket
  kReduce,  // ReduceShard: knows nothing of the gradients' type
  kDecode,  // DecodeBucket
};

// Which kernel, and the grid.
struct BucketLaunch {
  BucketKernel kernel = BucketKernel::kEncode;
  DType gradients = DType::kFloat32;
  codec::BlockFormat code = codec::BlockFormat::kInt8;
  std::uint32_t block = 256;
  unsigned blocks = 1;
  unsigned threads = 1;
};

inline constexpr int kBucketThreads = 256;

// How many blocks of threads shall be resident at once. A longer block is more registers to a lane, and more
// bytes on their way at once: 16 to 32 KiB for each multiprocessor, in one block of threads or in four.
constexpr int bucket_blocks_per_multiprocessor(BucketKernel kernel, std::uint32_t block) {
  // It keeps more beside a block's elements than the others do: whose turn it is, and who has spoken.
  if (kernel == BucketKernel::kReduce && block <= 128) return 3;
  return block <= 128 ? 4 : (block <= 512 ? 2 : 1);
}

}  // namespace fccl::cuda
