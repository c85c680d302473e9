// What lies in a Vector: elements of one type, and the arithmetic of reductions on them. The same rules as
// the CPU engine's (cpu/kernels/reduce.h): 16-bit floats are accumulated in float, min and max propagate NaN,
// every NaN that is stored is the quiet positive one.
#pragma once

#include <cstddef>
#include <cstring>

#include "codec/float16.h"
#include "common/dtype.h"
#include "cuda/seam.h"
#include "cuda/workspace.h"

namespace fccl::cuda {

inline constexpr int kVectorBytes = 16;

// Reads vector `v` of a tensor of `bytes` bytes: zeros beyond its end, and any alignment.
FCCL_KERNEL Vector load_vector(const std::byte* tensor, std::uint64_t bytes, std::uint64_t v) {
  const std::uint64_t offset = v * kVectorBytes;
  const std::byte* from = tensor + offset;
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  if (address % kVectorBytes == 0 && offset + kVectorBytes <= bytes) {
    return load(reinterpret_cast<const Vector*>(from));
  }
  Vector value{};
  if ((address | bytes) % 4 == 0) {
    FCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (offset + 4 * i < bytes) value.word[i] = load(reinterpret_cast<const std::uint32_t*>(from) + i);
    }
  } else {
    FCCL_UNROLL
    for (int i = 0; i < kVectorBytes; ++i) {
      if (offset + i < bytes) {
        value.word[i / 4] |= static_cast<std::uint32_t>(load(reinterpret_cast<const std::uint8_t*>(from) + i))
                             << (i % 4 * 8);
      }
    }
  }
  return value;
}

// Writes it; nothing beyond the tensor's end.
FCCL_KERNEL void store_vector(std::byte* tensor, std::uint64_t bytes, std::uint64_t v, const Vector& value) {
  const std::uint64_t offset = v * kVectorBytes;
  std::byte* to = tensor + offset;
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  if (address % kVectorBytes == 0 && offset + kVectorBytes <= bytes) {
    store(reinterpret_cast<Vector*>(to), value);
  } else if ((address | bytes) % 4 == 0) {
    FCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (offset + 4 * i < bytes) store(reinterpret_cast<std::uint32_t*>(to) + i, value.word[i]);
    }
  } else {
    FCCL_UNROLL
    for (int i = 0; i < kVectorBytes; ++i) {
      if (offset + i < bytes) {
        store(reinterpret_cast<std::uint8_t*>(to) + i,
              static_cast<std::uint8_t>(value.word[i / 4] >> (i % 4 * 8)));
      }
    }
  }
}

FCCL_HOST_DEVICE constexpr std::uint64_t vectors_in(std::uint64_t bytes) {
  return (bytes + kVectorBytes - 1) / kVectorBytes;
}

// ---- Element types ----

template <class Accumulator, int kWords>  // 32-bit words an element
struct WordElements;

