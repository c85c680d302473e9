// Negative controls: with one fault in the protocol, seeded runs go wrong. (test_cuda_collectives.cpp has the
// same runs without a fault.) And what the kernels do when a peer does not come, or makes another call.
#include <gtest/gtest.h>

#include "cuda/faults.h"
#include "cuda/world.h"

namespace fccl::cuda {
namespace {

using host::Call;
using host::Kind;
using host::Launcher;
using host::Tensors;
using host::World;

constexpr std::size_t kHalfBytes = 64 << 10;

// Small grids and large ones by turns.
std::vector<Call> calls_of(std::uint64_t seed, int size) {
  std::vector<Call> calls = host::random_calls(seed, size, 40, 200);
  for (std::size_t i = 0; i < calls.size(); ++i) calls[i].blocks = i % 2 == 0 ? 3 : 1;
  return calls;
}

// Of `seeds` runs, how many ended in a wrong result, a failure or a standstill.
template <class Faults>
int wrong_runs(int seeds) {
  int wrong = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    const int size = 2 + seed % 3;
    const World world(size, kHalfBytes);
    Launcher launcher(size, static_cast<std::uint64_t>(seed), 200'000);
    std::vector<std::vector<std::unique_ptr<Tensors<Float32>>>> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(host::add_calls<Float32, Faults>(launcher, rank, world, rank,
                                                       calls_of(static_cast<std::uint64_t>(seed), size)));
    }
    bool right = true;
    try {
      launcher.run();
    } catch (const std::runtime_error&) {
      right = false;
    }
    for (const auto& all : ranks) {
      for (const auto& tensors : all) right = right && tensors->complaint().empty();
    }
    wrong += right ? 0 : 1;
  }
  return wrong;
}

TEST(CudaFaults, a_right_protocol_is_never_wrong) { EXPECT_EQ(wrong_runs<NoFaults>(30), 0); }
TEST(CudaFaults, waiting_for_no_flag_is_found) { EXPECT_EQ(wrong_runs<host::NoFlagWait>(30), 30); }
TEST(CudaFaults, a_flag_without_release_is_found) { EXPECT_GE(wrong_runs<host::RelaxedFlag>(30), 25); }
TEST(CudaFaults, a_flag_before_the_sync_is_found) { EXPECT_GE(wrong_runs<host::NoSyncBeforeFlag>(30), 25); }
TEST(CudaFaults, a_single_mailbox_is_found) { EXPECT_GE(wrong_runs<host::OneMailbox>(30), 25); }
TEST(CudaFaults, counters_per_block_are_found) { EXPECT_GE(wrong_runs<host::PerBlockCounters>(30), 25); }

// ---- Failures ----

template <class Element>
bool is_poison(const typename Tensors<Element>::Stored& stored) {
  if constexpr (sizeof(stored) == 2) {
    return stored == host::HostElement<Element>::make(std::nan(""));
  } else {
    return std::isnan(stored);
  }
}

std::vector<Call> one_of_each(ReduceOp op) {
  std::vector<Call> calls;
  for (const Kind kind : {Kind::kOneShot, Kind::kTwoShot, Kind::kAllGather, Kind::kBroadcast}) {
    Call call;
    call.kind = kind;
    call.op = op;
    call.count = 50;
    call.blocks = 2;
    calls.push_back(call);
  }
  return calls;
}

template <class Element>
class CudaFailures : public testing::Test {
 protected:
  static constexpr std::uint64_t kTimeout = 300'000;  // nanoseconds of the seeded clock

