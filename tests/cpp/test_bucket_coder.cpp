// Whole buckets through the steps of a compressed exchange, without the exchange: against the arithmetic of
// codec/block.h written out for one element at a time, in double where that shows what was lost.
#include "cpu/bucket_coder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace fccl::cpu {
namespace {

using codec::BlockFormat;
using Bytes = std::vector<std::byte>;

constexpr BlockFormat kFormats[] = {BlockFormat::kBFloat16, BlockFormat::kFloat16, BlockFormat::kInt8,
                                    BlockFormat::kFloat8E4M3, BlockFormat::kFloat8E5M2};

// By how much a code may miss an element, at most: of itself, and of its block's largest magnitude.
struct Bound {
  double of_itself;
  double of_largest;
};
Bound bound_of(BlockFormat format) {
  switch (format) {
    case BlockFormat::kBFloat16: return {1.0 / 256, 0};
    case BlockFormat::kFloat16: return {1.0 / 2048, std::ldexp(1.0, -39)};
    case BlockFormat::kInt8: return {1e-6, 1.0 / 254};
    case BlockFormat::kFloat8E4M3: return {1.0 / 16, 1.0 / 448 / 1024};
    case BlockFormat::kFloat8E5M2: break;
  }
  return {1.0 / 8, std::ldexp(1.0, -17) / 57344};
}

struct Rank {
  std::vector<float> gradients;
  std::vector<float> remainders;
};

struct Bucket {
  std::vector<BucketRange> ranges;  // remainders: filled in per rank
  std::size_t elements = 0;
  std::vector<Rank> ranks;

  Bucket(std::vector<std::size_t> lengths, int world, unsigned seed) {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      ranges.push_back({elements, lengths[i], i % 3 == 1, nullptr});
      elements += lengths[i];
    }
    // The last parameter lies first: ranges need not be in order.
    std::rotate(ranges.begin(), ranges.end() - 1, ranges.end());
    for (int r = 0; r < world; ++r) {
      std::mt19937 random(seed * 10 + static_cast<unsigned>(r));
      std::normal_distribution<float> normal;
      Rank rank;
      for (std::size_t i = 0; i < elements; ++i) {
        rank.gradients.push_back(normal(random) * std::ldexp(1.0f, static_cast<int>(i / 300 % 7) * 8 - 24));
        rank.remainders.push_back(0);
      }
      ranks.push_back(std::move(rank));
    }
  }

  BucketCoder coder(BlockFormat format, std::uint32_t block, std::size_t rank, bool feedback) {
    std::vector<BucketRange> own = ranges;
    for (BucketRange& range : own) {
      if (feedback && !range.exempt) range.remainder = ranks[rank].remainders.data() + range.begin;
    }
    return {format, block, static_cast<int>(ranks.size()), std::move(own)};
  }

  // The largest magnitude, over all ranks, of each element's block.
  std::vector<double> largest(std::uint32_t block) const {
    std::vector<double> result(elements);
    for (const BucketRange& range : ranges) {
      for (std::size_t begin = 0; begin < range.length; begin += block) {
        const std::size_t end = std::min<std::size_t>(range.length, begin + block);
        double most = 0;
        for (const Rank& rank : ranks) {
          for (std::size_t i = begin; i < end; ++i)
            most = std::max(most, std::abs(double{rank.gradients[range.begin + i]}));
        }
        for (std::size_t i = begin; i < end; ++i) result[range.begin + i] = most;
      }
    }
    return result;
  }

  bool is_exempt(std::size_t element) const {
    return std::any_of(ranges.begin(), ranges.end(), [&](const BucketRange& range) {
      return range.exempt && element >= range.begin && element < range.begin + range.length;
    });
  }
};

