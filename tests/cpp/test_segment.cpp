// Shared memory by descriptor, and what is refused.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

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

TEST(Segment, LargeOnesLieWhereLargePagesCan) {
  const Segment segment = Segment::reserve(3 * kLargePage + 1);
  const Segment mapped = Segment::open(segment.descriptor(), segment.size());
  for (const Segment* each : {&segment, &mapped}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(each->data()) % kLargePage, 0U);
  }
}

// In KiB, over all mappings of this process's memfds: what a name in /proc/self/smaps stands for.
std::size_t mapped_kib(const std::string& what) {
  std::ifstream smaps("/proc/self/smaps");
  std::size_t sum = 0;
  bool ours = false;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name.back() != ':') ours = line.find("/memfd:fccl") != std::string::npos;
    std::size_t kib = 0;
    if (ours && name == what + ":" && words >> kib) sum += kib;
  }
  return sum;
}

// Touched rather than allocated, which works with small pages as well; and what is no whole large page,
// allocated.
TEST(Segment, HasMemoryWhicheverWayItIsPutThere) {
  for (const std::size_t offset : {std::size_t{0}, kLargePage, kLargePage + 4096}) {
    for (const std::size_t size : {2 * kLargePage + 4096, kLargePage, std::size_t{4096}}) {
      for (const LargePages offer : {LargePages::kNever, LargePages::kOnAdvice, LargePages::kByItself}) {
        Segment segment = Segment::reserve(8 * kLargePage);
        ASSERT_EQ(segment.put_memory(offset, size, offer), 0);
        struct stat info{};
        ASSERT_EQ(::fstat(segment.descriptor().get(), &info), 0);
        const std::size_t held = static_cast<std::size_t>(info.st_blocks) * 512;
        EXPECT_GE(held, size);
        if (large_pages() == LargePages::kNever) {
          EXPECT_EQ(held, size);
        }
        for (std::size_t at = offset; at < offset + size; at += 4096)
          ASSERT_EQ(segment.data()[at], std::byte{0}) << at;
      }
    }
  }
}

TEST(Segment, LiesOnLargePagesWhereTheSystemOffersThem) {
  if (large_pages() == LargePages::kNever) GTEST_SKIP() << "this system does not";
  Segment segment = Segment::reserve(8 * kLargePage);
  segment.allocate(0, 2 * kLargePage + 4096);
  const Segment mapped = Segment::open(segment.descriptor(), segment.size());
  std::memset(segment.data(), 1, 2 * kLargePage);
  EXPECT_EQ(mapped.data()[kLargePage], std::byte{1});
  EXPECT_GE(mapped_kib("ShmemPmdMapped"), 3 * kLargePage / 1024)
      << "two of ours, and one that the peer has read";
}

TEST(Environment, ReadsWhichPagesSharedMemoryMayHave) {
  const std::string folder = testing::TempDir() + "fccl-pages-" + std::to_string(::getpid());
  const std::filesystem::path of_size = folder + "/hugepages-2048kB";
  const auto write = [](const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
  };
  EXPECT_EQ(large_pages(folder), LargePages::kNever) << "a kernel without";
  const std::string all = folder + "/shmem_enabled";
  write(all, "always within_size advise [never] deny force");
  EXPECT_EQ(large_pages(folder), LargePages::kNever);
  write(all, "always within_size [advise] never deny force");
  EXPECT_EQ(large_pages(folder), LargePages::kOnAdvice);
  write(all, "[always] within_size advise never deny force");
  EXPECT_EQ(large_pages(folder), LargePages::kByItself);
  write(of_size / "shmem_enabled", "always [inherit] within_size advise never");
  EXPECT_EQ(large_pages(folder), LargePages::kByItself);
  write(of_size / "shmem_enabled", "always inherit within_size [advise] never");
  EXPECT_EQ(large_pages(folder), LargePages::kOnAdvice);
  write(all, "always within_size advise never [deny] force");
  EXPECT_EQ(large_pages(folder), LargePages::kNever);
  write(all, "garbage ] and [");
  write(of_size / "shmem_enabled", "");
  EXPECT_EQ(large_pages(folder), LargePages::kNever);
  std::filesystem::remove_all(folder);
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
