// How launches find their kernels: nvcc's code registers the name of each device function with the address of
// its stub on the host.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "capture.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

namespace fccl::sim {
namespace {

struct Kernel {
  std::string name;
  Prepare prepare;  // null: not simulated
  bool loaded = false;
};
struct Functions {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;  // mangled
  std::map<const void*, Kernel> kernels;               // those that were asked for
};
Functions& functions() {
  static auto* functions = new Functions();
  return *functions;
}

// Null if nothing was registered for that stub. With the mutex held.
Kernel* find_kernel_of(const void* stub) {
  Functions& all = functions();
  const auto known = all.kernels.find(stub);
  if (known != all.kernels.end()) return &known->second;
  const auto named = all.names.find(stub);
  if (named == all.names.end()) return nullptr;
  Kernel kernel;
  kernel.name = demangled(named->second);
  kernel.prepare = find_fccl_kernel(kernel.name);
  if (!kernel.prepare) kernel.prepare = find_torch_kernel(kernel.name);
  return &all.kernels.emplace(stub, std::move(kernel)).first->second;
}

std::string short_name(const std::string& name) {
  const std::string before = "void fccl::cuda::entry<fccl::cuda::";
  return name.rfind(before, 0) == 0 ? name.substr(before.size(), name.rfind(">(") - before.size())
                                    : name.substr(0, 200);
}

cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** parameters, cudaStream_t on) {
  if (const auto error = trouble("cudaLaunchKernel")) return told(error);
  Stream* const stream = find_stream(on);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  std::unique_lock lock(functions().mutex);
  Kernel* const kernel = find_kernel_of(stub);
  if (kernel == nullptr) return told(cudaErrorInvalidDeviceFunction);
  if (!kernel->prepare) return told(not_simulated(kernel->name.c_str()));
  use_device();
  note("launch %s on stream %p", short_name(kernel->name).c_str(), static_cast<void*>(on));
  if (!kernel->loaded) {
    // A kernel's first launch loads it, which may wait for all that runs.
    if (const auto error = forbidden_in_capture("the loading of a kernel")) return told(error);
    lock.unlock();
    wait_for_all_streams();
    lock.lock();
    kernel->loaded = true;
  }
  return told(stream->put(kernel->prepare({grid.x, block.x}, parameters)));
}

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

std::string demangled(const char* mangled) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string result = text != nullptr ? text : mangled;
  std::free(text);
  return result;
}

}  // namespace fccl::sim

using namespace fccl::sim;

FCCL_SIM_EXPORT void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }
FCCL_SIM_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
FCCL_SIM_EXPORT void __cudaUnregisterFatBinary(void**) {}
FCCL_SIM_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
FCCL_SIM_EXPORT void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*,
                                            uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(functions().mutex);
  functions().names[stub] = name;
}

FCCL_SIM_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                                     void* stream) {
  configurations.push_back({grid, block, shared, static_cast<cudaStream_t>(stream)});
  return 0;
}
FCCL_SIM_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared,
                                                       void* stream) {
  if (configurations.empty()) return told(cudaErrorInvalidValue);
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

// A kernel's handle is its stub's address.
FCCL_SIM_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* to, const void* stub) {
  *to = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** parameters,
                                               std::size_t, cudaStream_t on) {
  return launch(kernel, grid, block, parameters, on);
}
FCCL_SIM_EXPORT cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** parameters,
                                             std::size_t, cudaStream_t on) {
  return launch(stub, grid, block, parameters, on);
}

FCCL_SIM_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void* stub) {
  if (const auto error = trouble("cudaFuncGetAttributes")) return told(error);
  const std::lock_guard lock(functions().mutex);
  Kernel* const kernel = find_kernel_of(stub);
  if (kernel == nullptr) return told(cudaErrorInvalidDeviceFunction);
  if (!kernel->prepare) return told(not_simulated(kernel->name.c_str()));
  kernel->loaded = true;
  *to = {};
  to->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
