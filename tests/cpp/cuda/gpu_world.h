// A group of GPUs in one process for tests: a fake GPU for each rank, and a thread of its own where ranks do
// something together.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/fake_gpus.h"
#include "cuda/gpu_group.h"

namespace fccl::cuda::host {

inline StreamHandle stream(std::uintptr_t number) { return reinterpret_cast<StreamHandle>(number); }

// One rank of a test: what it needs to connect, and what came of it.
struct Rank {
  std::shared_ptr<FakeRuntime> gpu;
  std::unique_ptr<ThreadPeers> peers;
  std::unique_ptr<GpuGroup> group;
  std::string why_not;
};

struct Group {
  explicit Group(int size) {
    const auto meetings = std::make_shared<Meetings>(size);
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back({std::make_shared<FakeRuntime>(rank),
                       std::make_unique<ThreadPeers>(meetings, rank, size), nullptr, ""});
    }
  }
  Rank& operator[](int rank) { return ranks[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks.size()); }

  void connect(const std::function<void(int, GpuGroupConfig&)>& change = {}) {
    on_all_ranks(size(), [&](int r) {
      Rank& rank = (*this)[r];
      GpuGroupConfig config;
      config.runtime = rank.gpu;
      config.name = "g";
      config.timeout = std::chrono::seconds(30);
      config.grace = std::chrono::milliseconds(50);
      config.half_bytes = 1 << 20;
      if (change) change(r, config);
      rank.group = GpuGroup::connect(std::move(config), *rank.peers, rank.why_not);
    });
  }
  void close() {
    on_all_ranks(size(), [&](int r) {
      if ((*this)[r].group != nullptr) (*this)[r].group->close((*this)[r].peers.get());
      (*this)[r].group.reset();
    });
  }
  void expect_nothing_left() {
    for (Rank& rank : ranks) {
      EXPECT_EQ(rank.gpu->allocations, 0);
      EXPECT_EQ(rank.gpu->mappings, 0);
      EXPECT_EQ(rank.gpu->host_allocations, 0);
      EXPECT_EQ(rank.gpu->events, 0);
    }
  }

  std::vector<Rank> ranks;
};

inline GpuCall all_reduce_of(std::uint64_t count, DType dtype = DType::kFloat32,
                             ReduceOp op = ReduceOp::kSum) {
  return {Collective::kAllReduce, op, dtype, 0, count};
}

inline void run(GpuGroup& group, const GpuCall& call, const void* input, void* output,
                StreamHandle on = stream(1)) {
  const LaunchPlan plan = group.plan(call, on);
  ASSERT_NE(plan.algorithm, Algorithm::kInner) << plan.reason;
  group.launch(plan, call, input, output, on);
}

inline void expect_failed(GpuGroup& group, ErrorKind kind, const std::vector<std::string>& words) {
  const auto failure = group.failure();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->kind(), kind);
  EXPECT_TRUE(failure->is_sticky());
  for (const std::string& word : words)
    EXPECT_NE(std::string(failure->what()).find(word), std::string::npos)
        << word << " in " << failure->what();
  float value = 0;
  EXPECT_THROW(run(group, all_reduce_of(1), &value, &value), Error);
}

using Log = std::vector<std::string>;

// Two ranks whose GPUs do nothing: for what is put on streams.
struct Quiet : Group {
  Quiet() : Group(2) {
    for (Rank& rank : ranks) rank.gpu->executes = false;
    connect();
  }
  ~Quiet() { close(); }
  GpuGroup& group() { return *ranks[0].group; }
  FakeRuntime& gpu() { return *ranks[0].gpu; }
  void call(std::uintptr_t on) { run(group(), all_reduce_of(4), nullptr, nullptr, stream(on)); }
  Log take_log() { return std::exchange(gpu().log, {}); }
};

}  // namespace fccl::cuda::host
