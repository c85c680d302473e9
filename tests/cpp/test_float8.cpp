// The 8-bit floats against arithmetic in double: every code, every midpoint, and what lies beside them.
#include "codec/float8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace fccl {
namespace {

using codec::Float8E4M3;
using codec::Float8E5M2;

static_assert(codec::to_float8_e4m3(448.0f).bits == 0x7e);
static_assert(codec::to_float8_e5m2(1.0f).bits == 0x3c);
static_assert(codec::to_float(Float8E4M3{0x01}) == 0x1p-9f);
static_assert(codec::to_float(Float8E5M2{0x81}) == -0x1p-16f);

// A format by what the specification says of it, in double.
struct Format8 {
  int mantissa_bits;
  int bias;
  int largest_code;  // of the finite numbers

  double decode(int code) const {  // of magnitudes; a code beyond the largest goes on as if it were a number
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  }
  // The nearest number; of two, the one with an even code. largest_code + 1: beyond them.
  int encode(double magnitude) const {
    for (int code = 0; code <= largest_code; ++code) {
      const double middle = (decode(code) + decode(code + 1)) / 2;
      if (magnitude < middle || (magnitude == middle && code % 2 == 0)) return code;
    }
    return largest_code + 1;
  }
};
constexpr Format8 kE4M3{3, 7, 0x7e};
constexpr Format8 kE5M2{2, 15, 0x7b};

TEST(Float8, every_e4m3_widens_exactly) {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = codec::to_float(Float8E4M3{static_cast<std::uint8_t>(bits)});
    const int magnitude = bits & 0x7f;
    const std::uint32_t sign = bits >= 0x80 ? 0x80000000u : 0u;
    const std::uint32_t expected =
        magnitude == 0x7f ? 0x7fc00000u
                          : std::bit_cast<std::uint32_t>(static_cast<float>(kE4M3.decode(magnitude)));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), sign | expected) << std::hex << bits;
  }
}

TEST(Float8, every_e5m2_widens_exactly) {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = codec::to_float(Float8E5M2{static_cast<std::uint8_t>(bits)});
    const int magnitude = bits & 0x7f;
    ASSERT_EQ(std::signbit(value), bits >= 0x80);
    if (magnitude > 0x7c) {
      ASSERT_TRUE(std::isnan(value));
    } else if (magnitude == 0x7c) {
      ASSERT_TRUE(std::isinf(value));
    } else {
      ASSERT_EQ(std::fabs(value), kE5M2.decode(magnitude));
    }
  }
}

template <class Narrow>
void check_around_every_value(const Format8& format, int beyond, Narrow narrow) {
  for (int code = 0; code <= format.largest_code; ++code) {
    const auto value = static_cast<float>(format.decode(code));
    const auto middle = static_cast<float>((format.decode(code) + format.decode(code + 1)) / 2);
    for (const float center : {value, middle}) {
      for (const float probe :
           {std::nextafterf(center, -INFINITY), center, std::nextafterf(center, INFINITY)}) {
        const int nearest = format.encode(std::fabs(probe));
        const int expected = nearest > format.largest_code ? beyond : nearest;
        ASSERT_EQ(narrow(probe), expected | (std::signbit(probe) ? 0x80 : 0)) << probe;
        ASSERT_EQ(narrow(-probe), expected | (std::signbit(probe) ? 0 : 0x80)) << -probe;
      }
    }
  }
}

TEST(Float8, e4m3_rounds_to_nearest_even) {
  check_around_every_value(kE4M3, 0x7f, [](float value) { return int{codec::to_float8_e4m3(value).bits}; });
}

TEST(Float8, e5m2_rounds_to_nearest_even) {
  check_around_every_value(kE5M2, 0x7c, [](float value) { return int{codec::to_float8_e5m2(value).bits}; });
}

TEST(Float8, floats_across_the_whole_range) {
  for (std::uint64_t step = 0; step < 0x100000000u; step += 62989) {  // a prime: all low bits appear
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(step));
    const int sign = std::signbit(value) ? 0x80 : 0;
    const int e4m3 = kE4M3.encode(std::fabs(value));
    const int e5m2 = kE5M2.encode(std::fabs(value));
    ASSERT_EQ(codec::to_float8_e4m3(value).bits,
              sign | (std::isnan(value) || e4m3 > kE4M3.largest_code ? 0x7f : e4m3))
        << value;
    const int expected = std::isnan(value) ? 0x7f : e5m2 > kE5M2.largest_code ? 0x7c : e5m2;
    ASSERT_EQ(codec::to_float8_e5m2(value).bits, sign | expected) << value;
  }
}

TEST(Float8, ends_of_the_range) {
  EXPECT_EQ(codec::to_float8_e4m3(464.0f).bits, 0x7e) << "a tie between the largest number and NaN";
  EXPECT_EQ(codec::to_float8_e4m3(std::nextafterf(464.0f, 1e9f)).bits, 0x7f);
  EXPECT_EQ(codec::to_float8_e4m3(INFINITY).bits, 0x7f);
  EXPECT_EQ(codec::to_float8_e4m3(-INFINITY).bits, 0xff);
  EXPECT_EQ(codec::to_float8_e4m3(0x1p-10f).bits, 0x00) << "a tie between zero and the least subnormal";
  EXPECT_EQ(codec::to_float8_e5m2(std::nextafterf(61440.0f, 0.0f)).bits, 0x7b);
  EXPECT_EQ(codec::to_float8_e5m2(61440.0f).bits, 0x7c) << "a tie between the largest number and 2^16";
  EXPECT_EQ(codec::to_float8_e5m2(-INFINITY).bits, 0xfc);
  EXPECT_EQ(codec::to_float8_e5m2(-0.0f).bits, 0x80);
  EXPECT_EQ(codec::to_float8_e5m2(std::numeric_limits<float>::denorm_min()).bits, 0x00);
}

}  // namespace
}  // namespace fccl
