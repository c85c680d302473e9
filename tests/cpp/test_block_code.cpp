// Scaled blocks: what the codes mean, in scalars, and the kernels of every instruction set against that.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "codec/block.h"
#include "cpu/kernels/block_code.h"

namespace fccl {
namespace {

using codec::BFloat16Code;
using codec::BlockFormat;
using codec::BlockScale;
using codec::Float16Code;
using codec::Float8E4M3Code;
using codec::Float8E5M2Code;
using codec::Int8Code;

constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

template <class Code>
BlockScale scale_of(const std::vector<float>& values) {
  std::uint32_t largest = 0;
  for (const float value : values)
    largest =
        codec::generic::larger_magnitude(largest, codec::generic::finite_magnitude<std::uint32_t>(value));
  return Code::scale_of(largest);
}

template <class Code>
std::uint32_t encode(float value, BlockScale scale) {
  return codec::generic::encode_scaled<Code, std::uint32_t>(value, scale.inverse);
}
template <class Code>
float decode(std::uint32_t code, BlockScale scale) {
  return codec::generic::decode_scaled<Code, float>(code, scale.scale);
}

// A block there and back.
template <class Code>
std::vector<float> through(const std::vector<float>& values) {
  const BlockScale scale = scale_of<Code>(values);
  std::vector<float> out;
  for (const float value : values) out.push_back(decode<Code>(encode<Code>(value, scale), scale));
  return out;
}

template <class Code>
class BlockCode : public ::testing::Test {};
using Codes = ::testing::Types<BFloat16Code, Float16Code, Int8Code, Float8E4M3Code, Float8E5M2Code>;
const char* name_of(BlockFormat format) {
  constexpr const char* kNames[] = {"bfloat16", "float16", "int8", "e4m3", "e5m2"};
  return kNames[static_cast<int>(format)];
}
struct CodeNames {
  template <class Code>
  static std::string GetName(int) {
    return name_of(Code::kFormat);
  }
};
TYPED_TEST_SUITE(BlockCode, Codes, CodeNames);

// The most that one rounding moves an element, relative to itself and to the block's largest magnitude.
struct Bound {
  double of_element, of_largest;
};
template <class Code>
constexpr Bound bound_of() {
  switch (Code::kFormat) {
    case BlockFormat::kBFloat16: return {0x1p-8, 0x1p-133};
    case BlockFormat::kFloat16:
      return {0x1p-11, 0x1p-39};  // half a unit of the least subnormal, 2^-24 / 2^14
    case BlockFormat::kInt8: return {0x1p-22, 0.5 / 127};
    case BlockFormat::kFloat8E4M3: return {0x1p-4 + 0x1p-22, 0x1p-10 / 448 * 1.0001};
    case BlockFormat::kFloat8E5M2: return {0x1p-3 + 0x1p-22, 0x1p-17 / 57344 * 1.0001};
  }
  return {};
}

TYPED_TEST(BlockCode, error_is_within_half_a_step) {
  using Code = TypeParam;
  std::mt19937_64 random(5);
  for (int round = 0; round < 400; ++round) {
    // Magnitudes from 2^-79 to 2^126, and within the block over a range that grows with the rounds.
    const double base = std::ldexp(1.0, static_cast<int>(random() % 205) - 79);
    std::vector<float> values(128);
    for (float& value : values) {
      const double spread = std::ldexp(1.0, -static_cast<int>(random() % (1 + round / 8)));
      value = static_cast<float>(std::uniform_real_distribution<>(-1, 1)(random) * spread * base);
    }
    values[round % 128] = static_cast<float>(base);
    const std::vector<float> out = through<Code>(values);
    const Bound bound = bound_of<Code>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double error = std::fabs(double{out[i]} - double{values[i]});
      ASSERT_LE(error, bound.of_element * std::fabs(values[i]) + bound.of_largest * base)
          << values[i] << " became " << out[i] << " where the largest is " << base;
    }
  }
}

TYPED_TEST(BlockCode, what_is_not_finite_spares_its_neighbours) {
  using Code = TypeParam;
  const std::vector<float> alone = through<Code>({1.0f, -0.25f, 0.75f});
  const std::vector<float> out = through<Code>({1.0f, -0.25f, 0.75f, kInf, -kInf, kNaN, -kNaN});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], alone[i]);
  const bool keeps_inf = Code::kFormat == BlockFormat::kBFloat16 || Code::kFormat == BlockFormat::kFloat16 ||
                         Code::kFormat == BlockFormat::kFloat8E5M2;
  EXPECT_EQ(keeps_inf, out[3] == kInf && out[4] == -kInf);
  EXPECT_EQ(!keeps_inf, std::isnan(out[3]) && std::isnan(out[4]));
  EXPECT_TRUE(std::isnan(out[5]) && std::isnan(out[6]));
}

