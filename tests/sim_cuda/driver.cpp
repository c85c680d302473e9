// The driver's functions, which fccl and torch ask the runtime for by name: memory that is mapped by
// descriptor.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "memory.h"
#include "simulation.h"

namespace fccl::sim {
namespace {

constexpr std::size_t kGranularity = 2 << 20;

struct Allocation {
  int descriptor;
  std::size_t bytes;
};
Allocation* allocation_of(CUmemGenericAllocationHandle handle) {
  return reinterpret_cast<Allocation*>(handle);
}
void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult driver_trouble(const char* function) { return static_cast<CUresult>(trouble(function)); }

CUresult error_string(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "a driver's error";
  return CUDA_SUCCESS;
}

CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = setting("FCCL_SIM_DESCRIPTORS", 1) != 0 ? 1 : 0;
      break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult context_state(CUdevice device, unsigned* flags, int* active) {
  if (device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult granularity(std::size_t* to, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *to = kGranularity;
  return driver_trouble("cuMemGetAllocationGranularity");
}

CUresult create(CUmemGenericAllocationHandle* to, std::size_t bytes, const CUmemAllocationProp* property,
                unsigned long long) {
  if (const auto error = driver_trouble("cuMemCreate")) return error;
  if (bytes == 0 || bytes % kGranularity != 0 || property->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      property->location.type != CU_MEM_LOCATION_TYPE_DEVICE || property->location.id >= device_count()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  use_device();
  const int descriptor = make_shareable(bytes);
  if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *to = reinterpret_cast<CUmemGenericAllocationHandle>(new Allocation{descriptor, bytes});
  count(&Counts::handles, 1);
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  ::close(allocation_of(handle)->descriptor);
  delete allocation_of(handle);
  count(&Counts::handles, -1);
  return CUDA_SUCCESS;
}

CUresult export_handle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long) {
  if (const auto error = driver_trouble("cuMemExportToShareableHandle")) return error;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const int copy = ::fcntl(allocation_of(handle)->descriptor, F_DUPFD_CLOEXEC, 3);
  std::memcpy(to, &copy, sizeof(copy));
  return copy < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult import_handle(CUmemGenericAllocationHandle* to, void* from, CUmemAllocationHandleType type) {
  if (const auto error = driver_trouble("cuMemImportFromShareableHandle")) return error;
  const int theirs = static_cast<int>(reinterpret_cast<std::intptr_t>(from));
  struct stat facts{};
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || ::fstat(theirs, &facts) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const int copy = ::fcntl(theirs, F_DUPFD_CLOEXEC, 3);
  *to = reinterpret_cast<CUmemGenericAllocationHandle>(
      new Allocation{copy, static_cast<std::size_t>(facts.st_size)});
  count(&Counts::handles, 1);
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* to, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  if (const auto error = driver_trouble("cuMemAddressReserve")) return error;
  void* const at = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *to = reinterpret_cast<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}
CUresult free_address(CUdeviceptr address, std::size_t bytes) {
  ::munmap(pointer(address), bytes);
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, std::size_t bytes, std::size_t, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  if (const auto error = driver_trouble("cuMemMap")) return error;
  const Allocation& allocation = *allocation_of(handle);
  if (bytes != allocation.bytes) return CUDA_ERROR_INVALID_VALUE;
  if (::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation.descriptor, 0) ==
      MAP_FAILED)
    return CUDA_ERROR_INVALID_VALUE;
  remember(pointer(address), bytes, Place::kDevice);
  count(&Counts::mappings, 1);
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, std::size_t bytes) {
  if (forget(pointer(address)) != bytes) return CUDA_ERROR_INVALID_VALUE;
  ::mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  count(&Counts::mappings, -1);
  return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access, std::size_t) {
  if (const auto error = driver_trouble("cuMemSetAccess")) return error;
  if (access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
  return ::mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                          : CUDA_ERROR_INVALID_VALUE;
}

// torch wants to be told of what the driver logs.
CUresult accepted() { return CUDA_SUCCESS; }

CUresult unknown() {
  not_simulated("a function of the driver that was asked for by name");
  return CUDA_ERROR_NOT_SUPPORTED;
}

struct Named {
  const char* name;
  void* function;
};
template <class Function>
void* erased(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace
}  // namespace fccl::sim

using namespace fccl::sim;

FCCL_SIM_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                             unsigned long long,
                                                             cudaDriverEntryPointQueryResult* result) {
  const Named all[] = {
      {"cuGetErrorString", erased(&error_string)},
      {"cuDeviceGetAttribute", erased(&device_attribute)},
      {"cuDevicePrimaryCtxGetState", erased(&context_state)},
      {"cuMemGetAllocationGranularity", erased(&granularity)},
      {"cuMemCreate", erased(&create)},
      {"cuMemRelease", erased(&release)},
      {"cuMemExportToShareableHandle", erased(&export_handle)},
      {"cuMemImportFromShareableHandle", erased(&import_handle)},
      {"cuMemAddressReserve", erased(&reserve)},
      {"cuMemAddressFree", erased(&free_address)},
      {"cuMemMap", erased(&map)},
      {"cuMemUnmap", erased(&unmap)},
      {"cuMemSetAccess", erased(&set_access)},
      {"cuLogsRegisterCallback", erased(&accepted)},
      {"cuLogsUnregisterCallback", erased(&accepted)},
  };
  // torch asks for more than it uses.
  *function = erased(&unknown);
  for (const Named& each : all) {
    if (std::strcmp(each.name, name) == 0) *function = each.function;
  }
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// torch links one of its libraries (libcaffe2_nvrtc, for kernels that it compiles at run time) to
// libcuda.so.1, which is what this library calls itself. These are all that it must find there.
FCCL_SIM_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return error_string(error, text);
}
FCCL_SIM_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return device_attribute(value, attribute, device);
}
FCCL_SIM_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return context_state(device, flags, active);
}
