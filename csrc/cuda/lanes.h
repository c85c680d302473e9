// A block of elements in the registers of a warp.
//
// Lane l holds, of each 128 elements, the four from 4 l on: loads and stores of four float32, or of four
// codes, by all lanes of a warp touch whole sectors.
#pragma once

#include <cstddef>

#include "codec/float16.h"
#include "common/dtype.h"
#include "cuda/seam.h"

namespace fccl::cuda {

// How gradients lie in memory. All arithmetic is in float.
struct FloatSource {
  static constexpr DType kDType = DType::kFloat32;
  using Stored = float;
  using Four = Vector;
  static FCCL_KERNEL float get(const Four& four, int i) { return __builtin_bit_cast(float, four.word[i]); }
  static FCCL_KERNEL void set(Four& four, int i, float value) {
    four.word[i] = __builtin_bit_cast(std::uint32_t, value);
  }
  static FCCL_KERNEL float widen(Stored stored) { return stored; }
  static FCCL_KERNEL Stored narrow(float value) { return value; }
};

struct alignas(8) HalfVector {
  std::uint32_t word[2];
};
template <class Bits>
struct HalfSource {
  static constexpr DType kDType = std::is_same_v<Bits, codec::Half> ? DType::kFloat16 : DType::kBFloat16;
  using Stored = std::uint16_t;
  using Four = HalfVector;
  static FCCL_KERNEL float get(const Four& four, int i) {
    return widen(static_cast<std::uint16_t>(four.word[i / 2] >> (i % 2 * 16)));
  }
  static FCCL_KERNEL void set(Four& four, int i, float value) {
    four.word[i / 2] |= static_cast<std::uint32_t>(narrow(value)) << (i % 2 * 16);
  }
  static FCCL_KERNEL float widen(Stored stored) { return codec::to_float(Bits{stored}); }
  static FCCL_KERNEL Stored narrow(float value) {
    if constexpr (std::is_same_v<Bits, codec::Half>) {
      return codec::to_half(value).bits;
    } else {
      return codec::to_bfloat16(value).bits;
    }
  }
};
using Float16Source = HalfSource<codec::Half>;
using BFloat16Source = HalfSource<codec::BFloat16>;

FCCL_KERNEL unsigned lane_index() { return thread_index() % kWarpSize; }

// `count` elements from `from` on, zeros up to 32 * kPerLane.
template <class Source, int kPerLane>
FCCL_KERNEL void load_lanes(const typename Source::Stored* from, std::uint64_t count,
                            float (&lanes)[kPerLane]) {
  using Four = typename Source::Four;
  const bool whole =
      reinterpret_cast<std::uintptr_t>(from) % sizeof(Four) == 0 && count >= kPerLane * kWarpSize;
  if (whole) {
    Four fours[kPerLane / 4];
    FCCL_UNROLL
    for (int v = 0; v < kPerLane / 4; ++v)
      fours[v] = load(reinterpret_cast<const Four*>(from) + v * 32 + lane_index());
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) lanes[i] = Source::get(fours[i / 4], i % 4);
  } else {
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const std::uint64_t at = i / 4 * 128 + lane_index() * 4 + i % 4;
      lanes[i] = at < count ? Source::widen(load(from + at)) : 0.0f;
    }
  }
}

template <class Source, int kPerLane>
FCCL_KERNEL void store_lanes(typename Source::Stored* to, std::uint64_t count,
                             const float (&lanes)[kPerLane]) {
  using Four = typename Source::Four;
  const bool whole =
      reinterpret_cast<std::uintptr_t>(to) % sizeof(Four) == 0 && count >= kPerLane * kWarpSize;
  if (whole) {
    FCCL_UNROLL
    for (int v = 0; v < kPerLane / 4; ++v) {
      Four four{};
      FCCL_UNROLL
      for (int i = 0; i < 4; ++i) Source::set(four, i, lanes[v * 4 + i]);
      store(reinterpret_cast<Four*>(to) + v * 32 + lane_index(), four);
    }
  } else {
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const std::uint64_t at = i / 4 * 128 + lane_index() * 4 + i % 4;
      if (at < count) store(to + at, Source::narrow(lanes[i]));
    }
  }
}

// The largest magnitude of the block, known to all lanes.
template <int kPerLane>
FCCL_KERNEL std::uint32_t largest_magnitude(const float (&lanes)[kPerLane]) {
  std::uint32_t largest = 0;
  FCCL_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    largest =
        codec::generic::larger_magnitude(largest, codec::generic::finite_magnitude<std::uint32_t>(lanes[i]));
  }
  FCCL_UNROLL
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    largest = codec::generic::larger_magnitude(largest, shuffle_xor(largest, mask));
  }
  return largest;
}

// Whether any lane has a bit set; known to all lanes.
FCCL_KERNEL bool any_lane(std::uint32_t bits) {
  FCCL_UNROLL
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) bits |= shuffle_xor(bits, mask);
  return bits != 0;
}

// Whether the block holds nothing but zeros, of either sign; known to all lanes.
template <int kPerLane>
FCCL_KERNEL bool all_zero(const float (&lanes)[kPerLane]) {
  std::uint32_t bits = 0;
  FCCL_UNROLL
  for (int i = 0; i < kPerLane; ++i) bits |= __builtin_bit_cast(std::uint32_t, lanes[i]) & 0x7fffffffu;
  return !any_lane(bits);
}

// Four codes of a lane, as they lie on the wire: one word of four bytes, or two of two halves.
template <class Code>
struct CodeWords;
template <class Code>
  requires(Code::kBytes == 1)
struct CodeWords<Code> {
  using Four = std::uint32_t;
  static FCCL_KERNEL std::uint32_t get(Four four, int i) { return (four >> (8 * i)) & 0xffu; }
  static FCCL_KERNEL void set(Four& four, int i, std::uint32_t code) { four |= code << (8 * i); }
};
template <class Code>
  requires(Code::kBytes == 2)
struct CodeWords<Code> {
  using Four = HalfVector;
  static FCCL_KERNEL std::uint32_t get(const Four& four, int i) {
    return (four.word[i / 2] >> (i % 2 * 16)) & 0xffffu;
  }
  static FCCL_KERNEL void set(Four& four, int i, std::uint32_t code) {
    four.word[i / 2] |= code << (i % 2 * 16);
  }
};

// Codes are 16-byte aligned on the wire, and every slot is whole.
template <class Code, int kPerLane>
FCCL_KERNEL void load_codes(const std::byte* from, std::uint32_t (&codes)[kPerLane]) {
  using Four = typename CodeWords<Code>::Four;
  Four fours[kPerLane / 4];
  FCCL_UNROLL
  for (int v = 0; v < kPerLane / 4; ++v)
    fours[v] = load(reinterpret_cast<const Four*>(from) + v * 32 + lane_index());
  FCCL_UNROLL
  for (int i = 0; i < kPerLane; ++i) codes[i] = CodeWords<Code>::get(fours[i / 4], i % 4);
}
template <class Code, int kPerLane>
FCCL_KERNEL void store_codes(std::byte* to, const std::uint32_t (&codes)[kPerLane]) {
  using Four = typename CodeWords<Code>::Four;
  FCCL_UNROLL
  for (int v = 0; v < kPerLane / 4; ++v) {
    Four four{};
    FCCL_UNROLL
    for (int i = 0; i < 4; ++i) CodeWords<Code>::set(four, i, codes[v * 4 + i]);
    store(reinterpret_cast<Four*>(to) + v * 32 + lane_index(), four);
  }
}

}  // namespace fccl::cuda
