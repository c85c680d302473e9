// The driver's functions that the CUDA runtime has no words for: memory that is mapped by descriptor.
//
// They are asked of the runtime by name. Linking to libcuda would make fccl impossible to import where there
// is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "common/error.h"

namespace fccl::cuda {

// Throws kSystem: "<what>: <the runtime's words>". Clears the runtime's last error.
inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw Error(ErrorKind::kSystem, std::string(what) + ": " + cudaGetErrorString(result));
}

class DriverCalls {
 public:
  // Null if this driver lacks any of them.
  static const DriverCalls* get();
  void check(CUresult result, const char* what) const;

  decltype(&::cuGetErrorString) error_string = nullptr;
  decltype(&::cuDeviceGetAttribute) device_attribute = nullptr;
  decltype(&::cuDevicePrimaryCtxGetState) context_state = nullptr;
  decltype(&::cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&::cuMemCreate) create = nullptr;
  decltype(&::cuMemRelease) release = nullptr;
  decltype(&::cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&::cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&::cuMemAddressReserve) reserve = nullptr;
  decltype(&::cuMemAddressFree) free_address = nullptr;
  decltype(&::cuMemMap) map = nullptr;
  decltype(&::cuMemUnmap) unmap = nullptr;
  decltype(&::cuMemSetAccess) set_access = nullptr;
};

}  // namespace fccl::cuda
