#include "cuda/device_driver_calls.h"

namespace fccl::cuda {
namespace {

template <class Function>
bool find(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult query{};
  // CUDA 10.2 had all of them; 12.0 is below whatever serves these builds.
  constexpr unsigned kVersion = 12000;
  const cudaError_t result =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &query);
  if (result != cudaSuccess || query != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return false;
  }
  function = reinterpret_cast<Function>(found);
  return function != nullptr;
}

}  // namespace

const DriverCalls* DriverCalls::get() {
  static DriverCalls calls;
  static const bool complete =
      find(calls.error_string, "cuGetErrorString") && find(calls.device_attribute, "cuDeviceGetAttribute") &&
      find(calls.context_state, "cuDevicePrimaryCtxGetState") &&
      find(calls.granularity, "cuMemGetAllocationGranularity") && find(calls.create, "cuMemCreate") &&
      find(calls.release, "cuMemRelease") && find(calls.export_handle, "cuMemExportToShareableHandle") &&
      find(calls.import_handle, "cuMemImportFromShareableHandle") &&
      find(calls.reserve, "cuMemAddressReserve") && find(calls.free_address, "cuMemAddressFree") &&
      find(calls.map, "cuMemMap") && find(calls.unmap, "cuMemUnmap") &&
      find(calls.set_access, "cuMemSetAccess");
  return complete ? &calls : nullptr;
}

void DriverCalls::check(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  if (error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  throw Error(ErrorKind::kSystem, std::string(what) + ": " + text);
}

}  // namespace fccl::cuda
