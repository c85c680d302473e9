// What ranks want of a group's CUDA tensors, and what follows for all of them.
#include "cuda/wishes.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fccl::cuda {
namespace {

Wishes usual() {
  Wishes wishes;
  wishes.inner = InnerEngine::kNccl;
  wishes.has_kernels = true;
  wishes.wants_kernels = true;
  return wishes;
}

SettledWishes settle(const std::vector<Wishes>& all) {
  std::vector<std::uint64_t> words;
  for (const Wishes& each : all) words.push_back(each.pack());
  return settle_wishes(words);
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(GpuWishes, come_back_from_a_word) {
  for (unsigned bits = 0; bits < 32; ++bits) {
    for (const auto inner : {InnerEngine::kNone, InnerEngine::kNccl, InnerEngine::kGloo}) {
      const Wishes wishes{inner,           (bits & 1) != 0, (bits & 2) != 0,
                          (bits & 4) != 0, (bits & 8) != 0, (bits & 16) != 0};
      EXPECT_EQ(Wishes::unpack(wishes.pack()), wishes);
    }
  }
}

TEST(GpuWishes, of_any_word_are_some) {
  EXPECT_EQ(Wishes::unpack(0), Wishes{});  // a rank that says nothing wants nothing
  std::mt19937_64 random(7);
  for (int i = 0; i < 10'000; ++i) {
    const Wishes wishes = Wishes::unpack(random() | (i % 2 == 0 ? std::uint64_t{0xFC} << 56 : 0));
    EXPECT_LE(static_cast<int>(wishes.inner), static_cast<int>(InnerEngine::kGloo));
    EXPECT_EQ(Wishes::unpack(wishes.pack()), wishes);
  }
}

TEST(GpuWishes, all_want_kernels) {
  const SettledWishes settled = settle({usual(), usual(), usual()});
  EXPECT_EQ(settled.why_no_kernels, "");
  EXPECT_EQ(settled.why_no_collectives, "");
  EXPECT_EQ(settled.why_no_messages, "");
  EXPECT_EQ(settled.not_unanimous, "");
  EXPECT_TRUE(settled.somebody_wants_kernels);
}

TEST(GpuWishes, nobody_wants_kernels) {
  Wishes none = usual();
  none.wants_kernels = false;
  none.deterministic = true;
  const SettledWishes settled = settle({none, none});
  EXPECT_EQ(settled.why_no_kernels, "FCCL_CUDA_KERNELS is not 1");
  EXPECT_FALSE(settled.somebody_wants_kernels);
}

TEST(GpuWishes, one_rank_that_does_not_want_kernels_is_named) {
  Wishes other = usual();
  other.wants_kernels = false;
  const SettledWishes settled = settle({usual(), other, usual(), other});
  EXPECT_EQ(settled.why_no_kernels,
            "FCCL_CUDA_KERNELS is 1 on ranks 0 and 2 and not on ranks 1 and 3; all ranks must ask for them");
  EXPECT_TRUE(settled.somebody_wants_kernels);
}

TEST(GpuWishes, a_build_without_kernels_is_named) {
  Wishes other = usual();
  other.has_kernels = false;
  EXPECT_EQ(settle({usual(), usual(), other}).why_no_kernels,
            "the build of fccl on rank 2 has no CUDA kernels");
}

TEST(GpuWishes, inner_engines_that_differ_carry_nothing) {
  Wishes other = usual();
  other.inner = InnerEngine::kGloo;
  const SettledWishes settled = settle({usual(), other, usual()});
  EXPECT_TRUE(has(settled.why_no_collectives,
                  "FCCL_CUDA_INNER is gloo on rank 1 and nccl, the default, on ranks 0 and 2"));
  EXPECT_EQ(settled.why_no_messages, settled.why_no_collectives);
}

TEST(GpuWishes, a_rank_without_a_gpu_leaves_messages_to_the_others) {
  Wishes other = usual();
  other.inner = InnerEngine::kNone;
  const SettledWishes settled = settle({usual(), other, usual()});
  EXPECT_TRUE(has(settled.why_no_collectives, "rank 1 cannot carry CUDA tensors by NCCL"));
  EXPECT_EQ(settled.why_no_messages, "");
  // Where no rank has any, each says so in its own words.
  EXPECT_EQ(settle({other, other}).why_no_collectives, "");
}

TEST(GpuWishes, what_only_some_ask_for_is_said) {
  Wishes other = usual();
  other.deterministic = true;
  other.may_share_gpu = true;
  const SettledWishes settled = settle({usual(), other});
  EXPECT_EQ(settled.why_no_kernels, "");
  EXPECT_EQ(settled.not_unanimous,
            "FCCL_CUDA_DETERMINISTIC is 1 on rank 1 and not on rank 0; "
            "FCCL_CUDA_SHARED_GPU is 1 on rank 1 and not on rank 0");
}

}  // namespace
}  // namespace fccl::cuda
