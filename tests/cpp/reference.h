// Reductions and 16-bit floats once more, slowly and by other means than the engine's: the results
// that the kernels are compared with, to the bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/dtype.h"

namespace fccl::reference {

// A binary format of 16 bits with `mantissa_bits` stored bits and least normal exponent `min_exponent`.
struct Format16 {
  int mantissa_bits;
  int min_exponent;
  int max_exponent;
  std::uint16_t canonical_nan;

  double decode(std::uint16_t bits) const {
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    if (exponent == max_exponent - min_exponent + 2) {
      return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                           : std::numeric_limits<double>::quiet_NaN();
    }
    if (exponent == 0) return sign * std::ldexp(mantissa, min_exponent - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - 1 + min_exponent - mantissa_bits);
  }

  // To nearest, ties to even; every NaN becomes canonical_nan.
  std::uint16_t encode(double value) const {
    if (std::isnan(value)) return canonical_nan;
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const auto infinity = static_cast<std::uint16_t>((max_exponent - min_exponent + 2) << mantissa_bits);
    double magnitude = std::fabs(value);
    if (magnitude == 0) return sign;
    if (std::isinf(magnitude)) return sign | infinity;
    const int scale = std::max(std::ilogb(magnitude), min_exponent) - mantissa_bits;
    magnitude = std::ldexp(std::nearbyint(std::ldexp(magnitude, -scale)), scale);
    if (magnitude == 0) return sign;
    if (std::ilogb(magnitude) > max_exponent) return sign | infinity;
    const int exponent = std::max(std::ilogb(magnitude), min_exponent);
    const int units = static_cast<int>(std::ldexp(magnitude, mantissa_bits - exponent));
    // `units` holds the leading bit, which counts as one in the exponent's field.
    return static_cast<std::uint16_t>(sign | (((exponent - min_exponent) << mantissa_bits) + units));
  }
};
inline constexpr Format16 kHalf{10, -14, 15, 0x7e00};
inline constexpr Format16 kBFloat16{7, -126, 127, 0x7fc0};

template <class T>
T reduce_float(ReduceOp op, const std::vector<T>& values, int divisor) {
  T result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) {
    const T next = values[i];
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: result = result + next; break;
      case ReduceOp::kProduct: result = result * next; break;
      case ReduceOp::kMin:
        if (!std::isnan(result) && (std::isnan(next) || next < result)) result = next;
        break;
      case ReduceOp::kMax:
        if (!std::isnan(result) && (std::isnan(next) || next > result)) result = next;
        break;
      default: break;
    }
  }
  if (op == ReduceOp::kAvg) result = result / static_cast<T>(divisor);
  return std::isnan(result) ? std::numeric_limits<T>::quiet_NaN() : result;
}

template <class T>
T reduce_integer(ReduceOp op, const std::vector<T>& values, int divisor) {
  using U = std::make_unsigned_t<T>;
  if (op == ReduceOp::kAvg) {
    __extension__ __int128 sum = 0;
    for (const T value : values) sum += value;
    return static_cast<T>(sum / divisor);
  }
  T result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) {
    const T next = values[i];
    const auto a = static_cast<std::uint64_t>(static_cast<U>(result));
    const auto b = static_cast<std::uint64_t>(static_cast<U>(next));
    switch (op) {
      case ReduceOp::kSum: result = static_cast<T>(static_cast<U>(a + b)); break;
      case ReduceOp::kProduct: result = static_cast<T>(static_cast<U>(a * b)); break;
      case ReduceOp::kMin: result = next < result ? next : result; break;
      case ReduceOp::kMax: result = next > result ? next : result; break;
      case ReduceOp::kBand: result = static_cast<T>(static_cast<U>(a & b)); break;
      case ReduceOp::kBor: result = static_cast<T>(static_cast<U>(a | b)); break;
      case ReduceOp::kBxor: result = static_cast<T>(static_cast<U>(a ^ b)); break;
      default: break;
    }
  }
  return result;
}

inline std::uint8_t reduce_bool(ReduceOp op, const std::vector<std::uint8_t>& values) {
  int trues = 0;
  for (const std::uint8_t value : values) trues += value != 0;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor: return trues > 0;
    case ReduceOp::kBxor: return trues % 2 != 0;
    default: return trues == static_cast<int>(values.size());
  }
}

template <class T, class F>
void reduce_elements(std::uint8_t* out, const std::vector<const std::uint8_t*>& sources, std::size_t count,
                     F reduce) {
  std::vector<T> values(sources.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < sources.size(); ++s)
      std::memcpy(&values[s], sources[s] + i * sizeof(T), sizeof(T));
    const T result = reduce(values);
    std::memcpy(out + i * sizeof(T), &result, sizeof(T));
  }
}

inline std::uint16_t reduce_16(const Format16& format, ReduceOp op, const std::vector<std::uint16_t>& values,
                               int divisor) {
  std::vector<float> floats;
  for (const std::uint16_t value : values) floats.push_back(static_cast<float>(format.decode(value)));
  return format.encode(reduce_float<float>(op, floats, divisor));
}

// What cpu/kernels/reduce.h promises.
inline void reference_reduce(DType dtype, ReduceOp op, std::uint8_t* out,
                             const std::vector<const std::uint8_t*>& sources, std::size_t count,
                             int divisor) {
  const auto integers = [&](auto zero) {
    using T = decltype(zero);
    reduce_elements<T>(out, sources, count, [&](const auto& v) { return reduce_integer<T>(op, v, divisor); });
  };
  const auto floats = [&](auto zero) {
    using T = decltype(zero);
    reduce_elements<T>(out, sources, count, [&](const auto& v) { return reduce_float<T>(op, v, divisor); });
  };
  const auto sixteen = [&](const Format16& format) {
    reduce_elements<std::uint16_t>(out, sources, count,
                                   [&](const auto& v) { return reduce_16(format, op, v, divisor); });
  };
  switch (dtype) {
    case DType::kFloat32: return floats(float{});
    case DType::kFloat64: return floats(double{});
    case DType::kFloat16: return sixteen(kHalf);
    case DType::kBFloat16: return sixteen(kBFloat16);
    case DType::kInt8: return integers(std::int8_t{});
    case DType::kInt16: return integers(std::int16_t{});
    case DType::kInt32: return integers(std::int32_t{});
    case DType::kInt64: return integers(std::int64_t{});
    case DType::kUInt8: return integers(std::uint8_t{});
    case DType::kBool:
      return reduce_elements<std::uint8_t>(out, sources, count,
                                           [&](const auto& v) { return reduce_bool(op, v); });
    default: return;
  }
}

}  // namespace fccl::reference
