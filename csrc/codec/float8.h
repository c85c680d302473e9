// The 8-bit floats of the OCP specification <-> float32, as torch.float8_e4m3fn and torch.float8_e5m2
// have them: exact widening, narrowing with one rounding to nearest even, subnormals kept.
//
// e4m3: 4 bits of exponent, largest number 448, no infinity: what rounds beyond 448, and inf, becomes
// NaN (0x7f or 0xff). e5m2: 5 bits of exponent, largest number 57344; what rounds beyond it becomes inf;
// every NaN becomes 0x7f or 0xff. (CUDA's own conversions differ: they saturate.)
//
// For scalars, GCC vectors and device code alike, under the rules of float16.h.
#pragma once

#include "codec/float16.h"

namespace fccl::codec {
namespace generic {

// `bits` holds the 8 bits of the number in the low byte of each lane, zeros above.
template <class F, class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F float_from_e5m2(U bits) {
  return float_from_half<F>(bits << 8);  // a float16 of which the last eight bits are cut off
}

template <class F, class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F float_from_e4m3(U bits) {
  const U sign = (bits & 0x80u) << 24;
  const U shifted = (bits & 0x7fu) << 20;  // exponent and mantissa at float's places, bias too small
  const U normal = shifted + (120u << 23);
  // Subnormals: as mantissa of 2^-6 * 1.m, from which 2^-6 is taken away; exact, never subnormal.
  const F two_to_minus_6 = __builtin_bit_cast(F, splat<U>(121u << 23));
  const U tiny = __builtin_bit_cast(U, __builtin_bit_cast(F, shifted + (121u << 23)) - two_to_minus_6);
  const U finite = as_signed(shifted) < 0x00800000 ? tiny : normal;
  return __builtin_bit_cast(F, sign | (as_signed(shifted) == 0x07f00000 ? splat<U>(0x7fc00000u) : finite));
}

// The bits of the number nearest to `value`, in the low byte of each lane.
template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U e5m2_from_float(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U sign = (bits >> 24) & 0x80u;
  const U magnitude = bits & 0x7fffffffu;
  // Rebias; the carry of the rounding may run into the exponent, up to infinity: that is right.
  const U normal = (magnitude - (112u << 23) + 0xfffffu + ((magnitude >> 21) & 1u)) >> 21;
  // Below 2^-14: adding 2^7 lets the adder round at 2^-16, the last subnormal bit.
  const F adder = __builtin_bit_cast(F, splat<U>(134u << 23));
  const U tiny = __builtin_bit_cast(U, __builtin_bit_cast(F, magnitude) + adder) - (134u << 23);
  const U special = as_signed(magnitude) > 0x7f800000 ? splat<U>(0x7fu) : splat<U>(0x7cu);
  const U finite = as_signed(magnitude) < (113 << 23) ? tiny : normal;
  return sign | (as_signed(magnitude) >= (143 << 23) ? special : finite);  // from 2^16 on
}

template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U e4m3_from_float(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U sign = (bits >> 24) & 0x80u;
  const U magnitude = bits & 0x7fffffffu;
  // As above; from 464 on, the carry ends at 0x7f, which is NaN.
  const U normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // Below 2^-6: adding 2^14 lets the adder round at 2^-9.
  const F adder = __builtin_bit_cast(F, splat<U>(141u << 23));
  const U tiny = __builtin_bit_cast(U, __builtin_bit_cast(F, magnitude) + adder) - (141u << 23);
  const U finite = as_signed(magnitude) < (121 << 23) ? tiny : normal;
  return sign | (as_signed(magnitude) >= 0x43f00000 ? splat<U>(0x7fu) : finite);  // from 480 on
}

}  // namespace generic

struct Float8E4M3 {
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
};

FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr float to_float(Float8E4M3 value) {
  return generic::float_from_e4m3<float>(std::uint32_t{value.bits});
}
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr float to_float(Float8E5M2 value) {
  return generic::float_from_e5m2<float>(std::uint32_t{value.bits});
}
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr Float8E4M3 to_float8_e4m3(float value) {
  return {static_cast<std::uint8_t>(generic::e4m3_from_float<std::uint32_t>(value))};
}
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr Float8E5M2 to_float8_e5m2(float value) {
  return {static_cast<std::uint8_t>(generic::e5m2_from_float<std::uint32_t>(value))};
}

}  // namespace fccl::codec
