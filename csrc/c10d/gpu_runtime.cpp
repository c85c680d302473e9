// Where builds with and without CUDA part.
#include "c10d/gpu_engine.h"

#if FCCL_CUDA_BUILT
#include "cuda/device_runtime.h"
#endif

namespace fccl::c10d_backend {

bool built_with_kernels() noexcept { return FCCL_CUDA_BUILT != 0; }

#if FCCL_CUDA_BUILT
std::shared_ptr<cuda::Runtime> make_gpu_runtime(c10::Device device) {
  return cuda::make_device_runtime(device.index());
}
#else
std::shared_ptr<cuda::Runtime> make_gpu_runtime(c10::Device) { return nullptr; }
#endif

}  // namespace fccl::c10d_backend
