// The kernels that are built, for the host that launches them: cudaLaunchKernel takes an entry of this table.
// No header of CUDA is needed to ask.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/block.h"
#include "common/dtype.h"

namespace fccl::cuda {

struct KernelEntry {
  const void* entry = nullptr;  // null: there is no such kernel
  int threads = 0;              // the most threads of a block
};

enum class CollectiveKernel {
  kOneShotAllReduce,
  kTwoShotAllReduce,
  kOneShotAllGather,
  kBroadcast,
};

// Reductions exist for some types. Kernels that only move bytes exist for all, and types without a NaN share
// one.
KernelEntry find_kernel(CollectiveKernel kernel, DType dtype);

enum class BucketKernel {
  kEncode,  // EncodeBucket
  kReduce,  // ReduceShard: knows nothing of the gradients' type
  kDecode,  // DecodeBucket
};

KernelEntry find_kernel(BucketKernel kernel, DType gradients, codec::BlockFormat code, std::uint32_t block);

// How many there are of either kind.
std::size_t collective_kernel_count();
std::size_t bucket_kernel_count();

}  // namespace fccl::cuda
