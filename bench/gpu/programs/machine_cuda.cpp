// A real GPU: the one that the CUDA runtime has as number 0.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdlib>
#include <stdexcept>

#include "machine.h"

namespace fccl::gpu_check {
namespace {

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

class CudaMachine final : public Machine {
 public:
  explicit CudaMachine(const cudaDeviceProp& properties) : properties_(properties) {
    for (cudaStream_t& stream : streams_)
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    // Loading a kernel may wait for all that runs, so it must not happen behind a kernel that waits for it.
    for (const void* const entry : cuda::collective_entries()) {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, entry), "cudaFuncGetAttributes");
    }
  }
  ~CudaMachine() override {
    free_all();
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  std::string name() const override {
    return std::string(properties_.name) + ", " + std::to_string(properties_.multiProcessorCount) + " SMs";
  }
  bool is_fast() const override { return true; }
  unsigned multiprocessors() const override { return static_cast<unsigned>(properties_.multiProcessorCount); }

  std::byte* allocate(std::size_t bytes) override {
    void* at = nullptr;
    check(cudaMalloc(&at, bytes == 0 ? 1 : bytes), "cudaMalloc");
    device_memory_.push_back(at);
    check(cudaMemset(at, 0, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return static_cast<std::byte*>(at);
  }
  void* allocate_host(std::size_t bytes) override {
    void* at = nullptr;
    check(cudaHostAlloc(&at, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    host_memory_.push_back(at);
    return std::memset(at, 0, bytes);
  }
  void release_all() override {
    finish();
    free_all();
  }
  void copy_in(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void copy_out(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

  void launch(int stream, KernelEntry kernel, Grid grid, const void* args, std::size_t) override {
    if (kernel.entry == nullptr) throw std::runtime_error("the tables have no such kernel");
    void* parameters[] = {const_cast<void*>(args)};
    check(cudaLaunchKernel(kernel.entry, dim3(grid.blocks), dim3(grid.threads), parameters, 0,
                           streams_.at(static_cast<std::size_t>(stream))),
          "cudaLaunchKernel");
  }
  void finish() override { check(cudaDeviceSynchronize(), "the kernels"); }

 private:
  void free_all() {
    for (void* const at : device_memory_) cudaFree(at);
    for (void* const at : host_memory_) cudaFreeHost(at);
    device_memory_.clear();
    host_memory_.clear();
  }

  const cudaDeviceProp properties_;
  std::array<cudaStream_t, 8> streams_{};
  std::vector<void*> device_memory_;
  std::vector<void*> host_memory_;
};

}  // namespace

std::unique_ptr<Machine> make_machine(std::span<const std::string> options, std::string& why_not) {
  if (!options.empty()) throw std::runtime_error(options[0] + ": the GPU has no such option");
  // Streams that share a hardware queue would wait for each other; must stand before the first CUDA call.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    why_not = result == cudaSuccess ? "no CUDA device" : cudaGetErrorString(result);
    return nullptr;
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return std::make_unique<CudaMachine>(properties);
}

}  // namespace fccl::gpu_check
