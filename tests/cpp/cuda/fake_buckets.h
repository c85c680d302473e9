// Bucket kernels as a Runtime is asked for them, on fibres.
#pragma once

#include "common/error.h"
#include "cuda/bucket_kernels.h"
#include "cuda/launcher.h"

namespace fccl::cuda::host {

// The grid is cut down to `most_blocks`, as every thread becomes a fibre: what kernels compute does not
// depend on it.
template <class Source, class Code, int kBlock>
void run_bucket_kernel(const BucketLaunch& launch, const void* args, unsigned most_blocks) {
  const unsigned blocks = std::min(launch.blocks, most_blocks);
  Launcher launcher(1);
  switch (launch.kernel) {
    case BucketKernel::kEncode:
      launcher.add<EncodeBucket<Source, Code, kBlock>>(0, blocks, launch.threads,
                                                       *static_cast<const EncodeBucketArgs*>(args));
      break;
    case BucketKernel::kReduce:
      launcher.add<ReduceShard<Code, kBlock>>(0, blocks, launch.threads,
                                              *static_cast<const ReduceShardArgs*>(args));
      break;
    case BucketKernel::kDecode:
      launcher.add<DecodeBucket<Source, Code, kBlock>>(0, blocks, launch.threads,
                                                       *static_cast<const DecodeBucketArgs*>(args));
      break;
  }
  launcher.run();
}

template <class Code, int kBlock>
void run_bucket_kernel(const BucketLaunch& launch, const void* args, unsigned most_blocks) {
  switch (launch.gradients) {
    case DType::kFloat32: return run_bucket_kernel<FloatSource, Code, kBlock>(launch, args, most_blocks);
    case DType::kFloat16: return run_bucket_kernel<Float16Source, Code, kBlock>(launch, args, most_blocks);
    case DType::kBFloat16: return run_bucket_kernel<BFloat16Source, Code, kBlock>(launch, args, most_blocks);
    default: throw Error(ErrorKind::kSystem, "no bucket kernel for these gradients");
  }
}

// A few of those that are built (buckets.cu).
inline void run_bucket_kernel(const BucketLaunch& launch, const void* args, unsigned most_blocks) {
  using codec::BlockFormat;
  if (launch.code == BlockFormat::kInt8 && launch.block == 256)
    return run_bucket_kernel<codec::Int8Code, 256>(launch, args, most_blocks);
  if (launch.code == BlockFormat::kFloat8E4M3 && launch.block == 128)
    return run_bucket_kernel<codec::Float8E4M3Code, 128>(launch, args, most_blocks);
  if (launch.code == BlockFormat::kBFloat16 && launch.block == 256)
    return run_bucket_kernel<FloatSource, codec::BFloat16Code, 256>(launch, args, most_blocks);
  if (launch.code == BlockFormat::kFloat16 && launch.block == 256)
    return run_bucket_kernel<FloatSource, codec::Float16Code, 256>(launch, args, most_blocks);
  throw Error(ErrorKind::kSystem, "this fake has no such bucket kernel");
}

}  // namespace fccl::cuda::host
