// How gradients travel compressed: blocks of consecutive elements, one code per element, and one float32
// scale per block.
//
//   code[i] = encode(x[i] * inverse)          x'[i] = decode(code[i]) * scale
//
// `scale` and `inverse` follow from the largest finite magnitude of the block alone (scale_of). An
// element that is not finite has a code of its own: it comes out as NaN (as itself from bfloat16, and from
// float16 and e5m2 if its block has other elements than zeros) wherever it is decoded, and its neighbours
// keep their values.
//
// With error feedback what is sent is gradient + remainder, and remainder_of() what was lost of it. Such a
// block whose gradients are all zero (an unused parameter, a rank that is out of data) is sent as zeros, its
// scale too, and keeps its remainder: DDP throws the result for a parameter away that no rank has used. What
// the mean's code loses is kept by the owner of the shard, who may have nothing to say of that block for many
// steps (an expert that it never routes to): its remainder then goes into the sum itself, as soon as any
// other rank has something to say, and would else grow without bound.
//
// Everything here is written once for scalars, GCC vectors and device code, from operations that round the
// same everywhere (no division in the elements, no fused multiply-add, no operand that a thread which
// flushes subnormals would see differently), so codes and results have the same bits on every processor.
#pragma once

#include "codec/float16.h"
#include "codec/float8.h"

namespace fccl::codec {

// Values are part of the wire layout: append only.
enum class BlockFormat : std::uint8_t {
  kBFloat16 = 0,  // no scale: bfloat16 has float32's range
  kFloat16 = 1,   // scaled by a power of two
  kInt8 = 2,
  kFloat8E4M3 = 3,
  kFloat8E5M2 = 4,
};
inline constexpr int kBlockFormatCount = 5;

struct BlockScale {
  float scale;
  float inverse;
};

// A block whose largest magnitude is below this is sent as zeros: 2^-80, about 8e-25. It keeps `inverse`
// finite, and every product with a subnormal far below the least code.
inline constexpr std::uint32_t kLeastMagnitude = (127u - 80u) << 23;
inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;

namespace generic {

// The magnitude of a finite value as integer bits, which order as the magnitudes do; 0 for others. The
// maximum is taken on these: a floating-point maximum drops NaN on some machines and not on others.
template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U finite_magnitude(F value) {
  const U magnitude = __builtin_bit_cast(U, value) & 0x7fffffffu;
  return as_signed(magnitude) < 0x7f800000 ? magnitude : splat<U>(0u);
}
template <class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U larger_magnitude(U a, U b) {
  return as_signed(a) > as_signed(b) ? a : b;
}
// `value` where it is finite, else `otherwise`.
template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F if_finite(F value, F otherwise) {
  const U bits = __builtin_bit_cast(U, value);
  return __builtin_bit_cast(
      F, as_signed(bits & 0x7fffffffu) < 0x7f800000 ? bits : __builtin_bit_cast(U, otherwise));
}
// Every NaN as the positive quiet one without payload: which NaN inf * 0 is, and what of a NaN a
// multiplication keeps, depends on the processor.
template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F with_one_nan(F value) {
  const U bits = __builtin_bit_cast(U, value);
  return __builtin_bit_cast(F, as_signed(bits & 0x7fffffffu) > 0x7f800000 ? splat<U>(0x7fc00000u) : bits);
}

}  // namespace generic

// The codes. encode() takes what is scaled already; lanes hold a code in their low bits, zeros above.
struct BFloat16Code {
  static constexpr BlockFormat kFormat = BlockFormat::kBFloat16;
  using Stored = std::uint16_t;
  static constexpr int kBytes = 2;
  static constexpr bool kScaled = false;
  template <class U, class F>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U encode(F value) {
    return generic::bfloat16_from_float<U>(value);
  }
  template <class F, class U>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F decode(U code) {
    return generic::float_from_bfloat16<F>(code);
  }
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr BlockScale scale_of(std::uint32_t) { return {1, 1}; }
};

struct Float16Code {
  static constexpr BlockFormat kFormat = BlockFormat::kFloat16;
  using Stored = std::uint16_t;
  static constexpr int kBytes = 2;
  static constexpr bool kScaled = true;
  template <class U, class F>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U encode(F value) {
    return generic::half_from_float<U>(value);
  }
  template <class F, class U>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F decode(U code) {
    return generic::float_from_half<F>(code);
  }
  // The power of two that takes the largest magnitude into [2^14, 2^15): exact both ways, room for the
  // rounding above, and 2^-38 of the largest magnitude is still told from zero.
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr BlockScale scale_of(std::uint32_t largest) {
    if (largest < kLeastMagnitude) return {0, 0};
    const std::uint32_t exponent = largest >> 23;  // biased by 127; 47 to 254
    return {__builtin_bit_cast(float, (exponent - 14u) << 23),
            __builtin_bit_cast(float, (127u + 127u + 14u - exponent) << 23)};
  }
};

// What the formats of one byte have in common: the largest magnitude of the block gets the largest code.
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr BlockScale scale_to(float largest_code, std::uint32_t largest) {
  if (largest < kLeastMagnitude) return {0, 0};
  const float magnitude = __builtin_bit_cast(float, largest);
  const float scale = magnitude / largest_code;
  // The largest float32 of all: a scale that was rounded up would take it to infinity on the way back.
  const std::uint32_t step = largest == kInfinityBits - 1u ? 1u : 0u;
  return {__builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, scale) - step),
          largest_code / magnitude};
}

