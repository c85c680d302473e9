// The launch policy: what it promises for every question there is, and some answers one by one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "cuda/all_reduce.h"
#include "cuda/gather_broadcast.h"
#include "cuda/policy.h"
#include "cuda/questions.h"

namespace fccl::cuda {
namespace {

using namespace questions;

// What collectives.cu compiles, said once more.
bool has_reduction(DType dtype, ReduceOp op) {
  const bool is_float = dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 ||
                        dtype == DType::kBFloat16;
  const bool is_integer = dtype == DType::kInt32 || dtype == DType::kInt64;
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  return (is_float && !bitwise) || (is_integer && !bitwise && op != ReduceOp::kAvg);
}

template <class Kernel>
const char* fault_of_grid(const LaunchPlan& plan, const LaunchQuestion& q) {
  if (Kernel::mailbox_bytes(q.bytes, q.world) > q.half_bytes) return "the mailboxes do not fit";
  if (plan.threads > unsigned{Kernel::kThreads}) return "more threads than the kernel is compiled for";
  return nullptr;
}

// Null if the plan keeps what policy.h promises.
const char* fault_of(const LaunchPlan& plan, const LaunchQuestion& q) {
  if (plan.reason[0] == '\0') return "no reason";
  if (plan.algorithm == Algorithm::kInner) {
    return plan.blocks != 0 || plan.threads != 0 ? "a grid for the inner engine" : nullptr;
  }
  if (q.bytes == 0 || q.world < 2 || q.world > kMaxRanks)
    return "a launch for nothing, for one, or for too many";
  if (q.link == Link::kNone) return "a launch without peer access";
  if (q.architecture < 80) return "a launch without code for the GPU";
  if (plan.blocks < 1 || plan.blocks > kMaxBlocks) return "number of blocks";
  if (plan.blocks > std::max(1u, static_cast<unsigned>(q.sm_count) / 4))
    return "blocks that may not be resident together";
  if (plan.threads % 32 != 0 || plan.threads < static_cast<unsigned>(q.world)) return "number of threads";
  switch (plan.algorithm) {
    case Algorithm::kOneShotAllReduce:
    case Algorithm::kTwoShotAllReduce:
      if (q.collective != Collective::kAllReduce) return "another collective";
      if (!has_reduction(q.dtype, q.op)) return "no such kernel";
      if (plan.element != q.dtype) return "another type's kernel";
      return plan.algorithm == Algorithm::kOneShotAllReduce
                 ? fault_of_grid<OneShotAllReduce<Float32>>(plan, q)
                 : fault_of_grid<TwoShotAllReduce<Float32>>(plan, q);
    case Algorithm::kOneShotAllGather:
    case Algorithm::kBroadcast:
      if ((plan.algorithm == Algorithm::kBroadcast) != (q.collective == Collective::kBroadcast)) {
        return "another collective";
      }
      if (plan.element != q.dtype && plan.element != DType::kInt32) return "another type's kernel";
      if (plan.element != q.dtype && has_reduction(q.dtype, ReduceOp::kAvg)) return "floats have kernels";
      if (!has_reduction(plan.element, ReduceOp::kSum)) return "no such kernel";
      return plan.algorithm == Algorithm::kBroadcast ? fault_of_grid<Broadcast<Float32>>(plan, q)
                                                     : fault_of_grid<OneShotAllGather<Float32>>(plan, q);
    case Algorithm::kInner: break;
  }
  return "no algorithm";
}

TEST(CudaPolicy, keeps_its_promises_for_every_question) {
  std::uint64_t ours = 0;
  for_each_question([&](LaunchQuestion q) {
    for (const std::uint64_t bytes : sizes()) {
      q.bytes = bytes;
      const LaunchPlan plan = plan_launch(q);
      if (const char* fault = fault_of(plan, q)) FAIL() << fault << ": " << text(q);
      ours += plan.algorithm != Algorithm::kInner;
    }
  });
  EXPECT_GT(ours, 100'000u);
}

// From small to large: one-shot, two-shot, the inner engine, and never back; grids that never shrink.
TEST(CudaPolicy, only_ever_goes_up_with_size) {
  for_each_question([&](LaunchQuestion q) {
    LaunchPlan last;
    bool first = true;
    for (const std::uint64_t bytes : sizes()) {
      if (bytes == 0) continue;
      q.bytes = bytes;
      const LaunchPlan plan = plan_launch(q);
      if (!first) {
        const auto rank_of = [](Algorithm algorithm) {
          return algorithm == Algorithm::kInner ? 9 : static_cast<int>(algorithm);
        };
        if (rank_of(plan.algorithm) < rank_of(last.algorithm)) FAIL() << "back to ours: " << text(q);
        if (plan.algorithm == last.algorithm && plan.blocks < last.blocks)
          FAIL() << "fewer blocks: " << text(q);
      }
      last = plan;
      first = false;
    }
  });
}

// Whether some all_reduce kernel can take it.
bool can_be_ours(const LaunchQuestion& q) {
  return q.collective == Collective::kAllReduce && q.bytes > 0 && q.world >= 2 && q.world <= kMaxRanks &&
         q.link != Link::kNone && q.architecture >= 80 && has_reduction(q.dtype, q.op) &&
         TwoShotAllReduce<Float32>::mailbox_bytes(q.bytes, q.world) <= q.half_bytes;
}

TEST(CudaPolicy, does_what_the_flags_ask_wherever_it_fits) {
  for_each_question([&](LaunchQuestion q) {
    const bool half = q.dtype == DType::kFloat16 || q.dtype == DType::kBFloat16;
    const bool sums = q.op == ReduceOp::kSum || q.op == ReduceOp::kAvg || q.op == ReduceOp::kProduct;
    const bool asked = q.deterministic || (q.float32_accumulation && half && sums);
    for (const std::uint64_t bytes : sizes()) {
      q.bytes = bytes;
      const LaunchPlan plan = plan_launch(q);
      if (asked && can_be_ours(q) && plan.algorithm == Algorithm::kInner) FAIL() << "not ours: " << text(q);
      // And nothing else: flags that ask for nothing here change nothing.
      if (!asked || q.collective != Collective::kAllReduce) {
        LaunchQuestion plain = q;
        plain.deterministic = plain.float32_accumulation = false;
        if (!(plan_launch(plain) == plan)) FAIL() << "changed by a flag: " << text(q);
      }
    }
  });
}

TEST(CudaPolicy, depends_on_nothing_but_the_question) {
  std::vector<LaunchQuestion> questions;
  std::vector<LaunchPlan> plans;
  std::uint64_t number = 0;
  for_each_question([&](LaunchQuestion q) {
    if (++number % 101 != 0) return;
    q.bytes = sizes()[number % sizes().size()];
    questions.push_back(q);
    plans.push_back(plan_launch(q));
  });
  ASSERT_EQ(setenv("FCCL_CUDA_DETERMINISTIC", "1", 1), 0);
  for (std::size_t i = questions.size(); i-- > 0;) {
    ASSERT_EQ(plan_launch(questions[i]), plans[i]) << text(questions[i]);
  }
  unsetenv("FCCL_CUDA_DETERMINISTIC");
}

TEST(CudaPolicy, other_collectives_are_the_inner_engines) {
  for (std::uint8_t collective = 0; collective < kCollectiveCount; ++collective) {
    LaunchQuestion q{static_cast<Collective>(collective),
                     ReduceOp::kSum,
                     DType::kFloat32,
                     1024,
                     4,
                     Link::kNvlink,
                     90,
                     132,
                     16 * MiB};
    const bool ours = std::find(std::begin(kOurs), std::end(kOurs), q.collective) != std::end(kOurs);
    EXPECT_EQ(plan_launch(q).algorithm != Algorithm::kInner, ours) << text(q);
  }
}

TEST(CudaPolicy, bears_nonsense) {
  const LaunchQuestion good{
      Collective::kAllReduce, ReduceOp::kSum, DType::kFloat32, 1024, 4, Link::kNvlink, 90, 132, 16 * MiB};
  ASSERT_NE(plan_launch(good).algorithm, Algorithm::kInner);
  const auto expect_inner = [&](auto&& change) {
    LaunchQuestion q = good;
    change(q);
    EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kInner) << text(q);
  };
  expect_inner([](LaunchQuestion& q) { q.bytes = ~std::uint64_t{0}; });
  expect_inner([](LaunchQuestion& q) { q.bytes = q.half_bytes = ~std::uint64_t{0} - 3; });
  expect_inner([](LaunchQuestion& q) {
    q.bytes = q.half_bytes = ~std::uint64_t{0} - 3;
    q.deterministic = true;
  });
  expect_inner([](LaunchQuestion& q) { q.half_bytes = 0; });
  expect_inner([](LaunchQuestion& q) { q.sm_count = 0; });
  expect_inner([](LaunchQuestion& q) { q.sm_count = -1; });
  expect_inner([](LaunchQuestion& q) { q.world = 0; });
  expect_inner([](LaunchQuestion& q) { q.world = -4; });
  expect_inner([](LaunchQuestion& q) { q.architecture = 0; });
  expect_inner([](LaunchQuestion& q) { q.link = static_cast<Link>(7); });
  expect_inner([](LaunchQuestion& q) { q.dtype = static_cast<DType>(200); });
  expect_inner([](LaunchQuestion& q) { q.op = static_cast<ReduceOp>(200); });
}

// ---- Answers one by one ----

LaunchQuestion all_reduce(std::uint64_t bytes, int world, Link link, int architecture) {
  return {Collective::kAllReduce,
          ReduceOp::kSum,
          DType::kBFloat16,
          bytes,
          world,
          link,
          architecture,
          132,
          64 * MiB};
}

TEST(CudaPolicy, small_and_large_on_nvlink) {
  const LaunchPlan tiny = plan_launch(all_reduce(4, 8, Link::kNvlink, 90));
  EXPECT_EQ(tiny.algorithm, Algorithm::kOneShotAllReduce);
  EXPECT_EQ(tiny.element, DType::kBFloat16);
  EXPECT_EQ(tiny.blocks, 1u);
  EXPECT_EQ(tiny.threads, 32u);
  const LaunchPlan small = plan_launch(all_reduce(64 * KiB, 8, Link::kNvlink, 90));
  EXPECT_EQ(small.algorithm, Algorithm::kOneShotAllReduce);
  EXPECT_EQ(small.blocks, 8u);  // 4096 vectors
  EXPECT_EQ(small.threads, 512u);
  const LaunchPlan medium = plan_launch(all_reduce(1 * MiB, 8, Link::kNvlink, 90));
  EXPECT_EQ(medium.algorithm, Algorithm::kTwoShotAllReduce);
  EXPECT_EQ(medium.blocks, 16u);  // 8192 vectors of a shard
  EXPECT_EQ(plan_launch(all_reduce(2 * MiB, 8, Link::kNvlink, 90)).algorithm, Algorithm::kTwoShotAllReduce);
  EXPECT_EQ(plan_launch(all_reduce(2 * MiB + 2, 8, Link::kNvlink, 90)).algorithm, Algorithm::kInner);
}

TEST(CudaPolicy, small_and_large_on_pcie) {
  EXPECT_EQ(plan_launch(all_reduce(32 * KiB, 4, Link::kPcie, 86)).algorithm, Algorithm::kOneShotAllReduce);
  EXPECT_EQ(plan_launch(all_reduce(32 * KiB + 16, 4, Link::kPcie, 86)).algorithm,
            Algorithm::kTwoShotAllReduce);
  EXPECT_EQ(plan_launch(all_reduce(128 * KiB, 4, Link::kPcie, 86)).blocks, 4u);
  EXPECT_EQ(plan_launch(all_reduce(128 * KiB + 16, 4, Link::kPcie, 86)).algorithm, Algorithm::kInner);
  EXPECT_EQ(plan_launch(all_reduce(256 * KiB, 2, Link::kPcie, 86)).blocks, 8u);  // no more on PCIe
}

TEST(CudaPolicy, averages_go_further) {
  LaunchQuestion q = all_reduce(256 * KiB, 4, Link::kPcie, 86);
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kInner);
  q.op = ReduceOp::kAvg;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kTwoShotAllReduce);
  q.bytes += 2;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kInner);
}

