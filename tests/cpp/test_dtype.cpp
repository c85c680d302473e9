#include "common/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace fccl {
namespace {

DType dtype_at(int value) { return static_cast<DType>(value); }
ReduceOp op_at(int value) { return static_cast<ReduceOp>(value); }

TEST(DType, sizes) {
  EXPECT_EQ(size_of(DType::kBytes), 1u);
  EXPECT_EQ(size_of(DType::kFloat32), 4u);
  EXPECT_EQ(size_of(DType::kFloat64), 8u);
  EXPECT_EQ(size_of(DType::kFloat16), 2u);
  EXPECT_EQ(size_of(DType::kBFloat16), 2u);
  EXPECT_EQ(size_of(DType::kInt8), 1u);
  EXPECT_EQ(size_of(DType::kInt16), 2u);
  EXPECT_EQ(size_of(DType::kInt32), 4u);
  EXPECT_EQ(size_of(DType::kInt64), 8u);
  EXPECT_EQ(size_of(DType::kUInt8), 1u);
  EXPECT_EQ(size_of(DType::kBool), 1u);
  EXPECT_EQ(size_of(DType::kComplex64), 8u);
  EXPECT_EQ(size_of(DType::kComplex128), 16u);
  EXPECT_EQ(size_of(DType::kFloat8E4M3), 1u);
  EXPECT_EQ(size_of(DType::kFloat8E5M2), 1u);
  EXPECT_EQ(size_of(DType::kOther1), 1u);
  EXPECT_EQ(size_of(DType::kOther2), 2u);
  EXPECT_EQ(size_of(DType::kOther4), 4u);
  EXPECT_EQ(size_of(DType::kOther8), 8u);
  EXPECT_EQ(size_of(DType::kOther16), 16u);
}

TEST(DType, every_value_has_a_name_of_its_own) {
  std::set<std::string> names;
  for (int value = 0; value < kDTypeCount; ++value) names.insert(name_of(dtype_at(value)));
  EXPECT_EQ(names.size(), std::size_t{kDTypeCount});
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_STREQ(name_of(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(name_of(DType::kFloat8E4M3), "float8_e4m3fn");

  names.clear();
  for (int value = 0; value < kReduceOpCount; ++value) names.insert(name_of(op_at(value)));
  const std::set<std::string> expected = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  EXPECT_EQ(names, expected);
}

TEST(DType, values_outside_the_enumeration_are_harmless) {
  for (int value = kDTypeCount; value < 256; ++value) {
    EXPECT_STREQ(name_of(dtype_at(value)), "unknown");
    EXPECT_EQ(size_of(dtype_at(value)), 1u);
    EXPECT_FALSE(can_reduce(dtype_at(value), ReduceOp::kSum));
  }
  for (int value = kReduceOpCount; value < 256; ++value) {
    EXPECT_STREQ(name_of(op_at(value)), "unknown");
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) EXPECT_FALSE(can_reduce(dtype_at(dtype), op_at(value)));
  }
}

TEST(DType, which_operations_a_type_has) {
  const std::set<DType> floats = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  const std::set<DType> integers = {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64, DType::kUInt8};
  const std::set<ReduceOp> bitwise = {ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor};
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const DType dtype = dtype_at(d);
      const ReduceOp op = op_at(o);
      bool expected = integers.count(dtype) != 0;
      if (floats.count(dtype) != 0) expected = bitwise.count(op) == 0;
      if (dtype == DType::kBool) expected = op != ReduceOp::kAvg;
      EXPECT_EQ(can_reduce(dtype, op), expected) << name_of(dtype) << " " << name_of(op);
    }
  }
}

}  // namespace
}  // namespace fccl
