// The bucket kernels that are built: formats of one byte for all block sizes and types of gradients, those of
// two bytes for what their hooks use.
#include <cstddef>

#include "cuda/bucket_kernels.h"

namespace fccl::cuda {

#define FCCL_ENDS(Source, Code, kBlock)                                      \
  template __global__ void entry<EncodeBucket<Source, codec::Code, kBlock>>( \
      const __grid_constant__ EncodeBucketArgs);                             \
  template __global__ void entry<DecodeBucket<Source, codec::Code, kBlock>>( \
      const __grid_constant__ DecodeBucketArgs)

#define FCCL_BLOCK(Code, kBlock)           \
  FCCL_ENDS(FloatSource, Code, kBlock);    \
  FCCL_ENDS(Float16Source, Code, kBlock);  \
  FCCL_ENDS(BFloat16Source, Code, kBlock); \
  template __global__ void entry<ReduceShard<codec::Code, kBlock>>(const __grid_constant__ ReduceShardArgs)

#define FCCL_FORMAT(Code) \
  FCCL_BLOCK(Code, 128);  \
  FCCL_BLOCK(Code, 256);  \
  FCCL_BLOCK(Code, 512);  \
  FCCL_BLOCK(Code, 1024)

FCCL_FORMAT(Int8Code);
FCCL_FORMAT(Float8E4M3Code);
FCCL_FORMAT(Float8E5M2Code);

#define FCCL_SIXTEEN_BITS(Code)      \
  FCCL_ENDS(FloatSource, Code, 256); \
  template __global__ void entry<ReduceShard<codec::Code, 256>>(const __grid_constant__ ReduceShardArgs)

FCCL_SIXTEEN_BITS(Float16Code);
FCCL_SIXTEEN_BITS(BFloat16Code);

}  // namespace fccl::cuda