TYPED_TEST(BlockCode, nothing_but_what_is_not_finite) {
  using Code = TypeParam;
  for (const float value : {kInf, -kInf, kNaN}) {
    for (const float out : through<Code>({value, 0.0f, value, 0x1p-90f}))
      EXPECT_TRUE(!std::isfinite(out) || std::fabs(out) <= 0x1p-89f);
    EXPECT_FALSE(std::isfinite(through<Code>({value, 0.0f})[0]));
  }
}

TYPED_TEST(BlockCode, one_nan_whatever_the_processor_makes_of_it) {
  using Code = TypeParam;
  for (const BlockScale scale : {scale_of<Code>({1.0f}), Code::scale_of(0)}) {
    const std::uint32_t code = encode<Code>(kNaN, scale);
    for (const std::uint32_t nan : {0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7fc12345u})
      EXPECT_EQ(encode<Code>(std::bit_cast<float>(nan), scale), code) << std::hex << nan;
  }
  if (!Code::kScaled) return;
  EXPECT_EQ(encode<Code>(kInf, Code::scale_of(0)), encode<Code>(kNaN, Code::scale_of(0))) << "inf * 0";
}

TYPED_TEST(BlockCode, codes_fit_their_bytes_and_padding_is_zero) {
  using Code = TypeParam;
  for (const float value : {0.0f, -0.0f, 1.0f, -1.0f, kInf, -kInf, kNaN, -kNaN, kMax, -kMax}) {
    const BlockScale scale = scale_of<Code>({value});
    EXPECT_LT(encode<Code>(value, scale), 1u << (8 * Code::kBytes)) << value;
  }
  EXPECT_EQ(encode<Code>(0.0f, scale_of<Code>({3.0f})), 0u);
  EXPECT_EQ(encode<Code>(0.0f, Code::scale_of(0)), 0u);
}

TYPED_TEST(BlockCode, ends_of_the_range) {
  using Code = TypeParam;
  const std::vector<float> out = through<Code>({kMax, -kMax, 0.0f, 1.0f});
  if (Code::kFormat == BlockFormat::kBFloat16 || Code::kFormat == BlockFormat::kFloat16) {
    EXPECT_EQ(out[0], kInf) << "as float32 to any 16-bit float: the nearest is 2^128";
    EXPECT_EQ(out[1], -kInf);
  } else {
    EXPECT_NEAR(out[0] / kMax, 1, 1e-6);
    EXPECT_NEAR(out[1] / kMax, -1, 1e-6);
  }
  EXPECT_EQ(out[2], 0.0f);
  if (!Code::kScaled) return;
  // The least block that is sent, and the largest that is not.
  EXPECT_NEAR(through<Code>({0x1p-80f})[0] / 0x1p-80f, 1, 1e-6);
  EXPECT_EQ(through<Code>({std::nextafterf(0x1p-80f, 0.0f)})[0], 0.0f);
  EXPECT_EQ(through<Code>({0x1p-149f, -0x1p-130f})[0], 0.0f);
  EXPECT_EQ(through<Code>({1.0f, 0x1p-149f, -0x1p-130f})[1], 0.0f) << "subnormals beside a number";
}

