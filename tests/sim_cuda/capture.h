// Graphs: what streams were given while they were being captured. Each stream that took part is a lane, and
// keeps its order; what orders lanes are the marks of events. A replay runs lanes at the same time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fccl::sim {

class Stream;

// How much of each lane has happened.
using Clock = std::vector<std::size_t>;

struct CapturedMark {
  std::size_t number = 0;
  Clock clock;
};

struct GraphNode {
  enum class Kind { kWork, kSet, kWait };
  Kind kind = Kind::kWork;
  unsigned lane = 0;
  std::function<void()> work;
  std::size_t mark = 0;
};

struct Graph {
  std::vector<GraphNode> nodes;
  unsigned lanes = 0;
  std::size_t marks = 0;

  // Carries it out once; returns when all is done.
  static void run(const std::shared_ptr<const Graph>& graph);
};

struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  bool invalid = false;
  Graph graph;
  std::vector<Stream*> streams;  // by lane; the first is where it began
  std::vector<Clock> clocks;     // by lane

  unsigned add_lane(Stream* stream);
  void add(GraphNode node);
  void wait_for(unsigned lane, const CapturedMark& mark);
  CapturedMark record(unsigned lane);
  bool is_joined() const;
};

// Guards captures, and what streams and events know of them.
std::mutex& graphs_mutex();

// To be called by what must not be done while a capture is under way; it spoils the capture.
cudaError_t forbidden_in_capture(const char* function);

}  // namespace fccl::sim
