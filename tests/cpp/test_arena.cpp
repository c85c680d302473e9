// The arena by itself: blocks, memory under them, limits, quarantine, forks.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "common/error.h"
#include "cpu/arena.h"
#include "cpu/environment.h"

namespace fccl::cpu {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

// Where the kernel takes large pages by itself it holds more than was asked for.
#define SKIP_UNLESS_PAGES_ARE_SMALL() \
  if (large_pages() == LargePages::kByItself) GTEST_SKIP() << "large pages by the system"

// Memory that the kernel holds for it, in bytes.
std::uint64_t resident(const Arena& arena) {
  struct stat info{};
  EXPECT_EQ(::fstat(arena.memory().descriptor().get(), &info), 0);
  return static_cast<std::uint64_t>(info.st_blocks) * 512;
}

TEST(Arena, ReservesAddressesAndTakesMemoryForBlocksOnly) {
  SKIP_UNLESS_PAGES_ARE_SMALL();
  Arena arena(1024 * kMiB);
  EXPECT_EQ(resident(arena), 0U);
  std::byte* block = arena.allocate(3 * kMiB + 1, "test");
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(resident(arena), 3 * kMiB + 4096) << "whole pages, before any is touched";
  std::memset(block, 1, 3 * kMiB + 1);
  const ArenaStats stats = arena.stats();
  EXPECT_EQ(stats.capacity, 1024 * kMiB);
  EXPECT_EQ(stats.in_use, 3 * kMiB + 4096);
  EXPECT_EQ(stats.blocks, 1U);
  EXPECT_EQ(stats.by_owner.at("test"), 3 * kMiB + 4096);
}

TEST(Arena, FreedBlocksServeTheNextOfTheirSizeAndAreThenGivenBack) {
  SKIP_UNLESS_PAGES_ARE_SMALL();
  Arena arena(4096 * kMiB);
  std::byte* first = arena.allocate(kMiB, "a");
  arena.free(first);
  EXPECT_EQ(arena.stats().cached, kMiB);
  EXPECT_EQ(arena.stats().by_owner.size(), 0U);
  EXPECT_EQ(resident(arena), kMiB);
  EXPECT_EQ(arena.allocate(kMiB, "b"), first);
  EXPECT_EQ(resident(arena), kMiB);
  arena.free(first);
  arena.release_cached();
  EXPECT_EQ(resident(arena), 0U);
  EXPECT_EQ(arena.stats().cached, 0U);
  // What is cached in all is bounded.
  std::vector<std::byte*> blocks;
  for (std::uint64_t i = 0; i < Arena::kCacheLimit / kMiB + 10; ++i)
    blocks.push_back(arena.allocate(kMiB, "many"));
  for (std::byte* block : blocks) arena.free(block);
  EXPECT_EQ(resident(arena), Arena::kCacheLimit);
  EXPECT_EQ(arena.stats().peak, Arena::kCacheLimit + 10 * kMiB);
}

TEST(Arena, WhatDoesNotFitIsRefusedAndNothingIsLost) {
  Arena arena(16 * kMiB);
  EXPECT_EQ(arena.allocate(17 * kMiB, "test"), nullptr);
  EXPECT_EQ(arena.allocate(~std::size_t{0}, "test"), nullptr);
  std::byte* block = arena.allocate(12 * kMiB, "test");
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(arena.allocate(8 * kMiB, "test"), nullptr);
  EXPECT_EQ(arena.stats().refused, 3U);
  arena.free(block);
  // The cached 12 MiB make room for another size.
  block = arena.allocate(16 * kMiB, "test");
  EXPECT_NE(block, nullptr);
  arena.free(block);
}

TEST(Arena, RefusesMoreMemoryThanTheMachineHas) {
  Arena arena(std::uint64_t{1} << 42);
  EXPECT_EQ(arena.allocate(available_memory(), "test"), nullptr);
  EXPECT_EQ(resident(arena), 0U);
}

TEST(Arena, LocatesWhatLiesInItAltogether) {
  Arena arena(16 * kMiB);
  std::byte* block = arena.allocate(kMiB, "test");
  const std::uint64_t offset = arena.locate(block, kMiB);
  EXPECT_EQ(arena.memory().data() + offset, block);
  EXPECT_EQ(arena.locate(block + 100, 4), offset + 100);
  EXPECT_EQ(arena.locate(arena.memory().data() + 16 * kMiB - 4, 4), 16 * kMiB - 4);
  EXPECT_EQ(arena.locate(arena.memory().data() + 16 * kMiB - 4, 5), Description::kNowhere);
  EXPECT_EQ(arena.locate(arena.memory().data() - 1, 4), Description::kNowhere);
  int outside = 0;
  EXPECT_EQ(arena.locate(&outside, sizeof(outside)), Description::kNowhere);
  EXPECT_EQ(arena.locate(nullptr, 4), Description::kNowhere);
}

TEST(Arena, BlocksInQuarantineAreNotHandedOutAgain) {
  Arena arena(16 * kMiB);
  std::byte* block = arena.allocate(kMiB, "test");
  bool over = false;
  const std::array<std::uint64_t, 2> places = {arena.locate(block + 5000, 4), Description::kNowhere};
  arena.quarantine(places, [&] { return over; });
  arena.quarantine(places, [&] { return over; });
  arena.free(block);
  EXPECT_EQ(arena.stats().quarantined, kMiB);
  EXPECT_EQ(arena.stats().in_use, 0U);
  std::byte* other = arena.allocate(kMiB, "test");
  EXPECT_NE(other, block);
  over = true;
  EXPECT_EQ(arena.allocate(kMiB, "test"), block);
  EXPECT_EQ(arena.stats().quarantined, 0U);
}

TEST(Arena, QuarantineMayEndBeforeTheBlockIsFreed) {
  Arena arena(16 * kMiB);
  std::byte* block = arena.allocate(kMiB, "test");
  arena.quarantine(std::array{arena.locate(block, 1)}, [] { return true; });
  EXPECT_EQ(arena.stats().quarantined, 0U);
  arena.free(block);
  EXPECT_EQ(arena.allocate(kMiB, "test"), block);
}

TEST(Arena, AForkedChildLeavesItsParentsAlone) {
  Arena* parents = Arena::of_process();
  ASSERT_NE(parents, nullptr) << Arena::why_none();
  std::byte* block = parents->allocate(kMiB, "parent");
  std::memset(block, 7, kMiB);
  const pid_t child = ::fork();
  if (child == 0) {
    Arena* own = Arena::of_process();
    bool good = own != nullptr && own != parents;
    good = good && parents->allocate(kMiB, "child") == nullptr;
    parents->free(block);
    parents->release_cached();
    good = good && block[kMiB - 1] == std::byte{7};
    std::byte* mine = own->allocate(kMiB, "child");
    good = good && mine != nullptr && parents->locate(mine, kMiB) == Description::kNowhere;
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(block[kMiB - 1], std::byte{7});
  EXPECT_EQ(parents->stats().by_owner.at("parent"), kMiB);
  parents->free(block);
}

TEST(Arena, ThreadsMayShareIt) {
  Arena arena(1024 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      for (int i = 0; i < 200; ++i) {
        const std::size_t size = 1 + static_cast<std::size_t>((i * 7919 + t * 104729) % 50000);
        std::byte* block = arena.allocate(size, "thread");
        std::memset(block, t, size);
        std::this_thread::yield();
        for (std::size_t at = 0; at < size; at += 997) ASSERT_EQ(block[at], std::byte(t));
        arena.free(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena.stats().in_use, 0U);
}

TEST(Arena, SizeComesFromTheEnvironment) {
  const auto size_for = [](const char* value) {
    ::setenv("FCCL_ARENA_SIZE", value, 1);
    const std::uint64_t size = arena_size();
    ::unsetenv("FCCL_ARENA_SIZE");
    return size;
  };
  EXPECT_EQ(size_for("12345"), 12345U);
  EXPECT_EQ(size_for("64K"), 65536U);
  EXPECT_EQ(size_for("3G"), 3ULL << 30);
  EXPECT_EQ(size_for("0"), 0U);
  EXPECT_EQ(size_for("99999999T"), ~std::uint64_t{0});
  EXPECT_EQ(arena_size(), ~std::uint64_t{0});
  for (const char* wrong : {"lots", "8GB", "-1", "1 G", "8g", "99999999999999999999"})
    EXPECT_THROW(size_for(wrong), Error) << wrong;
  ::unsetenv("FCCL_ARENA_SIZE");
}

}  // namespace
}  // namespace fccl::cpu
