#include "capture.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "streams.h"

namespace fccl::sim {
namespace {

// Captures that are under way. With graphs_mutex() held.
std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* captures = new std::vector<std::shared_ptr<Capture>>();
  return *captures;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

void merge(Clock& into, const Clock& other) {
  into.resize(std::max(into.size(), other.size()));
  for (std::size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

}  // namespace

std::mutex& graphs_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

unsigned Capture::add_lane(Stream* stream) {
  streams.push_back(stream);
  clocks.emplace_back();
  return graph.lanes++;
}

void Capture::add(GraphNode node) {
  Clock& clock = clocks[node.lane];
  clock.resize(std::max<std::size_t>(clock.size(), node.lane + 1));
  ++clock[node.lane];
  graph.nodes.push_back(std::move(node));
}

CapturedMark Capture::record(unsigned lane) {
  const std::size_t number = graph.marks++;
  graph.nodes.push_back({GraphNode::Kind::kSet, lane, {}, number});
  return {number, clocks[lane]};
}

void Capture::wait_for(unsigned lane, const CapturedMark& mark) {
  graph.nodes.push_back({GraphNode::Kind::kWait, lane, {}, mark.number});
  merge(clocks[lane], mark.clock);
}

bool Capture::is_joined() const {
  Clock all;
  for (const Clock& clock : clocks) merge(all, clock);
  Clock origin = clocks[0];
  origin.resize(all.size());
  return origin == all;
}

void Graph::run(const std::shared_ptr<const Graph>& graph) {
  std::vector<MarkPtr> marks(graph->marks);
  for (MarkPtr& mark : marks) mark = std::make_shared<Mark>();
  const auto run_lane = [&](unsigned lane) {
    std::mt19937_64 random = make_random();
    for (const GraphNode& node : graph->nodes) {
      if (node.lane != lane) continue;
      if (lane != 0 || node.kind == GraphNode::Kind::kWork) delay(random);
      switch (node.kind) {
        case GraphNode::Kind::kWork:
          if (!is_broken()) node.work();
          break;
        case GraphNode::Kind::kSet: marks[node.mark]->set(); break;
        case GraphNode::Kind::kWait: marks[node.mark]->wait(); break;
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned lane = 1; lane < graph->lanes; ++lane) threads.emplace_back(run_lane, lane);
  run_lane(0);
  for (std::thread& thread : threads) thread.join();
}

cudaError_t forbidden_in_capture(const char* function) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const std::lock_guard lock(graphs_mutex());
  for (const auto& capture : captures()) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool counts =
        own ? capture->mode != cudaStreamCaptureModeRelaxed
            : capture->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal;
    if (!counts) continue;
    note("%s spoils a capture", function);
    capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

}  // namespace fccl::sim

using namespace fccl::sim;

namespace {

using GraphPtr = std::shared_ptr<const Graph>;
const GraphPtr& graph_of(const void* handle) { return *static_cast<const GraphPtr*>(handle); }

}  // namespace

FCCL_SIM_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  if (const auto error = trouble("cudaStreamBeginCapture")) return told(error);
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || handle == nullptr) return told(cudaErrorInvalidResourceHandle);
  static std::atomic<unsigned long long> next{1};
  const std::lock_guard lock(graphs_mutex());
  if (stream->capture != nullptr) return told(cudaErrorInvalidValue);
  auto capture = std::make_shared<Capture>();
  capture->id = next++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  stream->capture = capture;
  stream->lane = capture->add_lane(stream);
  captures().push_back(std::move(capture));
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(graphs_mutex());
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr || stream->lane != 0) return told(cudaErrorInvalidValue);
  for (Stream* each : capture->streams) each->capture = nullptr;
  captures().erase(std::find(captures().begin(), captures().end(), capture));
  const bool joined = capture->is_joined();
  capture->streams.clear();
  if (capture->invalid) return told(cudaErrorStreamCaptureInvalidated);
  if (!joined) return told(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new GraphPtr(std::make_shared<Graph>(std::move(capture->graph))));
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

FCCL_SIM_EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                                     unsigned long long* id, cudaGraph_t* graph,
                                                     const cudaGraphNode_t** dependencies,
                                                     const cudaGraphEdgeData** edges, size_t* count) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(graphs_mutex());
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  *status = cudaStreamCaptureStatusNone;
  if (handle == nullptr && mode_of_thread != cudaStreamCaptureModeRelaxed) {
    for (const auto& capture : captures()) {
      if (capture->mode != cudaStreamCaptureModeRelaxed) return told(cudaErrorStreamCaptureImplicit);
    }
  }
  if (stream->capture == nullptr) return cudaSuccess;
  *status = stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = stream->capture->id;
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != nullptr) return told(not_simulated("cudaGraphGetNodes for more than their number"));
  *count = 0;
  for (const GraphNode& node : graph_of(graph)->nodes) *count += node.kind == GraphNode::Kind::kWork ? 1 : 0;
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* to, cudaGraph_t graph,
                                                          unsigned long long) {
  if (const auto error = trouble("cudaGraphInstantiate")) return told(error);
  *to = reinterpret_cast<cudaGraphExec_t>(new GraphPtr(graph_of(graph)));
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  if (const auto error = trouble("cudaGraphLaunch")) return told(error);
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  note("graph on stream %p", static_cast<void*>(handle));
  return told(stream->put([what = graph_of(graph)] { Graph::run(what); }));
}
FCCL_SIM_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<GraphPtr*>(graph);
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<GraphPtr*>(graph);
  return cudaSuccess;
}
