// Packing kernels: the bits of a plain loop with codec's conversions, and not a byte beside them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "cuda/launcher.h"
#include "cuda/pack.h"

namespace fccl::cuda {
namespace {

using host::Launcher;

template <class First, class Second>
struct Pair {
  using From = First;
  using To = Second;
};
using Pairs = testing::Types<Pair<FloatSource, FloatSource>, Pair<FloatSource, Float16Source>,
                             Pair<FloatSource, BFloat16Source>, Pair<Float16Source, FloatSource>,
                             Pair<Float16Source, Float16Source>, Pair<BFloat16Source, FloatSource>,
                             Pair<BFloat16Source, BFloat16Source>>;
template <class P>
class CudaPack : public testing::Test {};
TYPED_TEST_SUITE(CudaPack, Pairs);

struct Shape {
  std::size_t length;
  std::size_t gap = 0;         // elements of the buffer that are left free before it
  std::size_t misaligned = 0;  // by how many elements it misses a 16-byte boundary in its own memory
};

// Tensors in one piece of memory, elements that nobody may touch around each.
template <class Type>
struct Tensors {
  using Stored = typename Type::Stored;
  static constexpr std::size_t kGuard = 16;
  std::vector<Stored> memory;
  std::vector<std::size_t> begins;
  std::vector<Range> ranges;
  std::uint64_t length = 0;  // of the buffer

  Tensors(const std::vector<Shape>& shapes, std::size_t gap_behind) {
    std::size_t at = 0;
    for (const Shape& shape : shapes) {
      begins.push_back((at + kGuard) / 8 * 8 + 8 + shape.misaligned);
      at = begins.back() + shape.length;
    }
    memory.assign(at + kGuard, Type::narrow(77));
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      length += shapes[i].gap;
      ranges.push_back(
          {reinterpret_cast<std::byte*>(memory.data() + begins[i]), nullptr, shapes[i].length, length});
      length += shapes[i].length;
    }
    length += gap_behind;
  }
  RangeTable table() const { return {ranges.data(), static_cast<std::uint32_t>(ranges.size())}; }
  Stored* tensor(std::size_t i) { return memory.data() + begins[i]; }
};

// Every kind of number; NaNs with and without payload, subnormals of all types, what overflows float16.
template <class Type>
typename Type::Stored random_number(std::mt19937_64& random) {
  const auto word = static_cast<std::uint32_t>(random());
  switch (random() % 16) {
    case 0: return Type::narrow(std::numeric_limits<float>::infinity());
    case 1: return Type::narrow(-std::numeric_limits<float>::infinity());
    case 2: return Type::narrow(__builtin_bit_cast(float, 0xff800001u | (word & 0x3fffffu)));
    case 3: return Type::narrow(-0.0f);
    case 4: return Type::narrow(__builtin_bit_cast(float, word & 0x807fffffu));
    case 5: return Type::narrow(std::ldexp(static_cast<float>(word % 4096), -24));
    case 6: return Type::narrow(65519.0f + static_cast<float>(word % 3));
    default: {  // any bits at all
      typename Type::Stored stored;
      std::memcpy(&stored, &word, sizeof(stored));
      return stored;
    }
  }
}

// The plain loop's element.
template <class From, class To>
typename To::Stored expected(typename From::Stored element, const float* scale) {
  float value = From::widen(element);
  if (scale) {
    value = value * *scale;
    if (std::isnan(value)) value = __builtin_bit_cast(float, 0x7fc00000u);
  }
  return To::narrow(value);
}

template <class Kernel>
void launch(const typename Kernel::Args& args, unsigned blocks, unsigned threads) {
  Launcher launcher(1);
  launcher.add<Kernel>(0, blocks, threads, args);
  ASSERT_EQ(launcher.run(), 0);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Case {
  std::vector<Shape> shapes;
  std::size_t gap_behind = 0;
  std::size_t buffer_misaligned = 0;
  unsigned blocks = 2;
  unsigned threads = 64;
};

template <class From, class To>
void check_pack(const Case& c, const float* scale, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Tensors<From> tensors(c.shapes, c.gap_behind);
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    for (std::size_t k = 0; k < c.shapes[i].length; ++k) tensors.tensor(i)[k] = random_number<From>(random);
  }
  const auto memory = tensors.memory;
  constexpr std::size_t kGuard = 16;
  const std::size_t begin = kGuard + c.buffer_misaligned;
  std::vector<typename To::Stored> buffer(begin + tensors.length + kGuard, To::narrow(55));
  auto wanted = buffer;
  for (std::size_t at = 0; at < tensors.length; ++at) wanted[begin + at] = To::narrow(0);
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    for (std::size_t k = 0; k < c.shapes[i].length; ++k) {
      wanted[begin + tensors.ranges[i].first + k] = expected<From, To>(tensors.tensor(i)[k], scale);
    }
  }
  launch<PackTensors<From, To>>(
      {tensors.table(), reinterpret_cast<std::byte*>(buffer.data() + begin), tensors.length, scale}, c.blocks,
      c.threads);
  EXPECT_TRUE(same_bits(buffer, wanted));
  EXPECT_TRUE(same_bits(tensors.memory, memory)) << "tensors are only read";
}

