// What the tables of kernels are made of. To name a kernel in a table is to instantiate it, so the list
// of what is built and the list of what is found are one.
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
