// measure_kernels bandwidth|latency [--quick]
//
// Exit status: 0 measured, 1 something failed, 2 wrong arguments, 77 there is no GPU.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "measure.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool quick = arguments.size() == 2 && arguments[1] == "--quick";
  if (arguments.empty() || arguments.size() > (quick ? 2u : 1u)) {
    std::cerr << "usage: measure_kernels bandwidth|latency [--quick]\n";
    return 2;
  }
  // Streams that share a hardware queue would wait for each other; must stand before the first CUDA call.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    std::cout << (result == cudaSuccess ? "no CUDA device" : cudaGetErrorString(result)) << std::endl;
    return 77;
  }
  try {
    if (arguments[0] == "bandwidth") {
      fccl::gpu_check::measure_bandwidth(quick);
    } else if (arguments[0] == "latency") {
      fccl::gpu_check::measure_latency(quick);
    } else {
      std::cerr << "measure_kernels: " << arguments[0] << " is neither bandwidth nor latency\n";
      return 2;
    }
  } catch (const std::exception& error) {
    std::cout << "measure_kernels: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}
