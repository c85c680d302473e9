// The communicating kernels under ThreadSanitizer: each rank is an OS thread, each GPU thread a fibre that
// ThreadSanitizer takes for a thread of its own. Usage: fccl_cuda_tsan FAULT, where "none" must report no
// race and any other one must.
#include <cstdio>
#include <cstring>
#include <thread>

#include "cuda/faults.h"
#include "cuda/world.h"

namespace fccl::cuda::host {
namespace {

template <class Faults>
int run() {
  constexpr int kRanks = 3;
  const World world(kRanks, 64 << 10);
  std::vector<Call> calls = random_calls(7, kRanks, 24, 60);
  for (std::size_t i = 0; i < calls.size(); ++i) calls[i].blocks = i % 2 == 0 ? 3 : 1;
  bool right[kRanks] = {};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      Launcher launcher(1);
      const auto all = add_calls<Float32, Faults>(launcher, 0, world, rank, calls);
      right[rank] = launcher.run() == 0;
      for (const auto& tensors : all) right[rank] = right[rank] && tensors->complaint().empty();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const bool one : right) {
    if (!one) return 1;
  }
  std::puts("results are right");
  return 0;
}

struct Fault {
  const char* name;
  int (*run)();
};
constexpr Fault kFaults[] = {
    {"none", run<NoFaults>},
    {"no-flag-wait", run<NoFlagWait>},
    {"relaxed-flag", run<RelaxedFlag>},
    {"relaxed-wait", run<RelaxedWait>},
    {"no-sync-before-flag", run<NoSyncBeforeFlag>},
    {"one-mailbox", run<OneMailbox>},
    {"per-block-counters", run<PerBlockCounters>},
};

}  // namespace
}  // namespace fccl::cuda::host

int main(int argc, char** argv) {
  for (const auto& fault : fccl::cuda::host::kFaults) {
    if (argc == 2 && std::strcmp(argv[1], fault.name) == 0) return fault.run();
  }
  std::fputs("usage: fccl_cuda_tsan FAULT\n", stderr);
  return 2;
}
