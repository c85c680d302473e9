// Times on the device: work is captured into a CUDA graph once, with events in it, and replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fccl::gpu_check {

inline void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

double median(std::vector<double> values);

// Device memory for as long as the object lives.
class DeviceMemory {
 public:
  // Every byte is 0x3c: as float32 or bfloat16 about 0.0115, as float16 about 1.06.
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// A stream, captured into a graph: `parts` one after the other, each between two events.
class TimedGraph {
 public:
  explicit TimedGraph(const std::vector<std::function<void(cudaStream_t)>>& parts);
  ~TimedGraph();
  TimedGraph(const TimedGraph&) = delete;
  TimedGraph& operator=(const TimedGraph&) = delete;

  // Replays it `times` times after a first one; microseconds of each part, [replay][part].
  std::vector<std::vector<double>> run(int times);

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  std::vector<cudaEvent_t> events_;  // one more than parts
};

}  // namespace fccl::gpu_check
