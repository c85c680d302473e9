// float16 and bfloat16 <-> float32, written once for scalars, for GCC vectors and for device
// code: exact widening, narrowing with one rounding to nearest even, subnormals kept.
//
// Only integer operations and float operations whose operands and results are normal numbers or
// zero, so that a thread that flushes subnormals (torch.set_flush_denormal) gets the same bits.
//
// NaN stays NaN and becomes quiet. float16 conversions keep sign and payload as F16C and AArch64
// instructions do; float32 -> bfloat16 gives 0x7fc0, as c10 does; bfloat16 -> float32 is a shift.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FCCL_HOST_DEVICE __host__ __device__
#else
#define FCCL_HOST_DEVICE
#endif
// Never emitted as a symbol of its own: units compiled for one instruction set include this header,
// and the linker would otherwise merge their copies with everyone else's.
#define FCCL_ALWAYS_INLINE inline __attribute__((always_inline))

namespace fccl::codec {

// Generic forms. U is std::uint32_t or a vector of it, F is float or the vector of floats of the
// same number of lanes. Comparisons give bool or lane masks, which ?: takes alike.
namespace generic {

template <class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U splat(std::uint32_t value) {
  return U{} + value;
}

// Comparisons of values below 2^31 are made as signed ones: SSE2 has no others.
template <class U>
struct Signed {
  using type = decltype(U{} < U{});  // of vectors: the vector of signed integers
};
template <>
struct Signed<std::uint32_t> {
  using type = std::int32_t;
};
template <class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr typename Signed<U>::type as_signed(U value) {
  return __builtin_bit_cast(typename Signed<U>::type, value);
}

// `half` holds the 16 bits of a float16 in the low half of each lane.
template <class F, class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F float_from_half(U half) {
  const U sign = (half & 0x8000u) << 16;
  const U shifted = (half & 0x7fffu) << 13;  // exponent and mantissa at float's places, bias too small
  const U normal = shifted + (112u << 23);
  const U special =
      (shifted + (224u << 23)) | (as_signed(shifted) > 0x0f800000 ? splat<U>(0x00400000u) : splat<U>(0u));
  // Subnormals: as mantissa of 2^-14 * 1.m, from which 2^-14 is taken away; exact, never subnormal.
  const F two_to_minus_14 = __builtin_bit_cast(F, splat<U>(113u << 23));
  const U tiny = __builtin_bit_cast(U, __builtin_bit_cast(F, shifted + (113u << 23)) - two_to_minus_14);
  const U finite = as_signed(shifted) < 0x00800000 ? tiny : normal;
  return __builtin_bit_cast(F, sign | (as_signed(shifted) >= 0x0f800000 ? special : finite));
}

// The bits of the float16 nearest to `value`, in the low half of each lane.
template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U half_from_float(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U sign = (bits >> 16) & 0x8000u;
  const U magnitude = bits & 0x7fffffffu;
  // Rebias; the carry of the rounding may run into the exponent, up to infinity: that is right.
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 lets the adder round at the place of float16's last subnormal bit.
  const F half = __builtin_bit_cast(F, splat<U>(126u << 23));
  const U tiny = __builtin_bit_cast(U, __builtin_bit_cast(F, magnitude) + half) - (126u << 23);
  const U nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  const U special = as_signed(magnitude) > 0x7f800000 ? nan : splat<U>(0x7c00u);
  const U finite = as_signed(magnitude) < (113 << 23) ? tiny : normal;
  return sign | (as_signed(magnitude) >= (143 << 23) ? special : finite);  // from 2^16 on
}

template <class F, class U>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr F float_from_bfloat16(U bits) {
  return __builtin_bit_cast(F, bits << 16);
}

// As bfloat16_from_float, for values whose NaNs are the canonical 0x7fc00000 already.
template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U bfloat16_from_canonical_float(F value) {
  const U bits = __builtin_bit_cast(U, value);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

template <class U, class F>
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr U bfloat16_from_float(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return as_signed(bits & 0x7fffffffu) > 0x7f800000 ? splat<U>(0x7fc0u) : rounded;
}

}  // namespace generic

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr bool same_bits(Half a, Half b) { return a.bits == b.bits; }
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr bool same_bits(BFloat16 a, BFloat16 b) {
  return a.bits == b.bits;
}

FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr float to_float(Half value) {
  return generic::float_from_half<float>(std::uint32_t{value.bits});
}
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr float to_float(BFloat16 value) {
  return generic::float_from_bfloat16<float>(std::uint32_t{value.bits});
}
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr Half to_half(float value) {
  return {static_cast<std::uint16_t>(generic::half_from_float<std::uint32_t>(value))};
}
FCCL_HOST_DEVICE FCCL_ALWAYS_INLINE constexpr BFloat16 to_bfloat16(float value) {
  return {static_cast<std::uint16_t>(generic::bfloat16_from_float<std::uint32_t>(value))};
}

}  // namespace fccl::codec
