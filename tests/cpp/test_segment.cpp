// Shared memory by descriptor, and what is refused.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "common/error.h"
#include "cpu/environment.h"
#include "cpu/layout.h"
#include "cpu/segment.h"
#include "cpu/tuning.h"

namespace fccl::cpu {
namespace {

TEST(Segment, TwoMappingsShowTheSameZeroedMemory) {
  const Segment segment = Segment::create(100000);
  const Segment mapped = Segment::open(segment.descriptor(), segment.size());
  for (std::size_t i = 0; i < segment.size(); ++i) ASSERT_EQ(mapped.data()[i], std::byte{0});
  segment.data()[99999] = std::byte{7};
  EXPECT_EQ(mapped.data()[99999], std::byte{7});
}

TEST(Segment, APeersMemoryCannotBeWritten) {
  const Segment segment = Segment::create(4096);
  const Segment mapped = Segment::open(segment.descriptor(), segment.size());
  EXPECT_EXIT(mapped.data()[0] = std::byte{1}, testing::KilledBySignal(SIGSEGV), "");
}

TEST(Segment, CannotBeShrunkOrGrown) {
  const Segment segment = Segment::create(8192);
  EXPECT_NE(::ftruncate(segment.descriptor().get(), 4096), 0);
  EXPECT_NE(::ftruncate(segment.descriptor().get(), 16384), 0);
}

TEST(Segment, RefusesWhatAStrangerMightSend) {
  const Segment segment = Segment::create(8192);
  EXPECT_THROW(Segment::open(segment.descriptor(), 4096), Error) << "another size";
  const Descriptor unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 8192), 0);
  EXPECT_THROW(Segment::open(unsealed, 8192), Error) << "not sealed";
  const Descriptor null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_THROW(Segment::open(null, 8192), Error) << "not a memfd";
  EXPECT_THROW(Segment::open(Descriptor(), 8192), Error) << "no descriptor";
}

TEST(Segment, RefusesMoreThanThereIs) { EXPECT_THROW(Segment::create(available_memory()), Error); }

TEST(Segment, MovesWithoutLosingOrDoublingTheMapping) {
  Segment a = Segment::create(4096);
  std::byte* data = a.data();
  Segment b = std::move(a);
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(b.data(), data);
  a = std::move(b);
  EXPECT_EQ(a.data(), data);
}

TEST(Geometry, SlotsDoNotOverlapAndFitForAnyNumberOfRanks) {
  for (int ranks = 2; ranks <= 300; ++ranks) {
    const Geometry g = geometry_for(ranks);
    EXPECT_EQ(g.chunk_bytes % kLine, 0U);
    EXPECT_GE(g.chunk_bytes, g.piece_bytes * static_cast<std::uint32_t>(ranks)) << ranks;
    EXPECT_GE(g.lane_control_offset(0), sizeof(Control));
    EXPECT_EQ(g.one_shot_offset(0), g.lane_control_offset(ranks - 1) + sizeof(LaneControl));
    EXPECT_EQ(g.one_shot_offset(1), g.one_shot_offset(0) + g.one_shot_bytes);
    EXPECT_EQ(g.staging_offset(0), g.one_shot_offset(1) + g.one_shot_bytes);
    for (std::uint64_t k = 1; k < g.depth; ++k) {
      EXPECT_EQ(g.staging_offset(k), g.staging_offset(k - 1) + g.chunk_bytes);
      EXPECT_EQ(g.result_offset(k), g.result_offset(k - 1) + g.piece_bytes);
    }
    EXPECT_EQ(g.staging_offset(g.depth), g.staging_offset(0)) << "slots repeat after depth";
    EXPECT_EQ(g.result_offset(0), g.staging_offset(g.depth - 1) + g.chunk_bytes);
    EXPECT_GE(g.lane_offset(0), g.result_offset(g.depth - 1) + g.piece_bytes);
    EXPECT_EQ(g.one_shot_offset(0) + g.slot_bytes(), g.result_offset(g.depth - 1) + g.piece_bytes);
    EXPECT_EQ(g.segment_bytes(), g.lane_offset(ranks - 1) + kLaneBytes);
  }
}

TEST(Environment, IsPlausible) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_GT(available_memory(), std::size_t{1} << 20);
  EXPECT_EQ(boot_id().size(), 36U);
  EXPECT_NE(random_u64(), random_u64());
}

TEST(Environment, ForksAreCounted) {
  const std::uint32_t before = fork_generation();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(fork_generation() == before + 1 ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(fork_generation(), before);
}

}  // namespace
}  // namespace fccl::cpu
