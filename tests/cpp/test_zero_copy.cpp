// Collectives on tensors in the arena: equal to the staged ones to the bit, agreed upon, and done with the
// peers' memory when they return (invariant I8 in group_state.h, with negative controls).
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/arena.h"
#include "cpu/group.h"
#include "ranks.h"

namespace fccl::cpu {
namespace {

using std::chrono::milliseconds;
using test::expect_ranks;
using test::RankResult;
using test::require;
using test::run_ranks;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// A tensor in this rank's arena, or on the heap.
template <typename T>
class Tensor {
 public:
  explicit Tensor(std::size_t count, bool in_arena = true, std::size_t skip = 0)
      : heap_(in_arena ? 0 : count) {
    if (in_arena) {
      block_ = Arena::of_process()->allocate((count + skip) * sizeof(T), "test");
      require(block_ != nullptr, "no arena memory: " + Arena::why_none());
    }
    data_ = in_arena ? reinterpret_cast<T*>(block_) + skip : heap_.data();
  }
  ~Tensor() { Arena::of_process()->free(block_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  T* data() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  std::vector<T> heap_;
  std::byte* block_ = nullptr;
  T* data_;
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 977 + 1) {}
  std::uint64_t bits() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return state_ >> 20;
  }
  float number() { return static_cast<float>(static_cast<std::int64_t>(bits()) - (1LL << 43)) * 1e-9F; }

 private:
  std::uint64_t state_;
};

bool all_well(const std::vector<RankResult>& results) {
  for (const RankResult& result : results) {
    if (result.exit_code != 0) return false;
  }
  return true;
}

class ZeroCopyRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ZeroCopyRanks, testing::Values(2, 3, 4, 5, 18));

TEST_P(ZeroCopyRanks, AllReduceEqualsTheStagedOneToTheBit) {
  expect_ranks(GetParam(), [](Group& group) {
    Random random(static_cast<std::uint64_t>(group.rank()));
    std::uint64_t expected = 0;
    for (const std::size_t count : {16385U, 20000U, 70001U, 300007U}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
        Tensor<float> input(count, true, count % 7);
        Tensor<float> output(count);
        std::vector<float> ordinary(count);
        for (std::size_t i = 0; i < count; ++i) input[i] = ordinary[i] = random.number();
        group.all_reduce(ordinary.data(), ordinary.data(), count, DType::kFloat32, op, soon());
        require(group.zero_copy_count() == expected, "tensors outside the arena");
        // Out of place, and in place.
        group.all_reduce(input.data(), output.data(), count, DType::kFloat32, op, soon());
        require(std::memcmp(output.data(), ordinary.data(), count * 4) == 0, "out of place");
        group.all_reduce(input.data(), input.data(), count, DType::kFloat32, op, soon());
        require(std::memcmp(input.data(), ordinary.data(), count * 4) == 0, "in place");
        expected += count * 4 > 65536 ? 2 : 0;
        require(group.zero_copy_count() == expected || count * 4 <= 65536, "not without copies");
        expected = group.zero_copy_count();
      }
    }
    require(expected > 0, "nothing went without copies");
    Tensor<std::uint16_t> halves(200003);
    std::vector<std::uint16_t> ordinary(200003);
    for (std::size_t i = 0; i < ordinary.size(); ++i)
      halves[i] = ordinary[i] = static_cast<std::uint16_t>(random.bits());
    group.all_reduce(halves.data(), halves.data(), ordinary.size(), DType::kBFloat16, ReduceOp::kAvg, soon());
    group.all_reduce(ordinary.data(), ordinary.data(), ordinary.size(), DType::kBFloat16, ReduceOp::kAvg,
                     soon());
    require(std::memcmp(halves.data(), ordinary.data(), ordinary.size() * 2) == 0, "bfloat16");
    require(group.zero_copy_count() == expected + 1, "bfloat16 went with copies");
  });
}

TEST_P(ZeroCopyRanks, AllGatherOfUnevenInputs) {
  expect_ranks(GetParam(), [](Group& group) {
    std::vector<std::size_t> counts;
    for (int rank = 0; rank < group.world_size(); ++rank)
      counts.push_back(rank == 1 ? 0 : 20000 + 1000 * static_cast<std::size_t>(rank));
    const auto mine = static_cast<std::size_t>(group.rank());
    Tensor<std::int64_t> input(counts[mine]);
    for (std::size_t i = 0; i < counts[mine]; ++i) input[i] = static_cast<std::int64_t>(mine * 1000000 + i);
    std::vector<std::vector<std::int64_t>> outputs;
    std::vector<void*> places;
    for (const std::size_t count : counts) outputs.emplace_back(count, -1);
    for (auto& output : outputs) places.push_back(output.data());
    group.all_gather(input.data(), places, counts, DType::kInt64, true, soon());
    require(group.zero_copy_count() == 1, "it went with copies");
    for (std::size_t r = 0; r < counts.size(); ++r) {
      for (std::size_t i = 0; i < counts[r]; ++i)
        require(outputs[r][i] == static_cast<std::int64_t>(r * 1000000 + i), "wrong element");
    }
  });
}