TEST(CudaPolicy, two_shot_where_one_shot_does_not_fit) {
  LaunchQuestion q = all_reduce(64 * KiB, 8, Link::kNvlink, 90);
  q.half_bytes = 512 * KiB;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kOneShotAllReduce);
  q.half_bytes -= 16;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kTwoShotAllReduce);
  q.half_bytes = 128 * KiB;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kTwoShotAllReduce);
  q.half_bytes -= 16;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kInner);
  EXPECT_STREQ(plan_launch(q).reason, "larger than the workspace");
}

TEST(CudaPolicy, moves_take_any_type) {
  LaunchQuestion q = all_reduce(1000, 4, Link::kPcie, 86);
  q.collective = Collective::kAllGather;
  q.dtype = DType::kBool;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kOneShotAllGather);
  EXPECT_EQ(plan_launch(q).element, DType::kInt32);
  q.collective = Collective::kBroadcast;
  q.dtype = DType::kFloat16;
  EXPECT_EQ(plan_launch(q).algorithm, Algorithm::kBroadcast);
  EXPECT_EQ(plan_launch(q).element, DType::kFloat16);
}

TEST(CudaPolicy, few_multiprocessors_few_blocks) {
  LaunchQuestion q = all_reduce(1 * MiB, 2, Link::kNvlink, 90);
  EXPECT_EQ(plan_launch(q).blocks, 33u);
  q.sm_count = 20;
  EXPECT_EQ(plan_launch(q).blocks, 5u);
}

TEST(CudaPolicy, has_names) {
  for (const Algorithm algorithm :
       {Algorithm::kInner, Algorithm::kOneShotAllReduce, Algorithm::kTwoShotAllReduce,
        Algorithm::kOneShotAllGather, Algorithm::kBroadcast}) {
    EXPECT_STRNE(name_of(algorithm), "unknown");
  }
  EXPECT_STREQ(name_of(static_cast<Algorithm>(99)), "unknown");
  for (const Link link : kLinks) EXPECT_STRNE(name_of(link), "unknown");
}

}  // namespace
}  // namespace fccl::cuda
