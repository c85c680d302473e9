// Every kernel of every available instruction set against the scalar reference, to the bit.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels/reduce.h"
#include "reference.h"

namespace fccl::cpu {
namespace {

using Bytes = std::vector<std::uint8_t>;

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa_available(isa)) isas.push_back(isa);
  }
  return isas;
}

std::vector<DType> reducible_dtypes() {
  std::vector<DType> dtypes;
  for (int value = 0; value < kDTypeCount; ++value) {
    if (can_reduce(static_cast<DType>(value), ReduceOp::kSum)) dtypes.push_back(static_cast<DType>(value));
  }
  return dtypes;
}

std::vector<ReduceOp> ops_of(DType dtype) {
  std::vector<ReduceOp> ops;
  for (int value = 0; value < kReduceOpCount; ++value) {
    if (can_reduce(dtype, static_cast<ReduceOp>(value))) ops.push_back(static_cast<ReduceOp>(value));
  }
  return ops;
}

template <class T>
void put(std::uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

// One element: any bits, or one of the values at which kernels go wrong, or one near zero, so that
// ties, equal values and cancellations occur.
void put_random(DType dtype, std::uint8_t* at, std::mt19937_64& random) {
  const std::uint64_t bits = random();
  const auto kind = random() % 4;
  const int small = static_cast<int>(random() % 9) - 4;
  std::memcpy(at, &bits, size_of(dtype));
  if (kind < 2) return;
  const auto pick = [&](std::initializer_list<double> values) {
    return values.begin()[bits % values.size()];
  };
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  switch (dtype) {
    case DType::kFloat32:
      return put(
          at, static_cast<float>(kind == 2 ? pick({0.0, -0.0, inf, -inf, nan, 0x1p-149, -0x1p-149, 0x1p-126,
                                                   0x1.fffffep127, -0x1.fffffep127, 0x1p24, 1.0})
                                           : small));
    case DType::kFloat64:
      return put(at, kind == 2 ? pick({0.0, -0.0, inf, -inf, nan, 0x1p-1074, 0x1p-1022,
                                       0x1.fffffffffffffp1023, 0x1p53})
                               : static_cast<double>(small));
    case DType::kFloat16:
      return put(at, reference::kHalf.encode(kind == 2 ? pick({0.0, -0.0, inf, -inf, nan, 0x1p-24, -0x1p-24,
                                                               0x1p-14, 65504.0, -65504.0, 2048.0, 0x1p-25})
                                                       : small));
    case DType::kBFloat16:
      return put(at, reference::kBFloat16.encode(kind == 2 ? pick({0.0, -0.0, inf, -inf, nan, 0x1p-133,
                                                                   0x1p-126, 256.0, 0x1.fep127, -0x1.fep127})
                                                           : small));
    case DType::kBool: return put(at, static_cast<std::uint8_t>(bits % 3));
    default: break;
  }
  // Integers: all bits alike but perhaps the first or last, or small.
  const std::uint64_t ends[] = {0, ~std::uint64_t{0}, 1, std::uint64_t{1} << (8 * size_of(dtype) - 1),
                                (std::uint64_t{1} << (8 * size_of(dtype) - 1)) - 1};
  const std::uint64_t value =
      kind == 2 ? ends[bits % 5] : static_cast<std::uint64_t>(static_cast<std::int64_t>(small));
  std::memcpy(at, &value, size_of(dtype));
}

std::string hex(const std::uint8_t* at, std::size_t size) {
  std::string text;
  for (std::size_t i = size; i-- > 0;) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += {kDigits[at[i] >> 4], kDigits[at[i] & 15]};
  }
  return text;
}

::testing::AssertionResult same(const std::uint8_t* actual, const std::uint8_t* expected, DType dtype,
                                std::size_t count) {
  const std::size_t size = size_of(dtype);
  if (count == 0 || std::memcmp(actual, expected, count * size) == 0) return ::testing::AssertionSuccess();
  std::size_t i = 0;
  while (std::memcmp(actual + i * size, expected + i * size, size) == 0) ++i;
  return ::testing::AssertionFailure()
         << "element " << i << " of " << count << " is 0x" << hex(actual + i * size, size) << ", expected 0x"
         << hex(expected + i * size, size);
}

template <class T>
T reduce_one(Isa isa, DType dtype, ReduceOp op, std::vector<T> values, int divisor) {
  T result{};
  std::vector<const void*> sources;
  for (const T& value : values) sources.push_back(&value);
  find_reduce(isa, dtype, op)(&result, nullptr, sources.data(), static_cast<int>(sources.size()), 1, divisor);
  return result;
}