TEST_P(ZeroCopyRanks, BroadcastFromEveryRoot) {
  expect_ranks(GetParam(), [](Group& group) {
    for (int root = 0; root < group.world_size(); ++root) {
      const bool source = group.rank() == root;
      Tensor<std::int32_t> buffer(50001, source);
      for (std::size_t i = 0; i < 50001; ++i) buffer[i] = source ? static_cast<std::int32_t>(i) + root : -1;
      group.broadcast(buffer.data(), 50001, DType::kInt32, root, soon());
      for (std::size_t i = 0; i < 50001; ++i)
        require(buffer[i] == static_cast<std::int32_t>(i) + root, "wrong element");
    }
    require(group.zero_copy_count() == static_cast<std::uint64_t>(group.world_size()), "with copies");
  });
}

TEST(ZeroCopy, WhereOneRankIsOutsideAllTakeTheStagedPath) {
  expect_ranks(3, [](Group& group) {
    const std::size_t count = 100000;
    for (int outside = 0; outside < 3; ++outside) {
      Tensor<float> data(count, group.rank() != outside);
      for (std::size_t i = 0; i < count; ++i)
        data[i] = static_cast<float>(i % 1000 + static_cast<std::size_t>(group.rank()));
      group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kSum, soon());
      for (std::size_t i = 0; i < count; ++i)
        require(data[i] == static_cast<float>(3 * (i % 1000) + 3), "wrong sum");
    }
    // In the arena, but for its last element.
    Arena& arena = *Arena::of_process();
    Tensor<float> whole(count);
    std::byte* end = arena.memory().data() + arena.capacity();
    require(arena.locate(end - 4 * (count - 1), 4 * count) == Description::kNowhere, "beyond the end");
    require(group.zero_copy_count() == 0, "without copies");
  });
}

TEST(ZeroCopy, AMismatchLeavesTheMemoryAsItWas) {
  expect_ranks(2, [](Group& group) {
    const std::size_t count = group.rank() == 0 ? 100000 : 100001;
    Tensor<float> data(count);
    for (std::size_t i = 0; i < count; ++i) data[i] = 1;
    bool thrown = false;
    try {
      group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kSum, soon());
    } catch (const Error& error) {
      thrown = error.kind() == ErrorKind::kMismatch;
    }
    require(thrown, "no mismatch");
    for (std::size_t i = 0; i < count; ++i) require(data[i] == 1, "it was written to");
    group.all_reduce(data.data(), data.data(), 100000, DType::kFloat32, ReduceOp::kSum, soon());
    require(data[99999] == 2 && group.zero_copy_count() == 1, "the group is not what it was");
  });
}

// The caller writes to its tensor, or frees it and lets another use it, as soon as the call returns, while a
// peer may be late.
void reuse_at_once(Group& group) {
  const std::size_t count = 40000;
  const auto other = static_cast<float>(1 - group.rank());
  std::vector<float> gathered(count);
  std::vector<float> own(count);
  for (int round = 0; round < 30; ++round) {
    Tensor<float> input(count);
    for (std::size_t i = 0; i < count; ++i) input[i] = static_cast<float>(round * 2 + group.rank());
    void* places[] = {group.rank() == 0 ? own.data() : gathered.data(),
                      group.rank() == 0 ? gathered.data() : own.data()};
    const std::size_t counts[] = {count, count};
    group.all_gather(input.data(), places, counts, DType::kFloat32, false, soon());
    std::memset(input.data(), 0xff, count * 4);
    for (std::size_t i = 0; i < count; ++i)
      require(gathered[i] == static_cast<float>(round * 2) + other, "the peer wrote before it was read");
  }
  require(group.zero_copy_count() == 30, "with copies");
}

GroupTesting late(int rank_of_ten) {
  GroupTesting testing;
  testing.pause = [calls = rank_of_ten]() mutable {
    if (++calls % 3 == 0) std::this_thread::sleep_for(milliseconds(3));
  };
  return testing;
}

TEST(ZeroCopy, MemoryIsTheCallersWhenTheCallReturns) {
  EXPECT_TRUE(all_well(run_ranks(2, reuse_at_once, 60, true, late(0))));
}

TEST(ZeroCopy, WithoutWaitingForThePeersItIsNot) {
  GroupTesting wrong = late(0);
  wrong.hasty = true;
  EXPECT_FALSE(all_well(run_ranks(2, reuse_at_once, 60, true, wrong))) << "the test above has no power";
}

// Rank 0 is aborted while rank 1 is about to write into its tensor, half a second late. When the error
// reaches rank 0's caller, nobody writes there any more.
void abort_under_way(Group& group) {
  const std::size_t count = 40000;
  Tensor<float> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = 1;
  std::thread aborter;
  if (group.rank() == 0) {
    aborter = std::thread([&] {
      std::this_thread::sleep_for(milliseconds(100));
      group.abort("the test says so");
    });
  }
  bool failed = false;
  try {
    group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kSum, soon());
  } catch (const Error&) {
    failed = true;
  }
  if (aborter.joinable()) aborter.join();
  // Rank 1 may succeed: rank 0 had done its part before.
  if (group.rank() == 0) {
    require(failed, "it succeeded");
    for (std::size_t i = 0; i < count; ++i) data[i] = 5;
    std::this_thread::sleep_for(milliseconds(700));
    for (std::size_t i = 0; i < count; ++i) require(data[i] == 5, "a peer wrote after the error");
  }
}