// The exchange, within this process. Fills the memory that is to be written with `before`, and puts guards
// around it.
std::vector<float> exchange(const std::vector<BucketCoder>& coders, Bucket& bucket, int divisor,
                            std::byte before) {
  const std::size_t shard = coders[0].layout().shard_bytes();
  const std::size_t world = coders.size();
  constexpr std::size_t kGuard = 64;
  const auto guarded = [&](std::size_t bytes) { return Bytes(bytes + 2 * kGuard, before); };
  const auto guards_hold = [&](const Bytes& bytes) {
    const auto is_before = [&](std::byte b) { return b == before; };
    return std::all_of(bytes.begin(), bytes.begin() + kGuard, is_before) &&
           std::all_of(bytes.end() - kGuard, bytes.end(), is_before);
  };
  std::vector<Bytes> sent;
  for (std::size_t r = 0; r < world; ++r) {
    sent.push_back(guarded(world * shard));
    coders[r].encode(bucket.ranks[r].gradients.data(), sent[r].data() + kGuard);
    EXPECT_TRUE(guards_hold(sent[r]));
  }
  Bytes averaged(world * shard);
  for (std::size_t r = 0; r < world; ++r) {
    Bytes received;
    for (const Bytes& from : sent) {
      const auto* begin = from.data() + kGuard + r * shard;
      received.insert(received.end(), begin, begin + shard);
    }
    Bytes mean = guarded(shard);
    coders[r].average(static_cast<int>(r), received.data(), divisor, mean.data() + kGuard);
    EXPECT_TRUE(guards_hold(mean));
    std::memcpy(averaged.data() + r * shard, mean.data() + kGuard, shard);
  }
  std::vector<float> result(bucket.elements, NAN);
  coders[0].decode(averaged.data(), result.data());
  return result;
}

const std::vector<std::size_t> kLengths = {700, 3, 1, 257, 0, 128, 64, 2049, 5};

TEST(BucketCoder, mean_is_within_the_bounds_of_two_codings) {
  for (const BlockFormat format : kFormats) {
    for (const std::size_t world : {1u, 2u, 3u, 5u}) {
      for (const std::uint32_t block : {128u, 1024u}) {
        Bucket bucket(kLengths, static_cast<int>(world), 1);
        std::vector<BucketCoder> coders;
        for (std::size_t r = 0; r < world; ++r) coders.push_back(bucket.coder(format, block, r, false));
        const std::vector<float> mean = exchange(coders, bucket, static_cast<int>(world), std::byte{0x77});
        const std::vector<double> largest = bucket.largest(block);
        const Bound bound = bound_of(format);
        for (std::size_t i = 0; i < bucket.elements; ++i) {
          double sum = 0;
          double magnitudes = 0;
          for (const Rank& rank : bucket.ranks) {
            sum += rank.gradients[i];
            magnitudes += std::abs(double{rank.gradients[i]});
          }
          const double exact = sum / static_cast<double>(world);
          double allowed = 1e-6 * magnitudes;  // float32's own
          if (!bucket.is_exempt(i)) {
            const double way_in =
                bound.of_itself * magnitudes / static_cast<double>(world) + bound.of_largest * largest[i];
            allowed += way_in + bound.of_itself * (std::abs(exact) + way_in) +
                       bound.of_largest * largest[i] * (1 + 2 * bound.of_itself + 2 * bound.of_largest);
          }
          ASSERT_LE(std::abs(mean[i] - exact), allowed)
              << "element " << i << ", format " << static_cast<int>(format) << ", world " << world;
        }
      }
    }
  }
}

// What a message holds depends on nothing but the gradients: not on what was in the memory before.
TEST(BucketCoder, every_byte_is_written) {
  for (const BlockFormat format : kFormats) {
    Bucket bucket(kLengths, 7, 2);  // more ranks than some parameters have blocks
    for (const bool feedback : {false, true}) {
      Bucket again = bucket;
      const BucketCoder coder = bucket.coder(format, 256, 0, feedback);
      const BucketCoder same = again.coder(format, 256, 0, feedback);
      Bytes a(coder.wire_bytes(), std::byte{0});
      Bytes b(coder.wire_bytes(), std::byte{0xff});
      coder.encode(bucket.ranks[0].gradients.data(), a.data());
      same.encode(bucket.ranks[0].gradients.data(), b.data());
      ASSERT_EQ(a, b);
      for (int rank = 0; rank < 7; ++rank) {
        Bytes mean_a(coder.layout().shard_bytes(), std::byte{0});
        Bytes mean_b(coder.layout().shard_bytes(), std::byte{0xff});
        coder.average(rank, a.data(), 7, mean_a.data());
        same.average(rank, b.data(), 7, mean_b.data());
        ASSERT_EQ(mean_a, mean_b);
      }
    }
  }
}