template <class T>
struct WordElements<T, 1> {
  using Accumulator = T;
  static constexpr int kPerVector = 4;
  static FCCL_KERNEL T get(const Vector& vector, int i) { return __builtin_bit_cast(T, vector.word[i]); }
  static FCCL_KERNEL void set(Vector& vector, int i, T value) {
    vector.word[i] = __builtin_bit_cast(std::uint32_t, value);
  }
};
template <class T>
struct WordElements<T, 2> {
  using Accumulator = T;
  static constexpr int kPerVector = 2;
  static FCCL_KERNEL T get(const Vector& vector, int i) {
    const std::uint64_t bits = vector.word[2 * i] | static_cast<std::uint64_t>(vector.word[2 * i + 1]) << 32;
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static FCCL_KERNEL void set(Vector& vector, int i, T value) {
    std::uint64_t bits = 0;  // (a __builtin_bit_cast here crashes nvcc 13.0)
    std::memcpy(&bits, &value, sizeof(bits));
    vector.word[2 * i] = static_cast<std::uint32_t>(bits);
    vector.word[2 * i + 1] = static_cast<std::uint32_t>(bits >> 32);
  }
};

struct Int32 : WordElements<std::int32_t, 1> {
  static constexpr DType kDType = DType::kInt32;
};
struct Int64 : WordElements<std::int64_t, 2> {
  static constexpr DType kDType = DType::kInt64;
};
struct Float32 : WordElements<float, 1> {
  static constexpr DType kDType = DType::kFloat32;
  static constexpr std::uint32_t kNaN = 0x7fc00000u;
  static FCCL_KERNEL void set(Vector& vector, int i, float value) {
    vector.word[i] = value != value ? kNaN : __builtin_bit_cast(std::uint32_t, value);
  }
};
struct Float64 : WordElements<double, 2> {
  static constexpr DType kDType = DType::kFloat64;
  static FCCL_KERNEL void set(Vector& vector, int i, double value) {
    WordElements::set(vector, i, value);
    if (value != value) {
      vector.word[2 * i] = 0;
      vector.word[2 * i + 1] = 0x7ff80000u;
    }
  }
};

template <class Stored>
struct Float16Elements {
  using Accumulator = float;
  static constexpr int kPerVector = 8;
  static FCCL_KERNEL float get(const Vector& vector, int i) {
    return codec::to_float(Stored{static_cast<std::uint16_t>(vector.word[i / 2] >> (i % 2 * 16))});
  }
  // The vector's bits at `i` are zero before.
  static FCCL_KERNEL void set(Vector& vector, int i, float value) {
    std::uint32_t bits;
    if constexpr (std::is_same_v<Stored, codec::Half>) {
      bits = value != value ? 0x7e00u : codec::to_half(value).bits;
    } else {
      bits = codec::to_bfloat16(value).bits;
    }
    vector.word[i / 2] |= bits << (i % 2 * 16);
  }
};
struct Float16 : Float16Elements<codec::Half> {
  static constexpr DType kDType = DType::kFloat16;
};
struct BFloat16 : Float16Elements<codec::BFloat16> {
  static constexpr DType kDType = DType::kBFloat16;
};

template <class Element>
inline constexpr bool is_float = std::is_floating_point_v<typename Element::Accumulator>;

// ---- Reduction ----

template <class T>
FCCL_KERNEL T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case ReduceOp::kProduct: return a * b;
      case ReduceOp::kMin: return a != a || (b == b && !(b < a)) ? a : b;
      case ReduceOp::kMax: return a != a || (b == b && !(b > a)) ? a : b;
      default: return a + b;
    }
  } else {
    using Unsigned = std::make_unsigned_t<T>;  // sums and products wrap
    switch (op) {
      case ReduceOp::kProduct: return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
      case ReduceOp::kMin: return b < a ? b : a;
      case ReduceOp::kMax: return b > a ? b : a;
      default: return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    }
  }
}

// One vector of each rank, `stride` vectors apart in a mailbox, reduced in rank order and rounded once. All
// loads are under way before the first is used.
template <class Element>
FCCL_KERNEL Vector reduce_mailbox(const Vector* mailbox, std::uint64_t stride, int world, ReduceOp op) {
  using T = typename Element::Accumulator;
  Vector sources[kMaxRanks]{};
  FCCL_UNROLL
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (rank < world) sources[rank] = load_mailbox(mailbox + static_cast<std::uint64_t>(rank) * stride);
  }
  Vector result{};
  FCCL_UNROLL
  for (int i = 0; i < Element::kPerVector; ++i) {
    T sum = Element::get(sources[0], i);
    FCCL_UNROLL
    for (int rank = 1; rank < kMaxRanks; ++rank) {
      if (rank < world) sum = combine(op, sum, Element::get(sources[rank], i));
    }
    if constexpr (is_float<Element>) {
      if (op == ReduceOp::kAvg) sum = sum / static_cast<T>(world);
    }
    Element::set(result, i, sum);
  }
  return result;
}

// What an output holds after a failure: NaN. Integers have none; for them the context is ended.
template <class Element>
FCCL_KERNEL Vector poison() {
  Vector result{};
  if constexpr (is_float<Element>) {
    const float nan = __builtin_nanf("");
    FCCL_UNROLL
    for (int i = 0; i < Element::kPerVector; ++i) {
      Element::set(result, i, static_cast<typename Element::Accumulator>(nan));
    }
  } else {
    trap();
  }
  return result;
}

}  // namespace fccl::cuda