  // Rank `rank`'s launch of `call`, with a timeout.
  static std::unique_ptr<Tensors<Element>> add(Launcher& launcher, const World& world, int rank,
                                               const Call& call) {
    auto tensors = std::make_unique<Tensors<Element>>(call, rank, world.size());
    host::add_call<Element>(launcher, rank,
                            world.session(rank, host::description_of(call, Element::kDType), kTimeout), call,
                            *tensors);
    return tensors;
  }
  static bool all_poison(const Call& call, Tensors<Element>& tensors, int world) {
    const std::size_t count =
        call.count * static_cast<std::size_t>(call.kind == Kind::kAllGather ? world : 1);
    for (std::size_t i = 0; i < count; ++i) {
      if (!is_poison<Element>(tensors.output()[i])) return false;
    }
    return true;
  }
};
using FloatElements = testing::Types<Float32, Float64, Float16, BFloat16>;
TYPED_TEST_SUITE(CudaFailures, FloatElements);

TYPED_TEST(CudaFailures, a_missing_rank_is_named_and_the_output_poisoned) {
  for (const Call& call : one_of_each(ReduceOp::kSum)) {
    const World world(3, kHalfBytes);
    Launcher launcher(3, 1);
    const auto first = this->add(launcher, world, 0, call);
    const auto second = this->add(launcher, world, 1, call);
    EXPECT_EQ(launcher.run(), 0);
    int named = 0;
    for (const int rank : {0, 1}) {
      const Status& status = world.status(rank);
      if (status.failure == static_cast<std::uint32_t>(Failure::kExpired)) {
        EXPECT_EQ(status.peer, 2u);
        ++named;
      } else {
        EXPECT_EQ(status.failure, static_cast<std::uint32_t>(Failure::kAborted)) << "told by the other";
        EXPECT_EQ(status.peer, static_cast<std::uint32_t>(1 - rank));
      }
      EXPECT_EQ(status.generation, 1u);
      EXPECT_EQ(status.mine, host::description_of(call, TypeParam::kDType));
    }
    EXPECT_GE(named, 1);
    EXPECT_TRUE(this->all_poison(call, *first, 3)) << call.text();
    EXPECT_TRUE(this->all_poison(call, *second, 3)) << call.text();

    // The one who comes late sees at once that the others gave up, and so does everybody's next call.
    Launcher later(3, 2);
    const auto late = this->add(later, world, 2, call);
    const auto next = this->add(later, world, 0, call);
    EXPECT_EQ(later.run(), 0);
    EXPECT_EQ(world.status(2).failure, static_cast<std::uint32_t>(Failure::kAborted));
    EXPECT_LT(world.status(2).peer, 2u);
    EXPECT_TRUE(this->all_poison(call, *late, 3)) << call.text();
    EXPECT_TRUE(this->all_poison(call, *next, 3)) << call.text();
  }
}

TYPED_TEST(CudaFailures, calls_that_do_not_fit_are_both_named) {
  for (const Call& call : one_of_each(ReduceOp::kSum)) {
    Call other = call;
    other.count = call.count + 1;
    other.blocks = 1;  // and so another grid: a block that has no counterpart must not wait for its deadline
    const World world(2, kHalfBytes);
    Launcher launcher(2, 3);
    const auto mine = this->add(launcher, world, 0, call);
    const auto theirs = this->add(launcher, world, 1, other);
    EXPECT_EQ(launcher.run(), 0);
    int named = 0;
    for (const int rank : {0, 1}) {
      const Status& status = world.status(rank);
      EXPECT_NE(status.failure, static_cast<std::uint32_t>(Failure::kNone));
      EXPECT_NE(status.failure, static_cast<std::uint32_t>(Failure::kExpired));
      if (status.failure != static_cast<std::uint32_t>(Failure::kMismatch)) continue;
      ++named;
      const std::uint64_t a = host::description_of(call, TypeParam::kDType);
      const std::uint64_t b = host::description_of(other, TypeParam::kDType);
      EXPECT_EQ(status.mine, rank == 0 ? a : b);
      EXPECT_EQ(status.theirs, rank == 0 ? b : a);
      EXPECT_EQ(status.peer, static_cast<std::uint32_t>(1 - rank));
    }
    EXPECT_GE(named, 1);
    EXPECT_TRUE(is_poison<TypeParam>(mine->output()[0])) << call.text();
    EXPECT_TRUE(is_poison<TypeParam>(theirs->output()[0])) << call.text();
  }
}

TEST(CudaFailuresOfIntegers, end_the_context) {
  for (const Call& call : one_of_each(ReduceOp::kSum)) {
    const World world(2, kHalfBytes);
    Launcher launcher(2, 1);
    Tensors<Int32> tensors(call, 0, 2);
    host::add_call<Int32>(launcher, 0, world.session(0, 1, 300'000), call, tensors);
    EXPECT_EQ(launcher.run(), 1) << call.text();
    EXPECT_EQ(world.status(0).failure, static_cast<std::uint32_t>(Failure::kExpired)) << "told before";
    EXPECT_EQ(world.control(1).abort, 1u);
  }
}

// The host's own abort() sets the word as a peer would.
TEST(CudaFailuresOfHosts, an_abort_ends_a_wait) {
  const World world(2, kHalfBytes);
  Call call;
  call.count = 50;
  Tensors<Float32> tensors(call, 0, 2);
  Launcher launcher(2, 1);
  host::add_call<Float32>(launcher, 0, world.session(0), call, tensors);
  launcher.add(1, {1, 1, 0, [&] { store_relaxed(&world.control(0).abort, 1u); }, {}});
  EXPECT_EQ(launcher.run(), 0);
  EXPECT_EQ(world.status(0).failure, static_cast<std::uint32_t>(Failure::kAborted));
  EXPECT_TRUE(std::isnan(tensors.output()[0]));
}

}  // namespace
}  // namespace fccl::cuda
