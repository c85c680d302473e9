#include "common/dtype.h"

namespace fccl {

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBytes:
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kOther1: return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kOther2: return 2;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kOther4: return 4;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kOther8: return 8;
    case DType::kComplex128:
    case DType::kOther16: return 16;
  }
  return 1;
}

const char* name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBytes: return "bytes";
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt8: return "uint8";
    case DType::kBool: return "bool";
    case DType::kComplex64: return "complex64";
    case DType::kComplex128: return "complex128";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    case DType::kOther1: return "a 1-byte type";
    case DType::kOther2: return "a 2-byte type";
    case DType::kOther4: return "a 4-byte type";
    case DType::kOther8: return "an 8-byte type";
    case DType::kOther16: return "a 16-byte type";
  }
  return "unknown";
}

const char* name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kAvg: return "avg";
    case ReduceOp::kProduct: return "product";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kBand: return "band";
    case ReduceOp::kBor: return "bor";
    case ReduceOp::kBxor: return "bxor";
  }
  return "unknown";
}

bool can_reduce(DType dtype, ReduceOp op) noexcept {
  if (static_cast<std::uint8_t>(op) >= kReduceOpCount) return false;
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kFloat16:
    case DType::kBFloat16: return !bitwise;
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt8: return true;
    case DType::kBool: return op != ReduceOp::kAvg;
    default: return false;
  }
}

}  // namespace fccl
