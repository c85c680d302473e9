// The kernels that are built, for the host that launches them: cudaLaunchKernel takes an entry of this table.
// No header of CUDA is needed to ask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/block.h"
#include "common/dtype.h"
#include "cuda/bucket_args.h"
#include "cuda/policy.h"

namespace fccl::cuda {

struct KernelEntry {
  const void* entry = nullptr;  // null: there is no such kernel
  int threads = 0;              // the most threads of a block
};

// `element`: as LaunchPlan has it.
KernelEntry find_kernel(Algorithm algorithm, DType element);

KernelEntry find_kernel(BucketKernel kernel, DType gradients, codec::BlockFormat code, std::uint32_t block);

enum class PackKernel {
  kPack,    // PackTensors
  kUnpack,  // UnpackTensors
};

KernelEntry find_kernel(PackKernel kernel, DType from, DType to);

// For who wants to load them all before they are needed.
std::vector<const void*> collective_entries();

// How many there are of each kind.
std::size_t collective_kernel_count();
std::size_t bucket_kernel_count();
std::size_t pack_kernel_count();

}  // namespace fccl::cuda