class KernelSweep : public ::testing::TestWithParam<std::tuple<Isa, DType>> {
 protected:
  static constexpr std::size_t kMaxCount = 300;
  static constexpr std::size_t kMargin = 16;  // elements of canary on both sides
  static constexpr int kMaxSources = 9;

  // Reduces `count` elements starting `shift` elements into each buffer and checks result, copy and
  // what lies around them. `in_place`, `copy_onto`: the source that is the destination, or -1.
  void check(ReduceFunction reduce, const std::vector<Bytes>& inputs, const Bytes& expected, int source_count,
             std::size_t count, std::size_t shift, bool copy, int in_place, int copy_onto, int divisor) {
    const DType dtype = std::get<1>(GetParam());
    const std::size_t size = size_of(dtype);
    const std::size_t start = (kMargin + shift) * size;
    const std::size_t total = (kMaxCount + 2 * kMargin + shift) * size;
    std::vector<Bytes> buffers(source_count);
    std::vector<const void*> sources;
    for (int s = 0; s < source_count; ++s) {
      buffers[s].assign(total, 0xa5);
      std::memcpy(buffers[s].data() + start, inputs[s].data(), kMaxCount * size);
      sources.push_back(buffers[s].data() + start);
    }
    Bytes out_buffer(total, 0x5a), copy_buffer(total, 0x5a);
    Bytes& out = in_place >= 0 ? buffers[in_place] : out_buffer;
    Bytes& also = copy_onto >= 0 ? buffers[copy_onto] : copy_buffer;
    const Bytes out_before = out, also_before = also;
    reduce(out.data() + start, copy ? also.data() + start : nullptr, sources.data(), source_count, count,
           divisor);
    const auto verify = [&](const Bytes& buffer, const Bytes& before) {
      ASSERT_TRUE(same(buffer.data() + start, expected.data(), dtype, count));
      ASSERT_EQ(std::memcmp(buffer.data(), before.data(), start), 0) << "wrote before the result";
      const std::size_t end = start + count * size;
      ASSERT_EQ(std::memcmp(buffer.data() + end, before.data() + end, total - end), 0)
          << "wrote behind the result";
    };
    verify(out, out_before);
    if (copy) {
      verify(also, also_before);
    } else {
      ASSERT_TRUE(copy_buffer == also_before || copy_onto >= 0);
    }
  }
};

