// The invariants of csrc/cpu/group_state.h and all_reduce.cpp, with negative controls: the same test run
// against a protocol that is wrong on purpose must fail, or it would prove nothing.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/group.h"
#include "cpu/tuning.h"
#include "ranks.h"

namespace fccl::cpu {
namespace {

using test::RankResult;
using test::require;
using test::run_ranks;

// Delays reads of peers' slots now and then, differently on each rank (the state is copied by fork, so
// it is seeded on first use with something that differs).
struct Dawdle {
  std::uint64_t state = 0;
  int microseconds;
  void operator()() {
    if (state == 0)
      state = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    if ((state >> 62) == 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }
};

GroupTesting dawdling(int microseconds) {
  GroupTesting testing;
  testing.pause = Dawdle{0, microseconds};
  return testing;
}

bool all_well(const std::vector<RankResult>& results) {
  for (const RankResult& result : results) {
    if (result.exit_code != 0) return false;
  }
  return true;
}

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// Sums in which every chunk of every round is different, so that a stale or early slot shows.
void large_sums(Group& group) {
  const std::size_t count = geometry_for(group.world_size()).chunk_bytes / 4 * 12;
  std::vector<float> data(count);
  for (int round = 0; round < 4; ++round) {
    const auto value = [&](int rank, std::size_t i) {
      return static_cast<float>((i / 1024 + static_cast<std::size_t>(rank + round * 3)) % 4096);
    };
    for (std::size_t i = 0; i < count; ++i) data[i] = value(group.rank(), i);
    group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kSum, soon());
    for (std::size_t i = 0; i < count; ++i) {
      float expected = 0;
      for (int rank = 0; rank < group.world_size(); ++rank) expected += value(rank, i);
      require(data[i] == expected, "wrong sum");
    }
  }
}

void small_sums(Group& group) {
  for (int round = 0; round < 300; ++round) {
    std::vector<float> data(3000, static_cast<float>(round * (group.rank() + 1)));
    group.all_reduce(data.data(), data.data(), data.size(), DType::kFloat32, ReduceOp::kSum, soon());
    float expected = 0;
    for (int rank = 0; rank < group.world_size(); ++rank) expected += static_cast<float>(round * (rank + 1));
    for (const float sum : data) require(sum == expected, "wrong sum");
  }
}

TEST(Protocol, ThreeSlotsAreEnoughForThePipeline) {
  EXPECT_TRUE(all_well(run_ranks(3, large_sums, 60, true, dawdling(2000))));
}

TEST(Protocol, OneSlotIsNotEnoughForThePipeline) {
  GroupTesting wrong = dawdling(2000);
  wrong.depth = 1;
  EXPECT_FALSE(all_well(run_ranks(3, large_sums, 60, true, wrong))) << "the test above has no power";
}

TEST(Protocol, TwoSlotsAreNotEnoughForThePipeline) {
  GroupTesting wrong = dawdling(2000);
  wrong.depth = 2;
  EXPECT_FALSE(all_well(run_ranks(3, large_sums, 60, true, wrong))) << "the test above has no power";
}

TEST(Protocol, TwoOneShotSlotsAreEnough) {
  EXPECT_TRUE(all_well(run_ranks(3, small_sums, 60, true, dawdling(200))));
}

TEST(Protocol, OneOneShotSlotIsNotEnough) {
  GroupTesting wrong = dawdling(200);
  wrong.single_one_shot = true;
  EXPECT_FALSE(all_well(run_ranks(3, small_sums, 60, true, wrong))) << "the test above has no power";
}

// The result does not depend on the path a message takes: whole or in pieces, one-shot or staged.
TEST(Determinism, PiecesEqualTheWholeToTheBit) {
  test::expect_ranks(3, [](Group& group) {
    const std::size_t count = 700001;
    std::vector<float> input(count);
    std::uint64_t random = static_cast<std::uint64_t>(group.rank()) * 977 + 1;
    for (float& x : input) {
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      x = static_cast<float>(static_cast<std::int64_t>(random >> 20)) * 1e-9F;
    }
    std::vector<float> whole(count);
    std::vector<float> pieces(count);
    group.all_reduce(input.data(), whole.data(), count, DType::kFloat32, ReduceOp::kAvg, soon());
    std::size_t at = 0;
    for (std::size_t size = 1; at < count; size = size * 3 + 1) {
      const std::size_t length = std::min(size, count - at);
      group.all_reduce(input.data() + at, pieces.data() + at, length, DType::kFloat32, ReduceOp::kAvg,
                       soon());
      at += length;
    }
    require(whole == pieces, "chunking shows in the result");
    // And it is the same on every rank.
    std::vector<float> first = whole;
    group.broadcast(first.data(), count, DType::kFloat32, 0, soon());
    require(whole == first, "ranks differ");
  });
}

}  // namespace
}  // namespace fccl::cpu
