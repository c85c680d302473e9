// Which instruction set is chosen, and that its table holds a kernel wherever one is defined.
#include "cpu/kernels/dispatch.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace fccl::cpu {
namespace {

constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

Isa best_isa() {
  Isa best = Isa::kPortable;
  for (const Isa isa : kIsas) {
    if (isa_available(isa)) best = isa;
  }
  return best;
}

TEST(Dispatch, without_a_request_the_best_set_is_used) {
  for (const Isa best : kIsas) {
    for (const char* unset : {static_cast<const char*>(nullptr), ""}) {
      const IsaChoice choice = choose_isa(unset, best);
      EXPECT_EQ(choice.isa, best);
      EXPECT_EQ(choice.warning, "");
    }
  }
}

TEST(Dispatch, an_available_set_can_be_requested) {
  for (const Isa best : kIsas) {
    for (const Isa isa : kIsas) {
      const IsaChoice choice = choose_isa(name_of(isa), best);
      EXPECT_EQ(choice.isa, isa <= best ? isa : best);
      EXPECT_EQ(choice.warning.empty(), isa <= best);
    }
  }
  EXPECT_EQ(choose_isa("avx512", Isa::kAvx2).warning,
            "fccl: FCCL_ISA=avx512 is not available in this build or on this CPU; using avx2");
}

TEST(Dispatch, an_unknown_request_is_named_in_the_warning) {
  const IsaChoice choice = choose_isa("AVX9", Isa::kAvx2);
  EXPECT_EQ(choice.isa, Isa::kAvx2);
  EXPECT_EQ(choice.warning, "fccl: FCCL_ISA=AVX9 is not one of portable, avx2, avx512; using avx2");
}

// CTest runs this once for each value of FCCL_ISA, each in a process of its own.
TEST(Dispatch, selected_isa_follows_the_environment) {
  const char* requested = std::getenv("FCCL_ISA");
  EXPECT_EQ(selected_isa(), choose_isa(requested, best_isa()).isa);
  EXPECT_TRUE(isa_available(selected_isa()));
  EXPECT_TRUE(isa_available(Isa::kPortable));
  EXPECT_FALSE(isa_available(static_cast<Isa>(200)));
}

TEST(Dispatch, names) {
  EXPECT_STREQ(name_of(Isa::kPortable), "portable");
  EXPECT_STREQ(name_of(Isa::kAvx2), "avx2");
  EXPECT_STREQ(name_of(Isa::kAvx512), "avx512");
}

TEST(Kernels, find_reduce_agrees_with_can_reduce) {
  for (int d = 0; d < 256; ++d) {
    for (int o = 0; o < 256; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      const bool defined = can_reduce(dtype, op);
      ASSERT_EQ(find_reduce(dtype, op) != nullptr, defined) << name_of(dtype) << " " << name_of(op);
      ASSERT_EQ(find_reduce(dtype, op), find_reduce(selected_isa(), dtype, op));
      for (const Isa isa : kIsas) {
        ASSERT_EQ(find_reduce(isa, dtype, op) != nullptr, defined && isa_available(isa));
      }
    }
  }
}

}  // namespace
}  // namespace fccl::cpu