// Every largest magnitude of every exponent: the scale is finite and normal, and so is what comes back.
TYPED_TEST(BlockCode, scales_are_normal_numbers) {
  using Code = TypeParam;
  if (!Code::kScaled) return;
  const auto check = [](std::uint32_t largest) {
    const BlockScale scale = Code::scale_of(largest);
    ASSERT_TRUE(std::isnormal(scale.scale) && std::isnormal(scale.inverse)) << std::hex << largest;
    const auto value = std::bit_cast<float>(largest);
    const float out = decode<Code>(encode<Code>(value, scale), scale);
    const bool to_infinity = Code::kFormat == BlockFormat::kFloat16 && largest >= 0x7f7ff000u;
    ASSERT_EQ(std::isfinite(out), !to_infinity) << std::hex << largest;
  };
  for (std::uint32_t largest = codec::kLeastMagnitude; largest < codec::kInfinityBits; largest += 40093)
    check(largest);
  for (std::uint32_t below = 1; below < 70000; ++below) check(codec::kInfinityBits - below);
}

TYPED_TEST(BlockCode, remainders_are_exact_and_finite) {
  using Code = TypeParam;
  const auto remainder = [](float value, BlockScale scale, float previous) {
    return codec::generic::remainder_of<Code, std::uint32_t>(value, encode<Code>(value, scale), scale.scale,
                                                             previous);
  };
  const BlockScale scale = scale_of<Code>({1.0f});
  for (float value = -1; value <= 1; value += 0.0371f) {
    const float rest = remainder(value, scale, 7.0f);
    EXPECT_EQ(rest, value - decode<Code>(encode<Code>(value, scale), scale));
  }
  for (const float value : {kInf, -kInf, kNaN}) EXPECT_EQ(remainder(value, scale, 7.0f), 7.0f);
  // A number that comes out as infinity leaves nothing that could be sent later.
  const BlockScale widest = scale_of<Code>({kMax});
  EXPECT_TRUE(std::isfinite(remainder(kMax, widest, 7.0f)));
  EXPECT_TRUE(std::isfinite(codec::generic::remainder_with<Code>(kMax, encode<Code>(kMax, widest),
                                                                 widest.scale, 3.0f, 7.0f, 7.0f)));
  EXPECT_EQ(
      codec::generic::remainder_with<Code>(kInf, encode<Code>(kInf, scale), scale.scale, 3.0f, 7.0f, 7.0f),
      7.0f);
}

TEST(BlockCodes, float16_loses_neither_large_nor_small) {
  const std::vector<float> out = through<Float16Code>({1e6f, 12345.678f, 1.0f, 1e-4f});
  EXPECT_NEAR(out[0] / 1e6f, 1, 0x1p-11);
  EXPECT_NEAR(out[3] / 1e-4f, 1, 0x1p-5) << "2^-33 of the largest: a subnormal, with five bits";
  EXPECT_NEAR(through<Float16Code>({1e-8f})[0] / 1e-8f, 1, 0x1p-11);
  for (const float power : {0x1p-80f, 0x1p-3f, 0x1p100f}) {  // exact for what float16 holds
    EXPECT_EQ(through<Float16Code>({power, power * 1.5f})[1], power * 1.5f);
  }
}

TEST(BlockCodes, int8_codes) {
  const BlockScale unit{1, 1};
  for (int code = -127; code <= 127; ++code) {
    EXPECT_EQ(encode<Int8Code>(static_cast<float>(code), unit), static_cast<std::uint32_t>(code) & 0xff);
    EXPECT_EQ(decode<Int8Code>(static_cast<std::uint32_t>(code) & 0xff, unit), code);
  }
  EXPECT_EQ(encode<Int8Code>(2.5f, unit), 2u) << "a tie goes to the even number";
  EXPECT_EQ(encode<Int8Code>(3.5f, unit), 4u);
  EXPECT_EQ(encode<Int8Code>(-2.5f, unit), 0xfeu);
  EXPECT_EQ(encode<Int8Code>(127.00001f, unit), 127u);
  EXPECT_EQ(encode<Int8Code>(kInf, unit), 0x80u);
  EXPECT_TRUE(std::isnan(decode<Int8Code>(0x80, unit)));
}