template <class From, class To>
void check_unpack(const Case& c, const float* scale, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Tensors<To> tensors(c.shapes, c.gap_behind);
  constexpr std::size_t kGuard = 16;
  const std::size_t begin = kGuard + c.buffer_misaligned;
  std::vector<typename From::Stored> buffer(begin + tensors.length + kGuard);
  for (auto& element : buffer) element = random_number<From>(random);
  const auto before = buffer;
  auto wanted = tensors.memory;
  bool finite = true;
  for (std::size_t i = 0; i < c.shapes.size(); ++i) {
    for (std::size_t k = 0; k < c.shapes[i].length; ++k) {
      const auto element = expected<From, To>(buffer[begin + tensors.ranges[i].first + k], scale);
      wanted[tensors.begins[i] + k] = element;
      finite = finite && std::isfinite(To::widen(element));
    }
  }
  std::uint32_t not_finite = 0;
  launch<UnpackTensors<From, To>>({tensors.table(), reinterpret_cast<const std::byte*>(buffer.data() + begin),
                                   tensors.length, scale, &not_finite},
                                  c.blocks, c.threads);
  EXPECT_TRUE(same_bits(tensors.memory, wanted));
  EXPECT_TRUE(same_bits(buffer, before)) << "the buffer is only read";
  EXPECT_EQ(not_finite, finite ? 0u : 1u);
}

template <class P>
void check(const Case& c) {
  const float scales[] = {0.5f, 1.0f / 3, 1.0f, 3e38f, 1e-38f};
  std::uint64_t seed = 1;
  for (const float* scale :
       {static_cast<const float*>(nullptr), &scales[0], &scales[1], &scales[2], &scales[3], &scales[4]}) {
    SCOPED_TRACE(scale ? "scale " + std::to_string(*scale) : std::string("no scale"));
    check_pack<typename P::From, typename P::To>(c, scale, ++seed);
    check_unpack<typename P::From, typename P::To>(c, scale, ++seed);
  }
}

TYPED_TEST(CudaPack, tensors_that_lie_tight) {
  check<TypeParam>({{{512}, {1024}, {8}, {1536}, {2000}, {64}}});
  // One element short of a chunk, and one more.
  check<TypeParam>({{{511}, {513}, {1023}, {514}, {511}}});
}

TYPED_TEST(CudaPack, odd_sizes_and_alignments) {
  check<TypeParam>({{{1}, {3, 0, 1}, {700}, {512, 0, 2}, {513, 0, 3}, {5}, {2049, 0, 1}, {511}, {1027}}});
}

TYPED_TEST(CudaPack, aligned_tensors_in_a_misaligned_buffer) {
  for (const std::size_t misaligned : {1, 2, 4}) check<TypeParam>({{{1100}, {600}}, 0, misaligned});
}

TYPED_TEST(CudaPack, empty_tensors) {
  check<TypeParam>({{{0}, {600}, {0}, {0, 0, 1}, {700}, {0}}});
  check<TypeParam>({{{0}, {0}}});
  check<TypeParam>({{{0}}, 700});
}

TYPED_TEST(CudaPack, no_tensors) {
  check<TypeParam>({{}});
  check<TypeParam>({{}, 1300});
}

