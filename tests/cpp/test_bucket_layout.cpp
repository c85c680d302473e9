// How a bucket is cut into shards: every block and every exempt element has one place of its own.
#include "codec/bucket_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fccl::codec {
namespace {

struct Case {
  std::uint64_t blocks, exempt;
  std::uint32_t block;
  int code_bytes;
  bool scaled;
  int world;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::uint64_t blocks : {0, 1, 2, 3, 7, 64, 1001}) {
    for (const std::uint64_t exempt : {0, 1, 3, 4, 5, 1000}) {
      for (const std::uint32_t block : {128u, 1024u}) {
        for (const int world : {1, 2, 3, 8}) {
          all.push_back({blocks, exempt, block, 1, true, world});
          all.push_back({blocks, exempt, block, 2, true, world});
          all.push_back({blocks, exempt, block, 2, false, world});
        }
      }
    }
  }
  return all;
}

BucketLayout layout_of(const Case& c) {
  return BucketLayout::make(c.blocks, c.exempt, c.block, c.code_bytes, c.scaled, c.world);
}

TEST(BucketLayout, parts_of_a_shard_lie_one_after_the_other) {
  for (const Case& c : cases()) {
    const BucketLayout layout = layout_of(c);
    const std::uint64_t slot = std::uint64_t{c.block} * static_cast<std::uint64_t>(c.code_bytes);
    for (std::uint64_t b = 0; b < layout.blocks_per_shard; ++b) {
      ASSERT_EQ(layout.codes_at(b), b * slot);
      ASSERT_EQ(layout.scale_at(b), layout.blocks_per_shard * slot + (c.scaled ? 4 * b : 0));
    }
    const std::uint64_t scales_end = layout.scale_at(layout.blocks_per_shard);
    ASSERT_GE(layout.exempt_at(0), scales_end);
    ASSERT_LT(layout.exempt_at(0), scales_end + 16);
    ASSERT_EQ(layout.exempt_at(0) % 16, 0u);
    ASSERT_EQ(layout.exempt_at(3), layout.exempt_at(0) + 12);
    ASSERT_EQ(layout.shard_bytes(), layout.exempt_at(0) + 4 * layout.exempt_per_shard);
    ASSERT_EQ(layout.shard_bytes() % 16, 0u);
  }
}

TEST(BucketLayout, shards_hold_everything_once) {
  for (const Case& c : cases()) {
    const BucketLayout layout = layout_of(c);
    std::uint64_t blocks = 0, exempt = 0;
    for (int rank = 0; rank < c.world; ++rank) {
      const auto r = static_cast<std::uint64_t>(rank);
      ASSERT_LE(layout.blocks_in(r), layout.blocks_per_shard);
      ASSERT_LE(layout.exempt_in(r), layout.exempt_per_shard);
      blocks += layout.blocks_in(r);
      exempt += layout.exempt_in(r);
    }
    ASSERT_EQ(blocks, c.blocks);
    ASSERT_EQ(exempt, c.exempt);
    // No larger than they must be.
    ASSERT_LT(layout.blocks_per_shard * static_cast<std::uint64_t>(c.world),
              c.blocks + static_cast<std::uint64_t>(c.world));
    ASSERT_LE(layout.exempt_per_shard,
              (c.exempt + static_cast<std::uint64_t>(c.world) - 1) / static_cast<std::uint64_t>(c.world) + 3);
  }
}

TEST(BucketLayout, blocks_begin_at_parameters) {
  EXPECT_EQ(BucketLayout::blocks_of(0, 256), 0u);
  EXPECT_EQ(BucketLayout::blocks_of(1, 256), 1u);
  EXPECT_EQ(BucketLayout::blocks_of(256, 256), 1u);
  EXPECT_EQ(BucketLayout::blocks_of(257, 256), 2u);
}

TEST(BucketLayout, parts_cover_a_range_in_order) {
  for (const std::uint64_t per_shard : {1, 3, 10}) {
    for (const std::uint64_t first : {0, 1, 5, 29}) {
      for (const std::uint64_t count : {0, 1, 2, 9, 30}) {
        std::uint64_t next = first;
        for_each_part(first, count, per_shard,
                      [&](std::uint64_t shard, std::uint64_t begin, std::uint64_t part) {
                        ASSERT_GT(part, 0u);
                        ASSERT_EQ(shard * per_shard + begin, next);
                        ASSERT_LE(begin + part, per_shard);
                        next += part;
                      });
        ASSERT_EQ(next, first + count);
      }
    }
  }
}

}  // namespace
}  // namespace fccl::codec