struct Int8Code {
  static constexpr BlockFormat kFormat = BlockFormat::kInt8;
  using Stored = std::uint8_t;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 127;
  // -127 to 127 in two's complement; -128 stands for what is not a finite number. |value| exceeds 127 by
  // two roundings at most, which the rounding to an integer takes away.
  template <class U, class F>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U encode(F value) {
    const U magnitude = __builtin_bit_cast(U, value) & 0x7fffffffu;
    // Adding 1.5 * 2^23 makes the adder round to an integer, which then stands in the low bits.
    const F adder = __builtin_bit_cast(F, generic::splat<U>(0x4b400000u));
    const U rounded = __builtin_bit_cast(U, value + adder) & 0xffu;
    return generic::as_signed(magnitude) < 0x7f800000 ? rounded : generic::splat<U>(0x80u);
  }
  template <class F, class U>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F decode(U code) {
    // 2^23 + 128 + code, and back.
    const F offset = __builtin_bit_cast(F, generic::splat<U>(0x4b000080u));
    const F number = __builtin_bit_cast(F, (code ^ 0x80u) | 0x4b000000u) - offset;
    return __builtin_bit_cast(
        F, generic::as_signed(code) == 0x80 ? generic::splat<U>(0x7fc00000u) : __builtin_bit_cast(U, number));
  }
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr BlockScale scale_of(std::uint32_t largest) {
    return scale_to(kLargest, largest);
  }
};

struct Float8E4M3Code {
  static constexpr BlockFormat kFormat = BlockFormat::kFloat8E4M3;
  using Stored = std::uint8_t;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 448;
  template <class U, class F>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U encode(F value) {
    return generic::e4m3_from_float<U>(value);
  }
  template <class F, class U>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F decode(U code) {
    return generic::float_from_e4m3<F>(code);
  }
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr BlockScale scale_of(std::uint32_t largest) {
    return scale_to(kLargest, largest);
  }
};

struct Float8E5M2Code {
  static constexpr BlockFormat kFormat = BlockFormat::kFloat8E5M2;
  using Stored = std::uint8_t;
  static constexpr int kBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 57344;
  template <class U, class F>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U encode(F value) {
    return generic::e5m2_from_float<U>(value);
  }
  template <class F, class U>
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F decode(U code) {
    return generic::float_from_e5m2<F>(code);
  }
  static FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr BlockScale scale_of(std::uint32_t largest) {
    return scale_to(kLargest, largest);
  }
};

namespace generic {

// One step of a compressed exchange for one element (or vector of them), where `inverse` and `scale` are
// its block's.
template <class Code, class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U encode_scaled(F value, F inverse) {
  if constexpr (!Code::kScaled) {
    return Code::template encode<U>(value);
  } else if constexpr (Code::kFormat == BlockFormat::kInt8) {
    return Code::template encode<U>(value * inverse);  // one code for all that is not finite
  } else {
    return Code::template encode<U>(with_one_nan<U>(value * inverse));
  }
}
template <class Code, class F, class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F decode_scaled(U code, F scale) {
  if constexpr (!Code::kScaled) {
    return Code::template decode<F>(code);
  } else {
    return Code::template decode<F>(code) * scale;
  }
}
// What the code of `value` does not say, to be added to the next value: error feedback. Where that is no
// finite number (because `value` is none, or came out as none), the `previous` remainder stays.
template <class Code, class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F remainder_of(F value, U code, F scale, F previous) {
  return if_finite<U>(value - decode_scaled<Code, F>(code, scale), previous);
}
// The same for a mean that its owner has encoded for all ranks: the next sum is short of `ranks` times what
// was lost of it, and the owner alone makes that good. `waiting`: what of the `previous` remainder the sum
// did not hold; all of it, or zero.
template <class Code, class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F remainder_with(F mean, U code, F scale, F ranks, F waiting,
                                                               F previous) {
  return if_finite<U>(waiting + ranks * (mean - decode_scaled<Code, F>(code, scale)), previous);
}

}  // namespace generic
}  // namespace fccl::codec