GroupTesting half_a_second_late() {
  GroupTesting testing;
  // Both ranks: rank 0 waits for rank 1's word all the same.
  testing.pause = [] {
    static const int self = [] {
      const char* rank = std::getenv("FCCL_TEST_RANK");
      return rank == nullptr ? -1 : std::atoi(rank);
    }();
    if (self == 1) std::this_thread::sleep_for(milliseconds(500));
  };
  return testing;
}

void abort_as_rank(Group& group) {
  ::setenv("FCCL_TEST_RANK", group.rank() == 0 ? "0" : "1", 1);
  abort_under_way(group);
}

TEST(ZeroCopy, AfterAnErrorMemoryIsTheCallersToo) {
  const auto results = run_ranks(2, abort_as_rank, 60, true, half_a_second_late());
  for (const RankResult& result : results) EXPECT_EQ(result.exit_code, 0) << result.message;
}

TEST(ZeroCopy, WithoutPatienceItIsNot) {
  GroupTesting wrong = half_a_second_late();
  wrong.no_patience = true;
  EXPECT_FALSE(all_well(run_ranks(2, abort_as_rank, 60, true, wrong))) << "the test above has no power";
}

// A peer that is stopped in the middle may come to the memory whenever it goes on: the block is kept from
// others until then, for longer than the failed call waits.
TEST(ZeroCopy, ABlockThatAStoppedPeerMayTouchIsInQuarantine) {
  int* words =
      static_cast<int*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(words, MAP_FAILED);
  volatile int* stopped = words;
  GroupTesting testing;
  testing.pause = [stopped] {
    const char* rank = std::getenv("FCCL_TEST_RANK");
    if (rank == nullptr || rank[0] != '1') return;
    *stopped = static_cast<int>(::getpid());
    ::raise(SIGSTOP);
  };
  const auto results = run_ranks(
      2,
      [stopped](Group& group) {
        ::setenv("FCCL_TEST_RANK", group.rank() == 0 ? "0" : "1", 1);
        const std::size_t count = 40000;
        auto data = std::make_unique<Tensor<float>>(count);
        const float* const place = data->data();
        bool failed = false;
        try {
          group.all_reduce(data->data(), data->data(), count, DType::kFloat32, ReduceOp::kSum,
                           Deadline::after(milliseconds(300)));
        } catch (const Error&) {
          failed = true;
        }
        if (group.rank() == 1) return;
        require(failed, "it succeeded");
        data.reset();
        Arena& arena = *Arena::of_process();
        require(arena.stats().quarantined != 0, "not in quarantine");
        Tensor<float> next(count);
        require(next.data() != place, "handed out again while the peer may write to it");
        ::kill(*stopped, SIGCONT);
        for (int i = 0; i < 300 && arena.stats().quarantined != 0; ++i)
          std::this_thread::sleep_for(milliseconds(10));
        require(arena.stats().quarantined == 0, "still in quarantine");
        Tensor<float> again(count);
        require(again.data() == place, "not handed out again");
      },
      60, true, testing);
  for (const RankResult& result : results) EXPECT_EQ(result.exit_code, 0) << result.message;
  ::munmap(words, 4096);
}

TEST(ZeroCopy, APeerThatDiesInTheMiddleFreesTheMemory) {
  const auto results = run_ranks(2, [](Group& group) {
    const std::size_t count = 40000;
    Tensor<float> data(count);
    group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kSum, soon());
    if (group.rank() == 1) ::raise(SIGKILL);
    bool died = false;
    try {
      group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kSum, soon());
    } catch (const Error& error) {
      died = error.kind() == ErrorKind::kPeerDied;
    }
    require(died, "rank 1 is not known to have died");
    require(Arena::of_process()->stats().quarantined == 0, "a dead rank touches nothing");
  });
  EXPECT_EQ(results[0].exit_code, 0) << results[0].message;
}

TEST(ZeroCopy, WithoutAnArenaOnOneRankTheGroupStillWorks) {
  const auto results = run_ranks(
      2,
      [](Group& group) {
        if (group.rank() == 1) ::setenv("FCCL_ARENA_SIZE", "0", 1);
        require(group.connect(soon()), group.why_not());
        require(!group.why_no_zero_copy().empty(), "no reason");
        std::vector<float> data(100000, 1);
        group.all_reduce(data.data(), data.data(), data.size(), DType::kFloat32, ReduceOp::kSum, soon());
        require(data[99999] == 2, "wrong sum");
      },
      60, false);
  for (const RankResult& result : results) EXPECT_EQ(result.exit_code, 0) << result.message;
}

}  // namespace
}  // namespace fccl::cpu
