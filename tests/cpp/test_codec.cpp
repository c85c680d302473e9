// float16 and bfloat16 conversions against arithmetic in double.
#include "codec/float16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "reference.h"

namespace fccl {
namespace {

using codec::BFloat16;
using codec::Half;
using reference::Format16;
using reference::kBFloat16;
using reference::kHalf;

// Usable at compile time.
static_assert(codec::to_half(1.0f).bits == 0x3c00);
static_assert(codec::to_float(Half{0x0001}) == 0x1p-24f);
static_assert(codec::to_bfloat16(1.00390625f).bits == 0x3f80, "a tie goes to the even mantissa");
static_assert(codec::to_float(BFloat16{0xc000}) == -2.0f);

bool is_nan16(std::uint16_t bits, std::uint16_t infinity) { return (bits & 0x7fff) > infinity; }

TEST(Codec, every_half_widens_exactly) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = codec::to_float(Half{half});
    if (is_nan16(half, 0x7c00)) {
      // Quiet, with sign and payload, as the conversion instructions give it.
      const std::uint32_t expected = (bits & 0x8000u) << 16 | 0x7fc00000u | (bits & 0x3ffu) << 13;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(value), expected) << std::hex << bits;
    } else {
      const auto expected = static_cast<float>(kHalf.decode(half));
      ASSERT_EQ(std::bit_cast<std::uint32_t>(value), std::bit_cast<std::uint32_t>(expected))
          << std::hex << bits;
    }
  }
}

TEST(Codec, every_bfloat16_widens_exactly) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = codec::to_float(BFloat16{static_cast<std::uint16_t>(bits)});
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), bits << 16);
  }
}

TEST(Codec, every_pattern_survives_the_round_trip) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const std::uint16_t half = codec::to_half(codec::to_float(Half{pattern})).bits;
    ASSERT_EQ(half, is_nan16(pattern, 0x7c00) ? pattern | 0x0200 : pattern);
    const std::uint16_t bfloat = codec::to_bfloat16(codec::to_float(BFloat16{pattern})).bits;
    ASSERT_EQ(bfloat, is_nan16(pattern, 0x7f80) ? 0x7fc0 : pattern);
  }
}

// Every representable value, every midpoint of two, and the floats just beside these.
template <class Narrow>
void check_around_every_value(const Format16& format, std::uint16_t infinity, Narrow narrow) {
  for (std::uint16_t bits = 0; bits < infinity; ++bits) {
    const auto value = static_cast<float>(format.decode(bits));
    const double next =
        bits + 1 == infinity ? std::ldexp(1.0, format.max_exponent + 1) : format.decode(bits + 1);
    const auto middle = static_cast<float>((format.decode(bits) + next) / 2);
    for (const float center : {value, middle}) {
      for (const float probe :
           {std::nextafterf(center, -INFINITY), center, std::nextafterf(center, INFINITY)}) {
        ASSERT_EQ(narrow(probe), format.encode(probe)) << probe;
        ASSERT_EQ(narrow(-probe), format.encode(-probe)) << -probe;
      }
    }
  }
}

TEST(Codec, half_rounds_to_nearest_even) {
  check_around_every_value(kHalf, 0x7c00, [](float value) { return codec::to_half(value).bits; });
}

TEST(Codec, bfloat16_rounds_to_nearest_even) {
  check_around_every_value(kBFloat16, 0x7f80, [](float value) { return codec::to_bfloat16(value).bits; });
}

TEST(Codec, floats_across_the_whole_range) {
  for (std::uint64_t step = 0; step < 0x100000000u; step += 1999) {  // a prime: all low bits appear
    const auto bits = static_cast<std::uint32_t>(step);
    const auto value = std::bit_cast<float>(bits);
    const std::uint16_t half = codec::to_half(value).bits;
    const std::uint16_t bfloat = codec::to_bfloat16(value).bits;
    if (std::isnan(value)) {
      ASSERT_EQ(half, (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
      ASSERT_EQ(bfloat, 0x7fc0);
    } else {
      ASSERT_EQ(half, kHalf.encode(value)) << value;
      ASSERT_EQ(bfloat, kBFloat16.encode(value)) << value;
    }
  }
}

TEST(Codec, ends_of_the_range) {
  EXPECT_EQ(codec::to_half(65504.0f).bits, 0x7bff);
  EXPECT_EQ(codec::to_half(std::nextafterf(65520.0f, 0.0f)).bits, 0x7bff);
  EXPECT_EQ(codec::to_half(65520.0f).bits, 0x7c00) << "a tie between the largest number and 2^16";
  EXPECT_EQ(codec::to_half(1e30f).bits, 0x7c00);
  EXPECT_EQ(codec::to_half(-INFINITY).bits, 0xfc00);
  EXPECT_EQ(codec::to_half(0x1p-25f).bits, 0x0000) << "a tie between zero and the least subnormal";
  EXPECT_EQ(codec::to_half(std::nextafterf(0x1p-25f, 1.0f)).bits, 0x0001);
  EXPECT_EQ(codec::to_half(-0.0f).bits, 0x8000);
  EXPECT_EQ(codec::to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(codec::to_bfloat16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  EXPECT_EQ(codec::to_bfloat16(-0.0f).bits, 0x8000);
}

}  // namespace
}  // namespace fccl
