// What the tables of kernels are made of. To name a kernel in a table is to instantiate it, so the list
// of what is built and the list of what is found are one. The seam says what an entry is: for the GPU a
// __global__ function, for fibres a function of the arguments' address.
#pragma once

#include "cuda/kernels.h"
#include "cuda/seam.h"

namespace fccl::cuda {

template <class... T>
struct Types {};

template <class Kernel>
KernelEntry entry_of() {
  return {reinterpret_cast<const void*>(&entry<Kernel>), Kernel::kThreads};
}

}  // namespace fccl::cuda