// ---- the kernels ----

using cpu::BlockKernels;
using cpu::CodedRun;
using cpu::Isa;

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (cpu::isa_available(isa)) isas.push_back(isa);
  }
  return isas;
}

// A run in memory that is aligned to nothing, between canaries.
struct CodeRun {
  static constexpr std::size_t kMargin = 67;
  CodeRun(std::size_t count, std::uint32_t block, int code_bytes)
      : blocks((count + block - 1) / block),
        codes(blocks * block * static_cast<std::size_t>(code_bytes) + 2 * kMargin, 0xa5),
        scales(blocks * 4 + 2 * kMargin, 0xa5) {}
  std::uint8_t* code_data() { return codes.data() + kMargin; }
  std::uint8_t* scale_data() { return scales.data() + kMargin; }
  CodedRun source() { return {code_data(), scale_data()}; }
  std::size_t blocks;
  std::vector<std::uint8_t> codes, scales;
};

// What block_code.h promises, element by element.
template <class Code>
struct Reference {
  static void put(CodeRun& run, std::size_t block, std::uint32_t size,
                  const std::vector<std::uint32_t>& codes, float scale) {
    std::uint8_t* slot = run.code_data() + block * size * Code::kBytes;
    std::memset(slot, 0, std::size_t{size} * Code::kBytes);
    for (std::size_t i = 0; i < codes.size(); ++i)
      std::memcpy(slot + i * Code::kBytes, &codes[i], Code::kBytes);  // little-endian
    if (Code::kScaled) std::memcpy(run.scale_data() + 4 * block, &scale, 4);
  }
  static float get(CodeRun& run, std::size_t i, std::uint32_t size) {
    std::uint32_t code = 0;
    std::memcpy(&code, run.code_data() + i * Code::kBytes, Code::kBytes);
    BlockScale scale{1, 1};
    if (Code::kScaled) std::memcpy(&scale.scale, run.scale_data() + i / size * 4, 4);
    return decode<Code>(code, scale);
  }
  static void encode_run(const std::vector<float>& values, float* remainder, std::uint32_t size,
                         CodeRun& run) {
    for (std::size_t block = 0; block < run.blocks; ++block) {
      const std::size_t begin = block * size;
      const std::size_t end = std::min(values.size(), begin + size);
      bool any = false;
      std::vector<float> sums(values.begin() + static_cast<std::ptrdiff_t>(begin),
                              values.begin() + static_cast<std::ptrdiff_t>(end));
      for (std::size_t i = begin; i < end; ++i) {
        any = any || values[i] != 0;
        if (remainder != nullptr) sums[i - begin] += remainder[i];
      }
      if (remainder != nullptr && !any) {
        put(run, block, size, {}, 0);
        continue;
      }
      const BlockScale scale = scale_of<Code>(sums);
      std::vector<std::uint32_t> codes;
      for (const float sum : sums) codes.push_back(encode<Code>(sum, scale));
      put(run, block, size, codes, scale.scale);
      for (std::size_t i = begin; remainder != nullptr && i < end; ++i) {
        remainder[i] =
            codec::generic::remainder_of<Code>(sums[i - begin], codes[i - begin], scale.scale, remainder[i]);
      }
    }
  }
  static bool speaks(CodeRun& run, std::size_t begin, std::size_t end) {
    const std::uint8_t* const codes = run.code_data();
    return std::any_of(codes + begin * Code::kBytes, codes + end * Code::kBytes,
                       [](std::uint8_t byte) { return byte != 0; });
  }
  static void average_runs(std::vector<CodeRun>& sources, std::size_t own, std::size_t count,
                           std::uint32_t size, int divisor, float* remainder, CodeRun& run) {
    const auto ranks = static_cast<float>(divisor);
    for (std::size_t block = 0; block < run.blocks; ++block) {
      const std::size_t begin = block * size;
      const std::size_t end = std::min(count, begin + size);
      const bool others_alone = !speaks(sources[own], begin, end) &&
                                std::any_of(sources.begin(), sources.end(),
                                            [&](CodeRun& source) { return speaks(source, begin, end); });
      std::vector<float> means;
      for (std::size_t i = begin; i < end; ++i) {
        float sum = get(sources[0], i, size);
        for (std::size_t s = 1; s < sources.size(); ++s) sum += get(sources[s], i, size);
        if (remainder != nullptr && others_alone) sum += remainder[i];
        means.push_back(sum / ranks);
      }
      const BlockScale scale = scale_of<Code>(means);
      std::vector<std::uint32_t> codes;
      for (const float mean : means) codes.push_back(encode<Code>(mean, scale));
      put(run, block, size, codes, scale.scale);
      for (std::size_t i = begin; remainder != nullptr && i < end; ++i) {
        remainder[i] =
            codec::generic::remainder_with<Code>(means[i - begin], codes[i - begin], scale.scale, ranks,
                                                 others_alone ? 0 : remainder[i], remainder[i]);
      }
    }
  }
};

