// Vectors, their way from and to memory, and the formats in which elements are stored and accumulated.
// Part of reduce_kernels.inc.h, whose rules on linkage hold here too.
#pragma once

#ifndef FCCL_VECTOR_BYTES
#error "define FCCL_VECTOR_BYTES, the width of a vector register, before including this file"
#endif

#include <cstddef>
#include <cstdint>

#include "codec/float16.h"

namespace fccl::cpu {
namespace {

constexpr std::size_t kVectorBytes = FCCL_VECTOR_BYTES;

template <class T, std::size_t kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};
template <class T, std::size_t kLanes>
using Vector = typename VectorOf<T, kLanes>::type;

// ---- Memory -----------------------------------------------------------------------------------

template <class V>
FCCL_ALWAYS_INLINE V load(const char* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
FCCL_ALWAYS_INLINE void store(char* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

// Copies `bytes` < kLimit, a power of two. Cheaper than a call for the few bytes of a tail.
template <std::size_t kLimit>
FCCL_ALWAYS_INLINE void copy_short(char* to, const char* from, std::size_t bytes) {
  if constexpr (kLimit > 1) {
    constexpr std::size_t kPiece = kLimit / 2;
    if (bytes & kPiece) {
      __builtin_memcpy(to, from, kPiece);
      to += kPiece;
      from += kPiece;
    }
    copy_short<kPiece>(to, from, bytes);
  }
}

// The first `bytes` < sizeof(V) of a vector; load_tail fills up with zeros and touches no byte
// beyond. Units with masked instructions bring their own (masked_load and masked_store return
// false for a length they cannot do), since a vector loaded from bytes that were just stored in
// pieces waits for those stores.
template <class V>
FCCL_ALWAYS_INLINE V load_tail(const char* from, std::size_t bytes) {
  V value{};
#ifdef FCCL_MASKED_TAILS
  if (masked_load(from, bytes, value)) return value;
#endif
  char buffer[sizeof(V)];
  store(buffer, value);
  copy_short<sizeof(V)>(buffer, from, bytes);
  return load<V>(buffer);
}

template <class V>
FCCL_ALWAYS_INLINE void store_tail(char* to, V value, std::size_t bytes) {
#ifdef FCCL_MASKED_TAILS
  if (masked_store(to, bytes, value)) return;
#endif
  char buffer[sizeof(V)];
  store(buffer, value);
  copy_short<sizeof(V)>(to, buffer, bytes);
}

// ---- Formats: how elements lie in memory, and what they are accumulated in ---------------------

// What one stored vector becomes: kParts accumulators of type V.
template <class V, int kParts>
struct Parts {
  V part[kParts];
};

// Accumulated as it is stored.
template <class T>
struct Plain {
  using Element = T;
  using Stored = Vector<T, kVectorBytes / sizeof(T)>;
  using Lanes = Stored;
  static constexpr int kParts = 1;
  static FCCL_ALWAYS_INLINE Lanes widen(Stored stored, int) { return stored; }
  static FCCL_ALWAYS_INLINE Stored narrow(const Parts<Lanes, 1>& parts) { return parts.part[0]; }
};

// Elements of one or two bytes, read as 32-bit words: part k holds element k of every word. Shifts
// and masks take them apart and put them together again; no lane changes its place.
using Words = Vector<std::uint32_t, kVectorBytes / 4>;
using SignedWords = Vector<std::int32_t, kVectorBytes / 4>;
using Floats = Vector<float, kVectorBytes / 4>;

// narrow() of the float formats is given canonical NaNs only, see canonical_nan().
struct BFloat16Format {
  using Element = std::uint16_t;
  using Stored = Words;
  using Lanes = Floats;
  static constexpr int kParts = 2;
  static FCCL_ALWAYS_INLINE Lanes widen(Stored words, int k) {
    return __builtin_bit_cast(Floats, k == 0 ? words << 16 : words & 0xffff0000u);
  }
  static FCCL_ALWAYS_INLINE Stored narrow(const Parts<Lanes, 2>& parts) {
    const Words low = codec::generic::bfloat16_from_canonical_float<Words>(parts.part[0]);
    // As the same function, less the shift down, which would be undone here.
    const Words high = __builtin_bit_cast(Words, parts.part[1]);
    return low | ((high + 0x7fffu + ((high >> 16) & 1u)) & 0xffff0000u);
  }
};

#ifdef FCCL_HARDWARE_HALF  // the unit defines half_to_float() and float_to_half() with instructions
struct HalfFormat {
  using Element = std::uint16_t;
  using Stored = Vector<std::uint16_t, kVectorBytes / 4>;
  using Lanes = Floats;
  static constexpr int kParts = 1;
  static FCCL_ALWAYS_INLINE Lanes widen(Stored stored, int) { return half_to_float<Floats>(stored); }
  static FCCL_ALWAYS_INLINE Stored narrow(const Parts<Lanes, 1>& parts) {
    return float_to_half<Stored>(parts.part[0]);
  }
};
#else
struct HalfFormat {
  using Element = std::uint16_t;
  using Stored = Words;
  using Lanes = Floats;
  static constexpr int kParts = 2;
  static FCCL_ALWAYS_INLINE Lanes widen(Stored words, int k) {
    return codec::generic::float_from_half<Floats>(k == 0 ? words & 0xffffu : words >> 16);
  }
  static FCCL_ALWAYS_INLINE Stored narrow(const Parts<Lanes, 2>& parts) {
    return codec::generic::half_from_float<Words>(parts.part[0]) |
           (codec::generic::half_from_float<Words>(parts.part[1]) << 16);
  }
};
#endif

// Any byte but zero is true. Accumulates lane masks (0 or -1).
struct BoolFormat {
  using Element = std::uint8_t;
  using Stored = Vector<std::uint8_t, kVectorBytes>;
  using Lanes = Stored;
  static constexpr int kParts = 1;
  static FCCL_ALWAYS_INLINE Lanes widen(Stored stored, int) { return __builtin_bit_cast(Lanes, stored != 0); }
  static FCCL_ALWAYS_INLINE Stored narrow(const Parts<Lanes, 1>& parts) { return parts.part[0] & 1; }
};

// Integers in floats that hold every sum of theirs exactly: the average of not too many sources.
template <class T>
struct IntegerAsFloat {  // one- and two-byte T
  using Element = T;
  using Stored = Words;
  using Lanes = Floats;
  static constexpr int kParts = 4 / sizeof(T);
  static constexpr int kBits = 8 * sizeof(T);
  static constexpr bool kSigned = static_cast<T>(-1) < 0;
  static FCCL_ALWAYS_INLINE Lanes widen(Stored words, int k) {
    const Words top = words << (32 - kBits * (k + 1));
    const SignedWords value = kSigned ? __builtin_bit_cast(SignedWords, top) >> (32 - kBits)
                                      : __builtin_bit_cast(SignedWords, top >> (32 - kBits));
    return __builtin_convertvector(value, Floats);
  }
  static FCCL_ALWAYS_INLINE Stored narrow(const Parts<Lanes, kParts>& parts) {
    Words words{};
#pragma GCC unroll 8
    for (int k = 0; k < kParts; ++k) {
      const SignedWords value = __builtin_convertvector(parts.part[k], SignedWords);  // truncates
      words |= (__builtin_bit_cast(Words, value) & ((1u << kBits) - 1u)) << (kBits * k);
    }
    return words;
  }
};
struct Int32AsDouble {
  using Element = std::int32_t;
  using Stored = Vector<std::int32_t, kVectorBytes / 8>;
  using Lanes = Vector<double, kVectorBytes / 8>;
  static constexpr int kParts = 1;
  static FCCL_ALWAYS_INLINE Lanes widen(Stored stored, int) { return __builtin_convertvector(stored, Lanes); }
  static FCCL_ALWAYS_INLINE Stored narrow(const Parts<Lanes, 1>& parts) {
    return __builtin_convertvector(parts.part[0], Stored);
  }
};

}  // namespace
}  // namespace fccl::cpu
