#include "timing.h"

#include <algorithm>

namespace fccl::gpu_check {

double median(std::vector<double> values) {
  if (values.empty()) throw std::runtime_error("there is no median of nothing");
  const std::size_t middle = values.size() / 2;
  std::sort(values.begin(), values.end());
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

DeviceMemory::DeviceMemory(std::size_t bytes) {
  check(cudaMalloc(&data_, bytes), "cudaMalloc");
  check(cudaMemset(data_, 0x3c, bytes), "cudaMemset");
}

TimedGraph::TimedGraph(const std::vector<std::function<void(cudaStream_t)>>& parts) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  events_.resize(parts.size() + 1);
  for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "cudaEventCreate");
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  // External: a node of the graph, which records each time that it is replayed.
  check(cudaEventRecordWithFlags(events_[0], stream_, cudaEventRecordExternal), "cudaEventRecord");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i](stream_);
    check(cudaEventRecordWithFlags(events_[i + 1], stream_, cudaEventRecordExternal), "cudaEventRecord");
  }
  check(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
}

TimedGraph::~TimedGraph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  if (graph_ != nullptr) cudaGraphDestroy(graph_);
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

std::vector<std::vector<double>> TimedGraph::run(int times) {
  std::vector<std::vector<double>> all;
  for (int replay = -1; replay < times; ++replay) {
    check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream_), "a replayed graph");
    if (replay < 0) continue;  // clocks and caches come up
    all.emplace_back();
    for (std::size_t i = 0; i + 1 < events_.size(); ++i) {
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, events_[i], events_[i + 1]), "cudaEventElapsedTime");
      all.back().push_back(milliseconds * 1e3);
    }
  }
  return all;
}

}  // namespace fccl::gpu_check