// Gradients as they come, and worse.
std::vector<float> gradients(std::size_t count, std::uint32_t block, std::mt19937_64& random) {
  std::vector<float> values(count);
  double magnitude = 1;
  std::uint64_t kind = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % block == 0) {
      kind = random() % 8;
      magnitude = std::ldexp(1.0, static_cast<int>(random() % 230) - 120);
    }
    const auto wild = random() % 64;
    values[i] = static_cast<float>(std::normal_distribution<>()(random) * magnitude);
    if (kind == 0) values[i] = 0;
    if (kind == 1) values[i] = -0.0f;
    if (kind == 2) values[i] *= 0x1p-40f;
    if (kind == 3 && wild == 0) values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (kind == 4 && wild < 2) values[i] = wild == 0 ? kInf : -kInf;
    if (kind == 5 && wild < 2) values[i] = wild == 0 ? kNaN : kMax;
  }
  return values;
}

class BlockKernelSweep : public ::testing::TestWithParam<std::tuple<Isa, BlockFormat>> {
 protected:
  template <class Code>
  void check(std::size_t count, std::uint32_t block, int ranks, int divisor, bool feedback) {
    SCOPED_TRACE("count " + std::to_string(count) + ", block " + std::to_string(block) + ", ranks " +
                 std::to_string(ranks) + (feedback ? ", feedback" : ""));
    const BlockKernels& kernels = *cpu::block_kernels(std::get<0>(GetParam()), Code::kFormat);
    const std::size_t shift = count % 5;  // values that begin anywhere
    std::vector<CodeRun> coded, expected;
    std::vector<float> rest(count + shift + 1, 0.125f), expected_rest(count + 1);
    for (int r = 0; r < ranks; ++r) {
      const std::vector<float> values = gradients(count, block, random_);
      std::vector<float> shifted(count + shift + 1, 99.0f);
      std::copy(values.begin(), values.end(), shifted.begin() + static_cast<std::ptrdiff_t>(shift));
      for (std::size_t i = 0; i < count; ++i) {
        rest[i + shift] = expected_rest[i] = i % 7 == 0 ? 0 : values[i] / 300;
        if (!std::isfinite(rest[i + shift])) rest[i + shift] = expected_rest[i] = 1;
      }
      coded.emplace_back(count, block, Code::kBytes);
      expected.emplace_back(count, block, Code::kBytes);
      kernels.encode(shifted.data() + shift, feedback ? rest.data() + shift : nullptr, count, block,
                     coded.back().code_data(), Code::kScaled ? coded.back().scale_data() : nullptr);
      Reference<Code>::encode_run(values, feedback ? expected_rest.data() : nullptr, block, expected.back());
      ASSERT_EQ(coded.back().codes, expected.back().codes);
      ASSERT_EQ(coded.back().scales, expected.back().scales);
      same_floats(rest.data() + shift, expected_rest, count);
      if (HasFatalFailure()) return;
    }
    ASSERT_EQ(rest[count + shift], 0.125f) << "wrote behind the remainder";

    CodeRun mean(count, block, Code::kBytes), expected_mean(count, block, Code::kBytes);
    std::vector<CodedRun> sources;
    for (CodeRun& run : coded) sources.push_back(run.source());
    const int own = static_cast<int>(count) % ranks;
    kernels.mean(sources.data(), ranks, own, count, block, divisor, feedback ? rest.data() + shift : nullptr,
                 mean.code_data(), Code::kScaled ? mean.scale_data() : nullptr);
    Reference<Code>::average_runs(expected, static_cast<std::size_t>(own), count, block, divisor,
                                  feedback ? expected_rest.data() : nullptr, expected_mean);
    ASSERT_EQ(mean.codes, expected_mean.codes);
    ASSERT_EQ(mean.scales, expected_mean.scales);
    same_floats(rest.data() + shift, expected_rest, count);
    for (std::size_t i = 0; feedback && i < count; ++i) ASSERT_TRUE(std::isfinite(rest[i + shift])) << i;

    std::vector<float> out(count + shift + 1, 99.0f);
    kernels.decode(mean.source(), count, block, out.data() + shift);
    std::vector<float> expected_out;
    for (std::size_t i = 0; i < count; ++i)
      expected_out.push_back(Reference<Code>::get(expected_mean, i, block));
    same_floats(out.data() + shift, expected_out, count);
    ASSERT_EQ(out[count + shift], 99.0f) << "wrote behind the values";
  }

