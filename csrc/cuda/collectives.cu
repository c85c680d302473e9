// The communicating kernels that are built.
#include <cstddef>

#include "cuda/all_reduce.h"
#include "cuda/gather_broadcast.h"

namespace fccl::cuda {

#define FCCL_REDUCTIONS(Element)                                                                    \
  template __global__ void entry<OneShotAllReduce<Element>>(const __grid_constant__ AllReduceArgs); \
  template __global__ void entry<TwoShotAllReduce<Element>>(const __grid_constant__ AllReduceArgs)

FCCL_REDUCTIONS(Float32);
FCCL_REDUCTIONS(Float64);
FCCL_REDUCTIONS(Float16);
FCCL_REDUCTIONS(BFloat16);
FCCL_REDUCTIONS(Int32);
FCCL_REDUCTIONS(Int64);

// What only moves bytes needs the type for a failure's sake: a NaN of the right width, or none (Int32 stands
// for all types without one).
#define FCCL_MOVES(Element)                                                                         \
  template __global__ void entry<OneShotAllGather<Element>>(const __grid_constant__ AllGatherArgs); \
  template __global__ void entry<Broadcast<Element>>(const __grid_constant__ BroadcastArgs)

FCCL_MOVES(Float32);
FCCL_MOVES(Float64);
FCCL_MOVES(Float16);
FCCL_MOVES(BFloat16);
FCCL_MOVES(Int32);

}  // namespace fccl::cuda