TYPED_TEST(CudaPack, gaps) { check<TypeParam>({{{600, 8}, {600, 520}, {0, 4}, {5, 3}, {1024, 3}}, 1030}); }

TYPED_TEST(CudaPack, many_small_tensors) {
  Case c;
  for (std::size_t i = 0; i < 900; ++i) c.shapes.push_back({i % 6, i % 11 == 0 ? i % 3 : 0, i % 5});
  check<TypeParam>(c);
}

// Four warps take 2048 elements at a time.
TYPED_TEST(CudaPack, tensors_longer_than_a_pass_of_the_grid) {
  check<TypeParam>({{{3}, {20'001}, {10'240}}});
}

TYPED_TEST(CudaPack, any_grid) {
  for (const unsigned blocks : {1u, 3u, 7u}) {
    for (const unsigned threads : {32u, 96u, 256u}) {
      check<TypeParam>({{{1000}, {0}, {5}, {1600}, {512}}, 3, 0, blocks, threads});
    }
  }
}

// ---- The check for finite elements ----

std::uint32_t flag_of(std::vector<float> elements, float scale, bool tell = true) {
  std::vector<std::uint16_t> out(elements.size());
  const Range range{reinterpret_cast<std::byte*>(out.data()), nullptr, out.size(), 0};
  std::uint32_t not_finite = 0;
  launch<UnpackTensors<FloatSource, Float16Source>>({{&range, 1},
                                                     reinterpret_cast<const std::byte*>(elements.data()),
                                                     elements.size(),
                                                     &scale,
                                                     tell ? &not_finite : nullptr},
                                                    1, 32);
  return not_finite;
}

TEST(CudaPackCheck, looks_at_what_is_stored) {
  std::vector<float> elements(1100, 1.0f);
  EXPECT_EQ(flag_of(elements, 65504.0f), 0u);
  EXPECT_EQ(flag_of(elements, 65520.0f), 1u);  // infinite in float16, and only there
  elements[77] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(flag_of(elements, 1.0f), 1u);
  EXPECT_EQ(flag_of(elements, 0.0f), 1u);  // inf * 0
  elements[77] = 1e30f;
  EXPECT_EQ(flag_of(elements, 1e-30f), 0u);
  elements[1099] = std::nanf("");  // beyond the last whole chunk
  EXPECT_EQ(flag_of(elements, 1e-30f), 1u);
  EXPECT_EQ(flag_of(elements, 1e-30f, false), 0u);
}

TEST(CudaPackCheck, gaps_do_not_count) {
  std::vector<float> buffer(1200, std::nanf(""));
  std::vector<float> out(600);
  for (std::size_t i = 300; i < 900; ++i) buffer[i] = 2;
  const Range range{reinterpret_cast<std::byte*>(out.data()), nullptr, out.size(), 300};
  std::uint32_t not_finite = 0;
  launch<UnpackTensors<FloatSource, FloatSource>>(
      {{&range, 1}, reinterpret_cast<const std::byte*>(buffer.data()), buffer.size(), nullptr, &not_finite},
      2, 64);
  EXPECT_EQ(not_finite, 0u);
  EXPECT_EQ(out, std::vector<float>(600, 2.0f));
}

// One rounding: the product of two float16 numbers is exact in float32, so what comes out is the nearest.
TEST(CudaPackCheck, rounds_once) {
  std::uint16_t one = codec::to_half(1.0009765625f).bits;  // 1 + 2^-10
  const float scale = 1.0f + 0x1p-11f + 0x1p-22f;
  std::uint16_t out = 0;
  const Range range{reinterpret_cast<std::byte*>(&one), nullptr, 1, 0};
  launch<PackTensors<Float16Source, Float16Source>>(
      {{&range, 1}, reinterpret_cast<std::byte*>(&out), 1, &scale}, 1, 32);
  // 1 + 2^-10 + 2^-11 + 2^-21 + ... lies above the middle: up. A scale rounded to float16 would be 1.
  EXPECT_EQ(codec::to_float(codec::Half{out}), 1.0f + 0x1p-9f);
}

}  // namespace
}  // namespace fccl::cuda
