// The communicating kernels give exact results: every kind, type, operation, odd size, alignment and number
// of ranks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/world.h"

namespace fccl::cuda {
namespace {

using host::Call;
using host::Kind;
using host::Launcher;
using host::Tensors;
using host::World;

constexpr std::size_t kHalfBytes = 256 << 10;

template <class Element>
void expect_exact(const World& world, const std::vector<Call>& calls,
                  std::optional<std::uint64_t> seed = {}) {
  Launcher launcher(world.size(), seed);
  std::vector<std::vector<std::unique_ptr<Tensors<Element>>>> ranks;
  for (int rank = 0; rank < world.size(); ++rank) {
    ranks.push_back(host::add_calls<Element>(launcher, rank, world, rank, calls));
  }
  ASSERT_EQ(launcher.run(), 0);
  for (int rank = 0; rank < world.size(); ++rank) {
    EXPECT_EQ(world.status(rank).failure, 0u);
    for (const auto& tensors : ranks[static_cast<std::size_t>(rank)]) EXPECT_EQ(tensors->complaint(), "");
  }
}

template <class Element>
class CudaCollectives : public testing::Test {};
using AllElements = testing::Types<Float32, Float64, Float16, BFloat16, Int32, Int64>;
TYPED_TEST_SUITE(CudaCollectives, AllElements);

TYPED_TEST(CudaCollectives, are_exact_for_all_sizes_and_ranks) {
  for (const int size : {2, 3, 4, 8}) {
    const World world(size, kHalfBytes);
    std::vector<Call> calls;
    for (const Kind kind : {Kind::kOneShot, Kind::kTwoShot, Kind::kAllGather, Kind::kBroadcast}) {
      for (const std::size_t count : {1, 2, 3, 5, 7, 8, 9, 16, 31, 64, 100, 257, 1000}) {
        for (const std::size_t offset : {0, 1}) {
          Call call;
          call.kind = kind;
          call.count = count;
          call.offset = offset;
          call.in_place = (count + offset) % 2 == 0;
          call.blocks = count > 50 ? 2 : 1;
          call.root = static_cast<int>(count % static_cast<std::size_t>(size));
          call.seed = count;
          calls.push_back(call);
        }
      }
    }
    expect_exact<TypeParam>(world, calls);
  }
}

TYPED_TEST(CudaCollectives, know_every_operation) {
  const World world(3, kHalfBytes);
  std::vector<Call> calls;
  for (const Kind kind : {Kind::kOneShot, Kind::kTwoShot}) {
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      if (op == ReduceOp::kAvg && !is_float<TypeParam>) continue;
      Call call;
      call.kind = kind;
      call.op = op;
      call.count = 3000;  // enough for pairs of NaN, inf and zeros of either sign
      call.blocks = 2;
      call.threads = 16;
      call.seed = static_cast<std::uint64_t>(op);
      calls.push_back(call);
    }
  }
  expect_exact<TypeParam>(world, calls);
}

// The number of a launch has 64 bits; nothing on its way may cut it to 32, or to its last bit.
TEST(CudaProtocol, generations_pass_any_bit) {
  for (const std::uint64_t first :
       {std::uint64_t{0xfffffffc}, std::uint64_t{0x7ffffffc}, ~std::uint64_t{0} - 20}) {
    for (const int size : {2, 3, 4, 8}) {
      const World world(size, kHalfBytes, first);
      expect_exact<Float32>(world,
                            host::random_calls(first + static_cast<std::uint64_t>(size), size, 10, 100));
      for (int rank = 0; rank < size; ++rank) EXPECT_EQ(world.control(rank).generation, first + 10);
    }
  }
}

TEST(CudaProtocol, calls_follow_each_other_in_any_interleaving) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const int size = 2 + static_cast<int>(seed % 3);
    const World world(size, kHalfBytes);
    expect_exact<Float32>(world, host::random_calls(seed, size, 12, 60), seed);
  }
}

// Ranks as processes, as in life: on as many cores as there are, in memory they share.
TEST(CudaProtocol, ranks_may_be_processes) {
  for (const int size : {2, 3, 4, 8}) {
    const World world(size, kHalfBytes);
    const std::vector<Call> calls = host::random_calls(static_cast<std::uint64_t>(size), size, 40, 300);
    std::vector<pid_t> children;
    for (int rank = 0; rank < size; ++rank) {
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        alarm(60);
        Launcher launcher(1);
        const auto all = host::add_calls<BFloat16>(launcher, 0, world, rank, calls);
        bool right = launcher.run() == 0;
        for (const auto& tensors : all) right = right && tensors->complaint().empty();
        _exit(right ? 0 : 1);
      }
      children.push_back(child);
    }
    for (const pid_t child : children) {
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << size << " ranks";
    }
  }
}

}  // namespace
}  // namespace fccl::cuda
