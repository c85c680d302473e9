// The Runtime of a real GPU. In CUDA builds only; needs no CUDA header.
#pragma once

#include <memory>

#include "cuda/runtime.h"

namespace fccl::cuda {

// `device`: as the CUDA runtime counts them in this process.
std::shared_ptr<Runtime> make_device_runtime(int device);

}  // namespace fccl::cuda
