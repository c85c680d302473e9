// The bookkeeping of free parts, against a map of single units.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "cpu/block_map.h"

namespace fccl::cpu {
namespace {

TEST(BlockMap, GivesTheSmallestPartThatFitsAtTheLowestAddress) {
  BlockMap map(100);
  EXPECT_EQ(map.take(10), 0U);
  EXPECT_EQ(map.take(30), 10U);
  EXPECT_EQ(map.take(10), 40U);
  EXPECT_EQ(map.take(20), 50U);
  map.give_back(0, 10);
  map.give_back(40, 10);
  EXPECT_EQ(map.take(5), 0U) << "two parts of 10 and one of 30 at the end";
  EXPECT_EQ(map.take(30), 70U);
  EXPECT_EQ(map.take(6), 40U);
  EXPECT_EQ(map.take(6), std::nullopt);
}

TEST(BlockMap, AlignsWhereThereIsRoomForIt) {
  BlockMap map(64);
  EXPECT_EQ(map.take(3), 0U);
  EXPECT_EQ(map.take(16, 16), 16U);
  EXPECT_EQ(map.take(13), 3U) << "what was left out in front of it is free";
  EXPECT_EQ(map.take(16, 16), 32U);
  EXPECT_EQ(map.take(4, 16), 48U);
  EXPECT_EQ(map.take(12, 16), 52U) << "no room at a multiple of 16";
  EXPECT_EQ(map.free_bytes(), 0U);
}

TEST(BlockMap, AlignedRequestsLookBeyondTheBestFit) {
  BlockMap map(100);
  EXPECT_EQ(map.take(1), 0U);
  EXPECT_EQ(map.take(10), 1U);
  EXPECT_EQ(map.take(1), 11U);
  map.give_back(1, 10);  // fits best, and holds no multiple of 16
  EXPECT_EQ(map.take(10, 16), 16U);
  EXPECT_EQ(map.take(10), 1U);
}

TEST(BlockMap, TakesAllThereIsAndNoMore) {
  BlockMap map(64);
  EXPECT_EQ(map.take(65), std::nullopt);
  EXPECT_EQ(map.take(64), 0U);
  EXPECT_EQ(map.take(1), std::nullopt);
  EXPECT_EQ(map.free_bytes(), 0U);
  map.give_back(0, 64);
  EXPECT_EQ(map.free_bytes(), 64U);
}

TEST(BlockMap, JoinsNeighboursOnBothSides) {
  BlockMap map(30);
  for (int i = 0; i < 3; ++i) map.take(10);
  map.give_back(0, 10);
  map.give_back(20, 10);
  EXPECT_EQ(map.parts(), 2U);
  map.give_back(10, 10);
  EXPECT_EQ(map.parts(), 1U);
  EXPECT_EQ(map.take(30), 0U);
}

TEST(BlockMap, NeverGivesAUnitTwiceAndLosesNone) {
  constexpr std::uint64_t kUnits = 512;
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    BlockMap map(kUnits);
    std::vector<bool> used(kUnits);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> held;
    std::uint64_t in_use = 0;
    for (int step = 0; step < 400; ++step) {
      if (held.empty() || random() % 5 < 3) {
        const std::uint64_t size = 1 + random() % (random() % 4 == 0 ? 128 : 16);
        const auto offset = map.take(size, random() % 2 == 0 ? 8 : 1);
        if (!offset) {
          // Then there is no gap of that size either.
          std::uint64_t gap = 0;
          for (const bool unit : used) {
            gap = unit ? 0 : gap + 1;
            ASSERT_LT(gap, size);
          }
          continue;
        }
        for (std::uint64_t i = *offset; i < *offset + size; ++i) {
          ASSERT_FALSE(used.at(i)) << "unit " << i << " was given twice, seed " << seed;
          used[i] = true;
        }
        held.emplace_back(*offset, size);
        in_use += size;
      } else {
        const std::size_t which = random() % held.size();
        const auto [offset, size] = held[which];
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
        map.give_back(offset, size);
        for (std::uint64_t i = offset; i < offset + size; ++i) used[i] = false;
        in_use -= size;
      }
      ASSERT_EQ(map.free_bytes(), kUnits - in_use);
    }
  }
}

}  // namespace
}  // namespace fccl::cpu
