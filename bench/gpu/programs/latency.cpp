// What a call costs when all ranks are streams of one GPU. Nothing crosses a link, so this is the floor that
// launch, protocol and memory system set; a link comes on top of it.
//
// Each rank has a graph: a chain of launches, whose generations come from device memory. The graphs are
// replayed at once, one on each rank's stream.
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cuda/all_reduce.h"
#include "cuda/gather_broadcast.h"
#include "machine.h"
#include "measure.h"
#include "timing.h"
#include "workspaces.h"

namespace fccl::gpu_check {
namespace {

using cuda::Algorithm;

constexpr int kCalls = 100;  // in a graph
constexpr double kTimeout = 5;

struct Question {
  Algorithm algorithm;
  int world;
  std::uint64_t bytes;
};

// One rank's graph.
class Chain {
 public:
  Chain(KernelEntry kernel, Grid grid, const void* args) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t* const event : {&begin_, &end_}) check(cudaEventCreate(event), "cudaEventCreate");
    void* parameters[] = {const_cast<void*>(args)};
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int call = 0; call < kCalls; ++call) {
      check(cudaLaunchKernel(kernel.entry, dim3(grid.blocks), dim3(grid.threads), parameters, 0, stream_),
            "cudaLaunchKernel");
    }
    check(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(executable_, stream_), "cudaGraphUpload");
    check(cudaStreamSynchronize(stream_), "cudaGraphUpload");
  }
  ~Chain() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    for (cudaEvent_t const event : {begin_, end_}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  void launch() {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
  }
  double microseconds() const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds * 1e3;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

std::unique_ptr<Chain> make_chain(Machine& machine, const RankWorkspaces& workspaces,
                                  const Question& question, int rank) {
  const std::uint64_t out = question.algorithm == Algorithm::kOneShotAllGather
                                ? question.bytes * static_cast<std::uint64_t>(question.world)
                                : question.bytes;
  std::byte* const input = machine.allocate(question.bytes);
  std::byte* const output = machine.allocate(out);
  const cuda::Session session = workspaces.session(rank, question.bytes);
  const KernelEntry kernel = cuda::find_kernel(question.algorithm, DType::kFloat32);
  // As plan_launch() cuts it: a block for each 512 vectors.
  const auto blocks = static_cast<unsigned>((question.bytes / 16 + 511) / 512);
  const Grid grid{blocks, blocks == 1 ? static_cast<unsigned>(question.bytes / 16) : 512u};
  switch (question.algorithm) {
    case Algorithm::kOneShotAllGather: {
      const cuda::AllGatherArgs args{session, input, output, question.bytes};
      return std::make_unique<Chain>(kernel, grid, &args);
    }
    case Algorithm::kBroadcast: {
      const cuda::BroadcastArgs args{session, output, question.bytes, 0};
      return std::make_unique<Chain>(kernel, grid, &args);
    }
    default: {
      const cuda::AllReduceArgs args{session, input, output, question.bytes, ReduceOp::kSum};
      return std::make_unique<Chain>(kernel, grid, &args);
    }
  }
}

// Microseconds a call.
double measure(Machine& machine, const Question& question, int replays) {
  double result = 0;
  {
    const RankWorkspaces workspaces(machine, question.world, 1 << 20, 1, kTimeout);
    std::vector<std::unique_ptr<Chain>> chains;
    for (int rank = 0; rank < question.world; ++rank)
      chains.push_back(make_chain(machine, workspaces, question, rank));
    std::vector<double> times;
    for (int replay = -1; replay < replays; ++replay) {
      for (const auto& chain : chains) chain->launch();
      machine.finish();
      if (const std::string failure = workspaces.failure(); !failure.empty())
        throw std::runtime_error(failure);
      // The last rank to begin waits for nobody: the others' times hold its delay, too.
      double least = chains[0]->microseconds();
      for (const auto& chain : chains) least = std::min(least, chain->microseconds());
      if (replay >= 0) times.push_back(least / kCalls);
    }
    result = median(times);
  }
  machine.release_all();
  return result;
}

}  // namespace

void measure_latency(bool quick) {
  std::string why_not;
  const auto machine = make_machine({}, why_not);
  if (machine == nullptr) throw std::runtime_error(why_not);
  std::printf(
      "ROW | call (all ranks on one GPU: the protocol's floor, no link) | ranks | 4 KiB, us | 64 KiB, us "
      "|\n");
  std::string last;
  for (const Algorithm algorithm : {Algorithm::kOneShotAllReduce, Algorithm::kTwoShotAllReduce,
                                    Algorithm::kOneShotAllGather, Algorithm::kBroadcast}) {
    for (const int world : {2, 4, 8}) {
      std::array<double, 2> times{};
      for (std::size_t i = 0; i < times.size(); ++i)
        times[i] = measure(*machine, {algorithm, world, i == 0 ? 4096u : 65536u}, quick ? 3 : 11);
      std::printf("ROW | %s | %d | %.2f | %.2f |\n", cuda::name_of(algorithm), world, times[0], times[1]);
      std::fflush(stdout);
      if (algorithm == Algorithm::kOneShotAllReduce && world == 8)
        last = "one-shot all_reduce of 4 KiB, 8 ranks: " + std::to_string(times[0]).substr(0, 5) + " us";
    }
  }
  std::printf("%s (one GPU: the protocol's floor, not a link's)\n", last.c_str());
}

}  // namespace fccl::gpu_check
