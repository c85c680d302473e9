// Element types and reduction operations, and which of them go together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fccl {

// Values are part of the shared-memory layout (see description.h): append only.
enum class DType : std::uint8_t {
  kBytes = 0,  // opaque: may be moved, never reduced
  kFloat32 = 1,
  kFloat64 = 2,
  kFloat16 = 3,
  kBFloat16 = 4,
  kInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kUInt8 = 9,
  kBool = 10,
  // The rest are moved only; they are told apart so that two ranks that pass different types of
  // one size are found out.
  kComplex64 = 11,
  kComplex128 = 12,
  kFloat8E4M3 = 13,
  kFloat8E5M2 = 14,
  kOther1 = 15,  // any other type of 1, 2, 4, 8 or 16 bytes
  kOther2 = 16,
  kOther4 = 17,
  kOther8 = 18,
  kOther16 = 19,
};
inline constexpr std::uint8_t kDTypeCount = 20;

enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kAvg = 1,
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
};
inline constexpr std::uint8_t kReduceOpCount = 8;

// Bytes of one element.
std::size_t size_of(DType dtype) noexcept;
// torch's names: "float32", "bool", … ("unknown" for a value outside the enumeration).
const char* name_of(DType dtype) noexcept;
// "sum", "avg", "product", "min", "max", "band", "bor", "bxor".
const char* name_of(ReduceOp op) noexcept;

// Whether `op` is defined for `dtype`: bitwise operations need integers or bool, an average needs a
// number, and opaque types are only moved. False for values outside the enumerations.
bool can_reduce(DType dtype, ReduceOp op) noexcept;

}  // namespace fccl
