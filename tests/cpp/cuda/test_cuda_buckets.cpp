// The bucket kernels give the CPU's bytes and numbers: wires, remainders and gradients, for every format,
// block size and type of gradients.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cpu/bucket_coder.h"
#include "cuda/bucket_kernels.h"
#include "cuda/launcher.h"

namespace fccl::cuda {
namespace {

using codec::BucketLayout;
using host::Launcher;
using Bytes = std::vector<std::byte>;

struct Parameter {
  std::size_t begin = 0;
  std::size_t length = 0;
  bool exempt = false;
};

// A bucket as one rank has it.
template <class Source>
struct Bucket {
  using Stored = typename Source::Stored;
  std::vector<Parameter> parameters;
  std::vector<Stored> gradients;
  std::vector<float> remainders;  // same places
  std::vector<Range> coded;
  std::vector<Range> exempt;
  std::uint64_t blocks = 0;
  std::uint64_t exempt_elements = 0;

  void find_ranges(std::uint32_t block, bool feedback) {
    coded.clear();
    exempt.clear();
    blocks = exempt_elements = 0;
    for (const Parameter& one : parameters) {
      auto* data = reinterpret_cast<std::byte*>(gradients.data() + one.begin);
      if (one.exempt) {
        exempt.push_back({data, nullptr, one.length, exempt_elements});
        exempt_elements += one.length;
      } else {
        coded.push_back({data, feedback ? remainders.data() + one.begin : nullptr, one.length, blocks});
        blocks += BucketLayout::blocks_of(one.length, block);
      }
    }
  }
};

template <class Source>
Bucket<Source> make_bucket(std::uint64_t seed, int rank) {
  Bucket<Source> bucket;
  // Lengths around the block sizes, begins of every alignment.
  const std::size_t lengths[] = {1, 3, 700, 128, 64, 1024, 5, 2049, 257, 0, 12};
  std::size_t at = seed % 3;
  for (std::size_t i = 0; i < std::size(lengths); ++i) {
    if (lengths[i] == 0) continue;
    bucket.parameters.push_back({at, lengths[i], i % 4 == 1 || lengths[i] == 12});
    at += lengths[i];
  }
  std::mt19937_64 random(seed * 100 + static_cast<std::uint64_t>(rank));
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < at; ++i) {
    float value = normal(random) * std::ldexp(1.0f, static_cast<int>(i / 500 % 5) * 20 - 40);
    const auto kind = random() % 300;
    if (kind == 0) value = INFINITY;
    if (kind == 1) value = std::nanf("");
    if (i >= 900 && i < 1100) value = 0;
    // Stretches that one rank alone, or all but one, say nothing of.
    if ((i / 1200 + static_cast<std::size_t>(rank)) % 3 == 0 && i / 150 % 2 == 1) value = 0;
    bucket.gradients.push_back(Source::narrow(value));
    bucket.remainders.push_back(normal(random) * 0.01f);
  }
  return bucket;
}

// ---- The reference: the CPU's coder, over float32 ----

template <class Source>
std::vector<float> widened(const Bucket<Source>& bucket) {
  std::vector<float> values;
  for (const auto& gradient : bucket.gradients) values.push_back(Source::widen(gradient));
  return values;
}

template <class Source>
cpu::BucketCoder coder_of(Bucket<Source>& bucket, codec::BlockFormat format, std::uint32_t block, int world,
                          bool feedback) {
  std::vector<cpu::BucketRange> ranges;
  for (const Parameter& one : bucket.parameters) {
    float* const remainder = feedback && !one.exempt ? bucket.remainders.data() + one.begin : nullptr;
    ranges.push_back({one.begin, one.length, one.exempt, remainder});
  }
  return {format, block, world, std::move(ranges)};
}

// ---- The comparison ----

template <class Kernel>
void launch(const typename Kernel::Args& args) {
  Launcher launcher(1);
  launcher.add<Kernel>(0, 2, 96, args);
  ASSERT_EQ(launcher.run(), 0);
}

// Wires as the kernels write them must be whole: poisoned before, zero where nothing lies.
Bytes poisoned(std::size_t bytes) { return Bytes(bytes, std::byte{0x77}); }

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// NaNs may differ in sign and payload between instruction sets and the GPU; their places may not.
template <class Source>
bool same_gradients(const Bucket<Source>& a, const Bucket<Source>& b) {
  for (std::size_t i = 0; i < a.gradients.size(); ++i) {
    const float x = Source::widen(a.gradients[i]);
    const float y = Source::widen(b.gradients[i]);
    if (std::isnan(x) ? !std::isnan(y) : std::memcmp(&x, &y, sizeof(x)) != 0) return false;
  }
  return true;
}

template <class Source, class Code, int kBlock>
void compare(int world, std::uint64_t seed, bool feedback) {
  std::vector<Bucket<Source>> on_cpu;
  std::vector<Bucket<Source>> on_gpu;
  for (int rank = 0; rank < world; ++rank) {
    on_cpu.push_back(make_bucket<Source>(seed, rank));
    on_gpu.push_back(make_bucket<Source>(seed, rank));
    on_gpu.back().find_ranges(kBlock, feedback);
  }
  const BucketLayout layout = BucketLayout::make(on_gpu[0].blocks, on_gpu[0].exempt_elements, kBlock,
                                                 Code::kBytes, Code::kScaled, world);
  std::vector<cpu::BucketCoder> coders;
  for (Bucket<Source>& bucket : on_cpu)
    coders.push_back(coder_of(bucket, Code::kFormat, kBlock, world, feedback));
  EXPECT_EQ(std::memcmp(&coders[0].layout(), &layout, sizeof(layout)), 0);
  const auto ranges = [](const std::vector<Range>& all) {
    return RangeTable{all.data(), static_cast<std::uint32_t>(all.size())};
  };
  std::vector<Bytes> wires;
  for (std::size_t rank = 0; rank < on_cpu.size(); ++rank) {
    wires.push_back(poisoned(layout.world * layout.shard_bytes()));
    coders[rank].encode(widened(on_cpu[rank]).data(), wires.back().data());
    Bytes wire = poisoned(wires.back().size());
    launch<EncodeBucket<Source, Code, kBlock>>(
        {layout, ranges(on_gpu[rank].coded), ranges(on_gpu[rank].exempt), wire.data()});
    ASSERT_TRUE(same_bits(wire, wires.back())) << "wire of rank " << rank;
    ASSERT_TRUE(same_bits(on_cpu[rank].remainders, on_gpu[rank].remainders)) << "remainders of rank " << rank;
  }
  const float divisor = static_cast<float>(world);
  Bytes gathered;
  for (std::uint32_t rank = 0; rank < layout.world; ++rank) {
    Bytes received;
    for (const Bytes& wire : wires) {
      const auto shard = wire.begin() + static_cast<std::ptrdiff_t>(rank * layout.shard_bytes());
      received.insert(received.end(), shard, shard + static_cast<std::ptrdiff_t>(layout.shard_bytes()));
    }
    Bytes expected = poisoned(layout.shard_bytes());
    coders[rank].average(static_cast<int>(rank), received.data(), world, expected.data());
    Bytes out = poisoned(layout.shard_bytes());
    launch<ReduceShard<Code, kBlock>>(
        {layout, ranges(on_gpu[rank].coded), received.data(), out.data(), &divisor, rank});
    ASSERT_TRUE(same_bits(out, expected)) << "shard of rank " << rank;
    ASSERT_TRUE(same_bits(on_cpu[rank].remainders, on_gpu[rank].remainders)) << "remainders of rank " << rank;
    gathered.insert(gathered.end(), out.begin(), out.end());
  }
  std::uint32_t not_finite = 0;
  std::vector<float> values = widened(on_cpu[0]);
  coders[0].decode(gathered.data(), values.data());
  for (std::size_t i = 0; i < values.size(); ++i) on_cpu[0].gradients[i] = Source::narrow(values[i]);
  launch<DecodeBucket<Source, Code, kBlock>>(
      {layout, ranges(on_gpu[0].coded), ranges(on_gpu[0].exempt), gathered.data(), &not_finite});
  EXPECT_TRUE(same_gradients(on_cpu[0], on_gpu[0]));
  bool any = false;
  for (const auto& gradient : on_gpu[0].gradients) any = any || !std::isfinite(Source::widen(gradient));
  EXPECT_EQ(not_finite, any ? 1u : 0u);
  EXPECT_TRUE(any) << "this test's gradients hold inf and NaN";
}

template <class Source>
class CudaBuckets : public testing::Test {};
using Sources = testing::Types<FloatSource, Float16Source, BFloat16Source>;
TYPED_TEST_SUITE(CudaBuckets, Sources);

template <class Source, class Code>
void compare_blocks(bool feedback) {
  compare<Source, Code, 128>(2, 1, feedback);
  compare<Source, Code, 256>(3, 2, feedback);
  compare<Source, Code, 512>(8, 3, feedback);
  compare<Source, Code, 1024>(1, 4, feedback);
}

TYPED_TEST(CudaBuckets, int8) {
  compare_blocks<TypeParam, codec::Int8Code>(true);
  compare_blocks<TypeParam, codec::Int8Code>(false);
}
TYPED_TEST(CudaBuckets, float8) {
  compare_blocks<TypeParam, codec::Float8E4M3Code>(true);
  compare_blocks<TypeParam, codec::Float8E5M2Code>(true);
}
TYPED_TEST(CudaBuckets, sixteen_bits) {
  compare_blocks<TypeParam, codec::Float16Code>(false);
  compare_blocks<TypeParam, codec::BFloat16Code>(false);
}

TEST(CudaBucket, finite_gradients_raise_no_flag) {
  std::vector<float> gradients(300, 1.5f);
  const Range range{reinterpret_cast<std::byte*>(gradients.data()), nullptr, 300, 0};
  const BucketLayout layout = BucketLayout::make(2, 0, 256, 1, true, 1);
  Bytes wire = poisoned(layout.shard_bytes());
  std::uint32_t not_finite = 0;
  launch<EncodeBucket<FloatSource, codec::Int8Code, 256>>({layout, {&range, 1}, {nullptr, 0}, wire.data()});
  launch<DecodeBucket<FloatSource, codec::Int8Code, 256>>(
      {layout, {&range, 1}, {nullptr, 0}, wire.data(), &not_finite});
  EXPECT_EQ(not_finite, 0u);
  EXPECT_EQ(gradients[299], 1.5f);
}

// A bucket whose parameters are all exempt, and one without exempt ones.
TEST(CudaBucket, either_kind_of_range_may_be_missing) {
  std::vector<float> gradients = {1, 2, 3, 4, 5};
  const Range range{reinterpret_cast<std::byte*>(gradients.data()), nullptr, 5, 0};
  const BucketLayout layout = BucketLayout::make(0, 5, 256, 1, true, 2);
  Bytes wire = poisoned(2 * layout.shard_bytes());
  launch<EncodeBucket<FloatSource, codec::Int8Code, 256>>({layout, {nullptr, 0}, {&range, 1}, wire.data()});
  gradients.assign(5, 0.0f);
  launch<DecodeBucket<FloatSource, codec::Int8Code, 256>>(
      {layout, {nullptr, 0}, {&range, 1}, wire.data(), nullptr});
  EXPECT_EQ(gradients, (std::vector<float>{1, 2, 3, 4, 5}));
}

}  // namespace
}  // namespace fccl::cuda