  static void same_floats(const float* actual, const std::vector<float>& expected, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(bits_of(actual[i]), bits_of(expected[i])) << i;
  }

  template <class Code>
  void sweep() {
    const std::size_t counts[] = {1,   2,   3,   7,   15,  16,  17,   31,   63,   64,  65,
                                  127, 128, 129, 255, 256, 300, 1023, 1024, 1025, 5000};
    int turn = 0;
    for (const std::size_t count : counts) {
      for (const std::uint32_t block : {64u, 128u, 256u, 1024u}) {
        for (const bool feedback : {false, true}) {
          const int ranks = 1 + turn++ % 5;
          check<Code>(count, block, ranks, ranks, feedback);
          check<Code>(count, block, ranks, 1 + turn % 3, feedback);
          if (HasFatalFailure()) return;
        }
      }
    }
    check<Code>(0, 128, 2, 2, true);
  }

  std::mt19937_64 random_{11};
};

TEST_P(BlockKernelSweep, equals_the_scalar_code_to_the_bit) {
  switch (std::get<1>(GetParam())) {
    case BlockFormat::kBFloat16: return sweep<BFloat16Code>();
    case BlockFormat::kFloat16: return sweep<Float16Code>();
    case BlockFormat::kInt8: return sweep<Int8Code>();
    case BlockFormat::kFloat8E4M3: return sweep<Float8E4M3Code>();
    case BlockFormat::kFloat8E5M2: return sweep<Float8E5M2Code>();
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, BlockKernelSweep,
                         ::testing::Combine(::testing::ValuesIn(available_isas()),
                                            ::testing::Values(BlockFormat::kBFloat16, BlockFormat::kFloat16,
                                                              BlockFormat::kInt8, BlockFormat::kFloat8E4M3,
                                                              BlockFormat::kFloat8E5M2)),
                         [](const auto& test) {
                           return std::string(cpu::name_of(std::get<0>(test.param))) + "_" +
                                  name_of(std::get<1>(test.param));
                         });

TEST(BlockKernelTable, the_selected_set_is_used) {
  for (int format = 0; format < codec::kBlockFormatCount; ++format) {
    const auto f = static_cast<BlockFormat>(format);
    EXPECT_EQ(&cpu::block_kernels(f), cpu::block_kernels(cpu::selected_isa(), f));
    EXPECT_EQ(cpu::block_kernels(static_cast<Isa>(200), f), nullptr);
  }
}

}  // namespace
}  // namespace fccl