TEST_P(KernelSweep, equals_the_reference_in_every_shape) {
  const auto [isa, dtype] = GetParam();
  const std::size_t lengths[] = {0,  1,  2,  3,  4,  5,  7,  8,   9,   15,  16,  17,  23,
                                 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 255, 257, 300};
  std::mt19937_64 random(static_cast<unsigned>(dtype));
  std::vector<Bytes> inputs(kMaxSources, Bytes(kMaxCount * size_of(dtype)));
  for (Bytes& input : inputs) {
    for (std::size_t i = 0; i < kMaxCount; ++i) put_random(dtype, input.data() + i * size_of(dtype), random);
  }
  for (const ReduceOp op : ops_of(dtype)) {
    const ReduceFunction reduce = find_reduce(isa, dtype, op);
    ASSERT_NE(reduce, nullptr);
    for (int n = 1; n <= kMaxSources; ++n) {
      // The group's size is the usual divisor; others must do as well (33000 and 1 leave the fast path).
      const int divisors[] = {n, 3, 1, 4, 33000};
      for (const int divisor : divisors) {
        if (op != ReduceOp::kAvg && divisor != n) continue;
        Bytes expected(kMaxCount * size_of(dtype));
        std::vector<const std::uint8_t*> pointers;
        for (int s = 0; s < n; ++s) pointers.push_back(inputs[s].data());
        reference::reference_reduce(dtype, op, expected.data(), pointers, kMaxCount, divisor);
        for (const std::size_t count : lengths) {
          SCOPED_TRACE(std::string(name_of(op)) + " of " + std::to_string(n) + " sources, count " +
                       std::to_string(count) + ", divisor " + std::to_string(divisor));
          const std::size_t shift = count % 5;  // lengths and misalignments go through all pairs mod 5
          check(reduce, inputs, expected, n, count, shift, false, -1, -1, divisor);
          check(reduce, inputs, expected, n, count, shift + 1, true, -1, -1, divisor);
          check(reduce, inputs, expected, n, count, shift, true, 0, -1, divisor);
          check(reduce, inputs, expected, n, count, shift + 2, true, n - 1, 0, divisor);
          check(reduce, inputs, expected, n, count, 0, true, -1, n / 2, divisor);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Sources that each begin somewhere else relative to a vector, in all combinations.
TEST_P(KernelSweep, sources_of_different_alignment) {
  const auto [isa, dtype] = GetParam();
  const std::size_t size = size_of(dtype);
  std::mt19937_64 random(7);
  Bytes a(kMaxCount * size), b(kMaxCount * size), expected(kMaxCount * size), out(kMaxCount * size);
  for (std::size_t i = 0; i < kMaxCount; ++i) {
    put_random(dtype, a.data() + i * size, random);
    put_random(dtype, b.data() + i * size, random);
  }
  constexpr std::size_t kCount = 150;
  for (std::size_t from_a = 0; from_a < 9; ++from_a) {
    for (std::size_t from_b = 0; from_b < 9; ++from_b) {
      const void* sources[] = {a.data() + from_a * size, b.data() + from_b * size};
      reference::reference_reduce(dtype, ReduceOp::kSum, expected.data(),
                                  {a.data() + from_a * size, b.data() + from_b * size}, kCount, 1);
      std::uint8_t* to = out.data() + (from_a + from_b) % 7 * size;
      find_reduce(isa, dtype, ReduceOp::kSum)(to, nullptr, sources, 2, kCount, 1);
      ASSERT_TRUE(same(to, expected.data(), dtype, kCount));
    }
  }
}

// Memory that ends at an unmapped page: reading or writing one byte too many is fatal.
TEST_P(KernelSweep, touches_nothing_beyond_the_ends) {
  const auto [isa, dtype] = GetParam();
  const std::size_t size = size_of(dtype);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  constexpr int kBuffers = 5;  // three sources, result, copy
  auto* memory = static_cast<std::uint8_t*>(
      mmap(nullptr, (2 * kBuffers + 1) * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(memory), MAP_FAILED);
  std::uint8_t* pages[kBuffers];
  for (int i = 0; i < kBuffers; ++i) {
    pages[i] = memory + (2 * i + 1) * page;
    ASSERT_EQ(mprotect(pages[i], page, PROT_READ | PROT_WRITE), 0);
    std::memset(pages[i], 1, page);
  }
  for (const ReduceOp op : ops_of(dtype)) {
    for (std::size_t count = 1; count <= 140; ++count) {
      for (const bool at_end : {true, false}) {
        const std::size_t offset = at_end ? page - count * size : 0;
        const void* sources[] = {pages[0] + offset, pages[1] + offset, pages[2] + offset};
        for (const int n : {2, 3}) {
          find_reduce(isa, dtype, op)(pages[3] + offset, pages[4] + offset, sources, n, count, n);
        }
        ASSERT_EQ(std::memcmp(pages[3] + offset, pages[4] + offset, count * size), 0);
      }
    }
  }
  munmap(memory, (2 * kBuffers + 1) * page);
}

std::string sweep_name(const ::testing::TestParamInfo<std::tuple<Isa, DType>>& info) {
  return std::string(name_of(std::get<0>(info.param))) + "_" + name_of(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Kernels, KernelSweep,
                         ::testing::Combine(::testing::ValuesIn(available_isas()),
                                            ::testing::ValuesIn(reducible_dtypes())),
                         sweep_name);

class KernelValues : public ::testing::TestWithParam<Isa> {};

TEST_P(KernelValues, every_16_bit_pattern_alone_and_with_another) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const reference::Format16& format = dtype == DType::kFloat16 ? reference::kHalf : reference::kBFloat16;
    std::vector<std::uint16_t> all(0x10000), shuffled(0x10000), out(0x10000), expected(0x10000);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = shuffled[i] = static_cast<std::uint16_t>(i);
    const void* alone[] = {all.data()};
    find_reduce(GetParam(), dtype, ReduceOp::kSum)(out.data(), nullptr, alone, 1, all.size(), 1);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool nan = std::isnan(format.decode(all[i]));
      ASSERT_EQ(out[i], nan ? format.canonical_nan : all[i]) << name_of(dtype);
    }
    std::mt19937_64 random(3);
    for (int round = 0; round < 4; ++round) {
      std::shuffle(shuffled.begin(), shuffled.end(), random);
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
        const void* two[] = {all.data(), shuffled.data()};
        find_reduce(GetParam(), dtype, op)(out.data(), nullptr, two, 2, all.size(), 3);
        for (std::size_t i = 0; i < all.size(); ++i) {
          ASSERT_EQ(out[i], reference::reduce_16(format, op, {all[i], shuffled[i]}, 3))
              << name_of(dtype) << " " << name_of(op) << std::hex << " " << all[i] << " " << shuffled[i];
        }
      }
    }
  }
}

TEST_P(KernelValues, sixteen_bit_sums_round_once) {
  const auto bf16 = [&](std::vector<double> values) {
    std::vector<std::uint16_t> bits;
    for (const double value : values) bits.push_back(reference::kBFloat16.encode(value));
    return reference::kBFloat16.decode(reduce_one(GetParam(), DType::kBFloat16, ReduceOp::kSum, bits, 1));
  };
  EXPECT_EQ(bf16({256, 1, 1, 1}), 260) << "259 is a tie; rounding at every step would give 256";
  EXPECT_EQ(bf16({256, 1}), 256);
  const auto fp16 = [&](std::vector<double> values) {
    std::vector<std::uint16_t> bits;
    for (const double value : values) bits.push_back(reference::kHalf.encode(value));
    return reference::kHalf.decode(reduce_one(GetParam(), DType::kFloat16, ReduceOp::kSum, bits, 1));
  };
  EXPECT_EQ(fp16({65504, 65504, -65504}), 65504) << "the accumulator is wider than the type";
  EXPECT_EQ(fp16({65504, 15}), 65504);
  EXPECT_EQ(fp16({65504, 16}), INFINITY);
  EXPECT_EQ(fp16({0x1p-24, 0x1p-24}), 0x1p-23) << "subnormals are kept";
}

TEST_P(KernelValues, float_averages_divide) {
  const auto average = [&](std::vector<float> values) {
    const auto n = static_cast<int>(values.size());
    return reduce_one(GetParam(), DType::kFloat32, ReduceOp::kAvg, values, n);
  };
  EXPECT_EQ(average({1, 1, 3}), 5.0f / 3.0f) << "not 5 * (1/3)";
  EXPECT_EQ(average({7, 7, 7}), 7.0f);
  EXPECT_EQ(average({0x1p-149f, 0x1p-149f}), 0x1p-149f);
  EXPECT_EQ(average({0x1p-149f, 0.0f}), 0.0f) << "a tie between zero and the least subnormal";
}

TEST_P(KernelValues, nan_and_zeros) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::uint32_t odd_nans[] = {0xffc00000, 0x7f800001, 0xffffffff, 0x7fc12345};
  for (const ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
    for (const std::uint32_t bits : odd_nans) {
      const auto odd = std::bit_cast<float>(bits);
      for (const std::vector<float>& values : {std::vector{odd, 1.0f}, std::vector{1.0f, odd},
                                               std::vector{odd, nan}, std::vector{1.0f, odd, 2.0f}}) {
        const float result = reduce_one(GetParam(), DType::kFloat32, op, values, 2);
        EXPECT_EQ(std::bit_cast<std::uint32_t>(result), 0x7fc00000u) << name_of(op);
      }
    }
  }
  EXPECT_EQ(std::bit_cast<std::uint32_t>(
                reduce_one(GetParam(), DType::kFloat32, ReduceOp::kSum, std::vector{INFINITY, -INFINITY}, 1)),
            0x7fc00000u);
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_TRUE(std::signbit(reduce_one(GetParam(), DType::kFloat32, op, std::vector{-0.0f, 0.0f}, 1)));
    EXPECT_FALSE(std::signbit(reduce_one(GetParam(), DType::kFloat32, op, std::vector{0.0f, -0.0f}, 1)));
    EXPECT_TRUE(std::signbit(reduce_one(GetParam(), DType::kFloat64, op, std::vector{-0.0, 0.0, -0.0}, 1)));
  }
}

TEST_P(KernelValues, integer_averages_are_wide_and_truncate) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  const auto average = [&](std::vector<std::int64_t> values) {
    const auto n = static_cast<int>(values.size());
    return reduce_one(GetParam(), DType::kInt64, ReduceOp::kAvg, values, n);
  };
  EXPECT_EQ(average({kMax, kMax}), kMax);
  EXPECT_EQ(average({kMin, kMin}), kMin);
  EXPECT_EQ(average({kMax, kMin}), 0) << "-1/2 truncates to zero";
  EXPECT_EQ(average({kMax, kMax, kMax}), kMax);
  EXPECT_EQ(average({kMin, kMin, kMin + 2}), kMin + 1) << "-x.33 truncates towards zero";
  EXPECT_EQ(average({-3, 0}), -1);
  EXPECT_EQ(average({-3, 0, -2}), -1);
  EXPECT_EQ(average({3, 0, 2}), 1);
  constexpr std::int32_t kMax32 = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kMin32 = std::numeric_limits<std::int32_t>::min();
  const auto average32 = [&](std::vector<std::int32_t> values) {
    const auto n = static_cast<int>(values.size());
    return reduce_one(GetParam(), DType::kInt32, ReduceOp::kAvg, values, n);
  };
  EXPECT_EQ(average32({kMax32, kMax32, kMax32}), kMax32);
  EXPECT_EQ(average32({kMax32, kMax32, kMax32 - 1}), kMax32 - 1) << "just below a whole quotient";
  EXPECT_EQ(average32({kMin32, kMin32, kMin32 + 1}), kMin32 + 1);
  EXPECT_EQ(
      reduce_one(GetParam(), DType::kUInt8, ReduceOp::kAvg, std::vector<std::uint8_t>{255, 255, 254}, 3),
      254);
  EXPECT_EQ(
      reduce_one(GetParam(), DType::kInt8, ReduceOp::kAvg, std::vector<std::int8_t>{-128, -128, -127}, 3),
      -127);
}

