// A bucket's whole exchange as the host drives it on GPUs, against the CPU's coder: the tables, the arguments
// and the grids of the three kernels. What the kernels do with them is test_cuda_buckets.cpp's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "cpu/bucket_coder.h"
#include "cuda/bucket_passes.h"
#include "cuda/fake_gpus.h"

namespace fccl::cuda {
namespace {

using codec::BlockFormat;
using codec::BucketRange;
using host::FakeRuntime;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t kElements = 4096;

struct Rank {
  std::vector<float> bucket = std::vector<float>(kElements);
  std::vector<float> remainders = std::vector<float>(kElements);
  Bytes wire;

  // Odd lengths and places, out of order, one of them empty.
  std::vector<BucketRange> ranges(bool feedback) {
    std::vector<BucketRange> all{{1300, 1500, false, nullptr}, {0, 1, true, nullptr},
                                 {1, 1299, false, nullptr},    {2800, 0, false, nullptr},
                                 {2800, 700, true, nullptr},   {3500, 596, false, nullptr}};
    for (BucketRange& range : all)
      if (feedback && !range.exempt) range.remainder = remainders.data() + range.begin;
    return all;
  }
};

std::vector<Rank> make_ranks(int world) {
  std::vector<Rank> ranks(static_cast<std::size_t>(world));
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (Rank& rank : ranks) {
    for (float& value : rank.bucket) value = normal(random);
    for (float& value : rank.remainders) value = normal(random) * 0.01f;
    rank.bucket[17] = INFINITY;
  }
  return ranks;
}

Bytes received_by(std::size_t rank, const std::vector<Rank>& ranks, std::uint64_t shard_bytes) {
  Bytes received;
  for (const Rank& from : ranks) {
    const auto shard = from.wire.begin() + static_cast<std::ptrdiff_t>(rank * shard_bytes);
    received.insert(received.end(), shard, shard + static_cast<std::ptrdiff_t>(shard_bytes));
  }
  return received;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The exchange with one object a rank, which has encode(), average() and decode() of its own arguments.
template <class Encode, class Average, class Decode>
void exchange(std::vector<Rank>& ranks, const codec::BucketLayout& layout, Encode encode, Average average,
              Decode decode) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].wire.assign(layout.world * layout.shard_bytes(), std::byte{0x55});
    encode(r);
  }
  Bytes means;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Bytes received = received_by(r, ranks, layout.shard_bytes());
    Bytes mean(layout.shard_bytes(), std::byte{0x55});
    average(r, received.data(), mean.data());
    means.insert(means.end(), mean.begin(), mean.end());
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) decode(r, means.data());
}

void compare(BlockFormat format, std::uint32_t block, int world, bool feedback) {
  std::vector<Rank> on_cpu = make_ranks(world);
  std::vector<Rank> on_gpu = make_ranks(world);
  const int divisor = world == 3 ? 2 : world;  // as if one rank had no data
  std::vector<cpu::BucketCoder> coders;
  for (Rank& rank : on_cpu) coders.emplace_back(format, block, world, rank.ranges(feedback));
  exchange(
      on_cpu, coders[0].layout(),
      [&](std::size_t r) { coders[r].encode(on_cpu[r].bucket.data(), on_cpu[r].wire.data()); },
      [&](std::size_t r, const std::byte* received, std::byte* mean) {
        coders[r].average(static_cast<int>(r), received, divisor, mean);
      },
      [&](std::size_t r, const std::byte* means) { coders[r].decode(means, on_cpu[r].bucket.data()); });

  FakeRuntime runtime(0);
  std::vector<BucketPasses> passes;
  for (Rank& rank : on_gpu) {
    passes.emplace_back(BucketPasses::Coding{DType::kFloat32, format, block}, world, rank.ranges(feedback),
                        rank.bucket.data());
  }
  std::vector<std::vector<Range>> tables;  // as if copied to the device
  for (const BucketPasses& one : passes) tables.emplace_back(one.tables().begin(), one.tables().end());
  const auto place = [&](std::size_t r) {
    return BucketPasses::Place{runtime, 4, tables[r].data(), reinterpret_cast<StreamHandle>(9)};
  };
  const float count = static_cast<float>(divisor);
  exchange(
      on_gpu, passes[0].layout(), [&](std::size_t r) { passes[r].encode(place(r), on_gpu[r].wire.data()); },
      [&](std::size_t r, const std::byte* received, std::byte* mean) {
        passes[r].average(place(r), static_cast<int>(r), received, &count, mean);
      },
      [&](std::size_t r, const std::byte* means) { passes[r].decode(place(r), means); });

  EXPECT_EQ(passes[0].wire_bytes(), coders[0].wire_bytes());
  for (std::size_t r = 0; r < on_gpu.size(); ++r) {
    EXPECT_EQ(on_gpu[r].wire, on_cpu[r].wire) << "rank " << r;
    for (std::size_t i = 0; i < kElements; ++i) {
      if (std::isnan(on_cpu[r].bucket[i])) on_cpu[r].bucket[i] = on_gpu[r].bucket[i] = 0;  // of any sign
    }
    EXPECT_TRUE(same(on_gpu[r].bucket, on_cpu[r].bucket)) << "rank " << r;
    EXPECT_TRUE(same(on_gpu[r].remainders, on_cpu[r].remainders)) << "rank " << r;
    EXPECT_NE(on_gpu[r].bucket[100], make_ranks(world)[r].bucket[100]);
  }
  EXPECT_EQ(runtime.log.size(), 3 * on_gpu.size());
  for (const std::string& line : runtime.log) EXPECT_NE(line.find("on 9"), std::string::npos) << line;
}

