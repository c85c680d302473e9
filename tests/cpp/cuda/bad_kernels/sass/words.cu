// What check_sass.py must find: a signal that is stored without a release, and one that is loaded without an
// acquire. The faults are those of the protocol's tests.
#include "cuda/all_reduce.h"
#include "cuda/faults.h"
#include "cuda/gather_broadcast.h"

namespace fccl::cuda {

template __global__ void entry<Broadcast<Float32, host::RelaxedFlag>>(const __grid_constant__ BroadcastArgs);
template __global__ void entry<TwoShotAllReduce<Int32, host::RelaxedWait>>(
    const __grid_constant__ AllReduceArgs);

}  // namespace fccl::cuda