// The fast paths for short integers hold for up to thousands of sources, and past them all the same.
TEST_P(KernelValues, averages_of_very_many_sources) {
  const auto check = [&](auto value, DType dtype, int n) {
    using T = decltype(value);
    std::vector<T> values(n, value);
    values.back() = static_cast<T>(value > 0 ? value - 1 : value + 1);  // just short of the whole quotient
    const T expected = reference::reduce_integer<T>(ReduceOp::kAvg, values, n);
    EXPECT_EQ(reduce_one(GetParam(), dtype, ReduceOp::kAvg, values, n), expected)
        << name_of(dtype) << " × " << n;
  };
  for (const int n : {255, 256, 257, 16383, 16384, 16385, 32767, 32768, 32769, 40000}) {
    check(std::int8_t{-128}, DType::kInt8, n);
    check(std::uint8_t{255}, DType::kUInt8, n);
    check(std::int16_t{-32768}, DType::kInt16, n);
    check(std::int16_t{32767}, DType::kInt16, n);
    check(std::numeric_limits<std::int32_t>::min(), DType::kInt32, n);
    check(std::numeric_limits<std::int32_t>::max(), DType::kInt32, n);
    check(std::numeric_limits<std::int64_t>::max(), DType::kInt64, n);
  }
}

TEST_P(KernelValues, integers_wrap) {
  EXPECT_EQ(reduce_one(GetParam(), DType::kInt8, ReduceOp::kSum, std::vector<std::int8_t>{127, 1}, 1), -128);
  EXPECT_EQ(reduce_one(GetParam(), DType::kUInt8, ReduceOp::kProduct, std::vector<std::uint8_t>{16, 17}, 1),
            16);
  EXPECT_EQ(reduce_one(GetParam(), DType::kInt64, ReduceOp::kSum,
                       std::vector<std::int64_t>{std::numeric_limits<std::int64_t>::max(), 1}, 1),
            std::numeric_limits<std::int64_t>::min());
}

TEST_P(KernelValues, any_byte_but_zero_is_true) {
  const auto reduce = [&](ReduceOp op, std::vector<std::uint8_t> values) {
    return reduce_one(GetParam(), DType::kBool, op, values, 1);
  };
  EXPECT_EQ(reduce(ReduceOp::kSum, {2, 0}), 1);
  EXPECT_EQ(reduce(ReduceOp::kSum, {0x80}), 1);
  EXPECT_EQ(reduce(ReduceOp::kBand, {1, 2}), 1) << "not 1 & 2";
  EXPECT_EQ(reduce(ReduceOp::kBxor, {1, 2}), 0);
  EXPECT_EQ(reduce(ReduceOp::kProduct, {255, 0}), 0);
  EXPECT_EQ(reduce(ReduceOp::kMin, {3, 4}), 1);
  EXPECT_EQ(reduce(ReduceOp::kMax, {0, 0}), 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, KernelValues, ::testing::ValuesIn(available_isas()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace fccl::cpu