// Error feedback: over many steps with the same gradients, what all ranks have said together approaches what
// they had to say, whatever the format loses in one step; and what is missing is in the remainders, exactly
// as far as float32 goes.
TEST(BucketCoder, nothing_is_lost_for_good) {
  for (const BlockFormat format : kFormats) {
    constexpr std::size_t kWorld = 3;
    constexpr int kSteps = 50;
    Bucket bucket({700, 3, 300}, kWorld, 3);
    std::vector<BucketCoder> coders;
    for (std::size_t r = 0; r < kWorld; ++r) coders.push_back(bucket.coder(format, 128, r, true));
    std::vector<double> said(bucket.elements);
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<float> mean = exchange(coders, bucket, kWorld, std::byte{0});
      for (std::size_t i = 0; i < said.size(); ++i) said[i] += double{mean[i]} * kWorld;
    }
    const std::vector<double> largest = bucket.largest(128);
    for (std::size_t i = 0; i < said.size(); ++i) {
      double wanted = 0;
      double owed = 0;
      for (const Rank& rank : bucket.ranks) {
        wanted += double{rank.gradients[i]} * kSteps;
        owed += double{rank.remainders[i]};
      }
      ASSERT_NEAR(said[i] + owed, wanted, kSteps * 4e-6 * largest[i]) << "element " << i;
      ASSERT_LE(std::abs(owed), 3 * largest[i]) << "remainders do not grow";
    }
  }
}

// The owner of a shard keeps what the mean's code loses, also where it has no gradients of its own: a rank
// that has run out of data, an expert that it never routes to. What it keeps must come out all the same.
TEST(BucketCoder, an_owner_without_gradients_gives_what_it_keeps) {
  for (const BlockFormat format : kFormats) {
    constexpr std::size_t kWorld = 2;
    constexpr int kSteps = 60;
    Bucket bucket({128, 1, 128}, kWorld, 6);
    for (std::size_t i = 0; i < bucket.elements; ++i) {
      // Rank 0 owns one of the two blocks and rank 1 the other. Small elements beside a large one.
      bucket.ranks[0].gradients[i] = 0;
      bucket.ranks[1].gradients[i] = i % 64 == 0 ? 1000.0f : 1.0f + 0.01f * static_cast<float>(i);
    }
    std::vector<BucketCoder> coders;
    for (std::size_t r = 0; r < kWorld; ++r) coders.push_back(bucket.coder(format, 128, r, true));
    std::vector<double> said(bucket.elements);
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<float> mean = exchange(coders, bucket, kWorld, std::byte{0});
      for (std::size_t i = 0; i < said.size(); ++i) said[i] += double{mean[i]} * kWorld;
    }
    for (std::size_t i = 0; i < said.size(); ++i) {
      double owed = 0;
      for (const Rank& rank : bucket.ranks) {
        ASSERT_LE(std::abs(rank.remainders[i]), 140)
            << "element " << i << ", format " << static_cast<int>(format);
        owed += double{rank.remainders[i]};
      }
      ASSERT_NEAR(said[i] + owed, kSteps * double{bucket.ranks[1].gradients[i]}, kSteps * 4e-3)
          << "element " << i;
    }
    // With nothing from anybody nothing is said, and nothing forgotten.
    const std::vector<float> before = bucket.ranks[0].remainders;
    std::fill(bucket.ranks[1].gradients.begin(), bucket.ranks[1].gradients.end(), 0.0f);
    for (const float value : exchange(coders, bucket, kWorld, std::byte{0})) ASSERT_EQ(value, 0.0f);
    ASSERT_EQ(bucket.ranks[0].remainders, before);
  }
}

TEST(BucketCoder, divides_by_the_ranks_that_have_data) {
  Bucket bucket({512, 4}, 3, 4);
  for (std::size_t r = 0; r < 3; ++r)
    std::fill(bucket.ranks[r].gradients.begin(), bucket.ranks[r].gradients.end(), r == 1 ? 0.0f : 6.0f);
  std::vector<BucketCoder> coders;
  for (std::size_t r = 0; r < 3; ++r) coders.push_back(bucket.coder(BlockFormat::kInt8, 256, r, true));
  for (const float value : exchange(coders, bucket, 2, std::byte{0})) ASSERT_EQ(value, 6.0f);
}

}  // namespace
}  // namespace fccl::cpu