TEST(BucketPasses, give_the_cpus_bits) {
  for (const int world : {1, 2, 3}) {
    compare(BlockFormat::kInt8, 256, world, true);
    compare(BlockFormat::kFloat8E4M3, 128, world, false);
    compare(BlockFormat::kFloat16, 256, world, false);
    compare(BlockFormat::kBFloat16, 256, world, false);
  }
}

// Blocks for all the work there is, but no more than the device has room for: they would only queue.
TEST(BucketPasses, fill_the_device_and_no_more) {
  Rank rank = make_ranks(1)[0];
  const BucketPasses passes({DType::kFloat32, BlockFormat::kInt8, 256}, 1, {{0, kElements, false, nullptr}},
                            rank.bucket.data());
  FakeRuntime runtime(0);
  Bytes wire(passes.wire_bytes());
  const auto blocks_on = [&](int sm_count) {
    passes.encode({runtime, sm_count, passes.tables().data(), nullptr}, wire.data());
    EXPECT_EQ(runtime.last_pass.threads, 256u);
    return runtime.last_pass.blocks;
  };
  EXPECT_EQ(blocks_on(100), 2u);  // 16 blocks of elements, a warp each, 8 warps to a block of threads
  EXPECT_EQ(blocks_on(1), 2u);    // two resident at once on each multiprocessor
  const BucketPasses exempt({DType::kFloat32, BlockFormat::kInt8, 256}, 1, {{0, kElements, true, nullptr}},
                            rank.bucket.data());
  wire.resize(exempt.wire_bytes());
  exempt.encode({runtime, 100, exempt.tables().data(), nullptr}, wire.data());
  EXPECT_EQ(runtime.last_pass.blocks, 16u);  // 4096 elements, a thread each
  exempt.encode({runtime, 3, exempt.tables().data(), nullptr}, wire.data());
  EXPECT_EQ(runtime.last_pass.blocks, 6u);
}

// The tables on the device stay good for exactly as long as this holds.
TEST(BucketPasses, are_equal_while_everything_lies_where_it_was) {
  Rank rank = make_ranks(1)[0];
  const auto passes = [&](DType gradients, std::uint32_t block, int world, bool feedback, float* at) {
    return BucketPasses({gradients, BlockFormat::kInt8, block}, world, rank.ranges(feedback), at);
  };
  float* const bucket = rank.bucket.data();
  const BucketPasses first = passes(DType::kFloat32, 256, 2, true, bucket);
  EXPECT_TRUE(first == passes(DType::kFloat32, 256, 2, true, bucket));
  EXPECT_FALSE(first == passes(DType::kFloat16, 256, 2, true, bucket));
  EXPECT_FALSE(first == passes(DType::kFloat32, 128, 2, true, bucket));
  EXPECT_FALSE(first == passes(DType::kFloat32, 256, 3, true, bucket));
  EXPECT_FALSE(first == passes(DType::kFloat32, 256, 2, false, bucket));
  EXPECT_FALSE(first == passes(DType::kFloat32, 256, 2, true, bucket + 1));
}

}  // namespace
}  // namespace fccl::cuda
