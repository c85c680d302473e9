// The packing kernels that are built: within each type, and between float32 and the 16-bit floats.
#include <cstddef>

#include "cuda/pack.h"

namespace fccl::cuda {

#define FCCL_PACK(From, To)                                                                       \
  template __global__ void entry<PackTensors<From, To>>(const __grid_constant__ PackTensorsArgs); \
  template __global__ void entry<UnpackTensors<From, To>>(const __grid_constant__ UnpackTensorsArgs)

FCCL_PACK(FloatSource, FloatSource);
FCCL_PACK(FloatSource, Float16Source);
FCCL_PACK(FloatSource, BFloat16Source);
FCCL_PACK(Float16Source, FloatSource);
FCCL_PACK(Float16Source, Float16Source);
FCCL_PACK(BFloat16Source, FloatSource);
FCCL_PACK(BFloat16Source, BFloat16Source);

}  // namespace fccl::cuda
