// The time of a cache line from core to core.
#include <gtest/gtest.h>
#include <sched.h>

#include "cpu/handover.h"

namespace fccl::cpu {
namespace {

// Gives the thread its cores back at the end.
class OnCores {
 public:
  OnCores() { ::sched_getaffinity(0, sizeof(all_), &all_); }
  ~OnCores() { ::sched_setaffinity(0, sizeof(all_), &all_); }
  int count() const { return CPU_COUNT(&all_); }
  void only_first() const {
    cpu_set_t one;
    CPU_ZERO(&one);
    std::size_t core = 0;
    while (!CPU_ISSET(core, &all_)) ++core;
    CPU_SET(core, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
  }

 private:
  cpu_set_t all_{};
};

TEST(Handover, TakesWhatSuchThingsTakeAndLeavesTheCallerItsCores) {
  const OnCores cores;
  if (cores.count() < 2) GTEST_SKIP() << "one core";
  const auto found = measure_handover();
  ASSERT_TRUE(found);
  EXPECT_GT(found->nearest_ns, 1.0) << "nothing is faster than light";
  EXPECT_LE(found->nearest_ns, found->farthest_ns);
  EXPECT_LT(found->farthest_ns, 100'000.0);
  EXPECT_EQ(OnCores().count(), cores.count());
}

TEST(Handover, IsNotToBeHadOnOneCore) {
  const OnCores cores;
  cores.only_first();
  EXPECT_FALSE(measure_handover());
}

}  // namespace
}  // namespace fccl::cpu
