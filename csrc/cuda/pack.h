// Many tensors into one contiguous buffer, and back, in one launch: each byte is read and written once.
//
//   PackTensors     tensors -> buffer
//   UnpackTensors   buffer -> tensors
//
// On the way elements are multiplied by a scale, if there is one, and cast: the product is formed in float32
// and rounded once, to the destination's type, by codec's conversions. So the results have the same bits on
// every processor; a NaN that has been multiplied is the positive quiet one.
//
// Where a tensor begins in the buffer is Range::first, in elements. Tensors may lie tight or with gaps
// before, between and behind them, and may be empty. If all begin at multiples of 16 bytes, nearly all
// accesses are of 128 bits; tensors that follow one of an odd size are moved element by element, which
// touches the same sectors with more instructions.
#pragma once

#include <cstddef>

#include "codec/block.h"
#include "cuda/lanes.h"
#include "cuda/ranges.h"

namespace fccl::cuda {

inline constexpr int kPackThreads = 256;
// 64 registers to a thread, and up to 64 KiB on their way to a multiprocessor: 4 vectors a thread.
inline constexpr int kPackBlocksPerMultiprocessor = 4;

// What a warp moves at a time: so much of the buffer, usually of one tensor.
inline constexpr int kPackPerLane = 16;
inline constexpr std::uint64_t kPackChunk = std::uint64_t{kPackPerLane} * kWarpSize;

// A Vector's elements.
template <class Type>
inline constexpr int kPackPerVector = static_cast<int>(sizeof(Vector) / sizeof(typename Type::Stored));
template <class Type>
FCCL_KERNEL float element_of(const Vector& vector, int i) {
  if constexpr (sizeof(typename Type::Stored) == 4) {
    return __builtin_bit_cast(float, vector.word[i]);
  } else {
    return Type::widen(static_cast<std::uint16_t>(vector.word[i / 2] >> (i % 2 * 16)));
  }
}
// The vector's bits at `i` are zero before.
template <class Type>
FCCL_KERNEL void set_element(Vector& vector, int i, typename Type::Stored element) {
  if constexpr (sizeof(element) == 4) {
    vector.word[i] = __builtin_bit_cast(std::uint32_t, element);
  } else {
    vector.word[i / 2] |= static_cast<std::uint32_t>(element) << (i % 2 * 16);
  }
}

// One element's way from `From` to `To`; remembers whether any came out as inf or NaN.
template <class From, class To>
class Caster {
 public:
  FCCL_KERNEL explicit Caster(const float* scale) : scaled_(scale), scale_(scale ? load(scale) : 1.0f) {}

  FCCL_KERNEL typename To::Stored operator()(float value) {
    if (scaled_) value = codec::generic::with_one_nan<std::uint32_t>(value * scale_);
    const typename To::Stored result = To::narrow(value);
    // Not const: nvcc 13.0 tries to find such a constant's value at compile time, and fails on the cast.
    std::uint32_t magnitude = __builtin_bit_cast(std::uint32_t, To::widen(result)) & 0x7fffffffu;
    largest_ = codec::generic::larger_magnitude(largest_, magnitude);
    return result;
  }
  FCCL_KERNEL bool all_finite() const { return largest_ < codec::kInfinityBits; }

 private:
  const bool scaled_;
  const float scale_;
  std::uint32_t largest_ = 0;  // of the bits of all magnitudes: beyond inf's if any is not finite
};

// A chunk that lies whole in one tensor. All loads are under way before the first store.
template <class From, class To>
FCCL_KERNEL void move_chunk(const typename From::Stored* from, typename To::Stored* to,
                            Caster<From, To>& cast) {
  const bool aligned =
      (reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to)) % sizeof(Vector) == 0;
  if (aligned) {
    // A lane holds, of each kGroup * 32 elements, kGroup that lie together: whole vectors of both types.
    constexpr int kGroup =
        kPackPerVector<From> > kPackPerVector<To> ? kPackPerVector<From> : kPackPerVector<To>;
    constexpr int kIn = kGroup / kPackPerVector<From>;
    constexpr int kOut = kGroup / kPackPerVector<To>;
    constexpr int kGroups = kPackPerLane / kGroup;
    Vector in[kGroups * kIn];
    FCCL_UNROLL
    for (int v = 0; v < kGroups * kIn; ++v) {
      in[v] =
          load(reinterpret_cast<const Vector*>(from) + (v / kIn * kWarpSize + lane_index()) * kIn + v % kIn);
    }
    FCCL_UNROLL
    for (int v = 0; v < kGroups * kOut; ++v) {
      Vector out{};
      FCCL_UNROLL
      for (int i = 0; i < kPackPerVector<To>; ++i) {
        const int element = v * kPackPerVector<To> + i;  // of the lane
        set_element<To>(
            out, i,
            cast(element_of<From>(in[element / kPackPerVector<From>], element % kPackPerVector<From>)));
      }
      store(reinterpret_cast<Vector*>(to) + (v / kOut * kWarpSize + lane_index()) * kOut + v % kOut, out);
    }
  } else {
    typename From::Stored in[kPackPerLane];
    FCCL_UNROLL
    for (int i = 0; i < kPackPerLane; ++i) in[i] = load(from + i * kWarpSize + lane_index());
    FCCL_UNROLL
    for (int i = 0; i < kPackPerLane; ++i) {
      store(to + i * kWarpSize + lane_index(), cast(From::widen(in[i])));
    }
  }
}

// Goes through the buffer chunk by chunk, a warp at a time. Chunks that lie whole in one tensor go to
// whole(tensor, offset, at); of others each lane takes some elements and asks for their tensor one by one:
// inside(tensor, offset, at), or gap(at) where there is none.
template <class Whole, class Inside, class Gap>
FCCL_KERNEL void for_each_chunk(const RangeTable& tensors, std::uint64_t length, Whole&& whole,
                                Inside&& inside, Gap&& gap) {
  constexpr std::uint32_t kElements = 1;  // Range::first counts elements
  const std::uint64_t step = threads_of_grid() / kWarpSize * kPackChunk;
  RangeCursor of_warp(tensors, kElements);
  for (std::uint64_t begin = first_thread() / kWarpSize * kPackChunk; begin < length; begin += step) {
    if (tensors.count != 0 && length - begin >= kPackChunk) {
      const Range& tensor = of_warp.at(begin);
      // Before the first tensor the offset wraps, and is beyond any length.
      const std::uint64_t offset = begin - tensor.first;
      if (offset < tensor.length && tensor.length - offset >= kPackChunk) {
        whole(tensor, offset, begin);
        continue;
      }
    }
    RangeCursor of_lane(tensors, kElements);
    FCCL_NO_UNROLL
    for (std::uint64_t at = begin + lane_index(); at < begin + kPackChunk && at < length; at += kWarpSize) {
      if (tensors.count != 0) {
        const Range& tensor = of_lane.at(at);
        const std::uint64_t offset = at - tensor.first;
        if (offset < tensor.length) {
          inside(tensor, offset, at);
          continue;
        }
      }
      gap(at);
    }
  }
}

struct PackTensorsArgs {
  RangeTable tensors;    // `first`: where in the buffer, in elements; no remainders
  std::byte* buffer;     // must not overlap any tensor
  std::uint64_t length;  // of the buffer, in elements; no tensor ends beyond
  const float* scale;    // in device memory; null: none
};

// Gaps are filled with zeros: what travels depends on the tensors alone.
template <class From, class To>
struct PackTensors {
  static constexpr int kThreads = kPackThreads;
  static constexpr int kBlocksPerMultiprocessor = kPackBlocksPerMultiprocessor;
  using Args = PackTensorsArgs;

  FCCL_KERNEL static void run(const Args& args) {
    using FromStored = typename From::Stored;
    auto* const buffer = reinterpret_cast<typename To::Stored*>(args.buffer);
    Caster<From, To> cast(args.scale);
    for_each_chunk(
        args.tensors, args.length,
        [&](const Range& tensor, std::uint64_t offset, std::uint64_t at) {
          move_chunk<From, To>(reinterpret_cast<const FromStored*>(tensor.data) + offset, buffer + at, cast);
        },
        [&](const Range& tensor, std::uint64_t offset, std::uint64_t at) {
          store(buffer + at,
                cast(From::widen(load(reinterpret_cast<const FromStored*>(tensor.data) + offset))));
        },
        [&](std::uint64_t at) { store(buffer + at, To::narrow(0.0f)); });
  }
};

struct UnpackTensorsArgs {
  RangeTable tensors;         // as they were packed
  const std::byte* buffer;    // must not overlap any tensor
  std::uint64_t length;       // of the buffer, in elements
  const float* scale;         // in device memory; null: none
  std::uint32_t* not_finite;  // set to 1 if any element is inf or NaN as it is stored; null: nobody asks
};

template <class From, class To>
struct UnpackTensors {
  static constexpr int kThreads = kPackThreads;
  static constexpr int kBlocksPerMultiprocessor = kPackBlocksPerMultiprocessor;
  using Args = UnpackTensorsArgs;

  FCCL_KERNEL static void run(const Args& args) {
    using ToStored = typename To::Stored;
    const auto* const buffer = reinterpret_cast<const typename From::Stored*>(args.buffer);
    Caster<From, To> cast(args.scale);
    for_each_chunk(
        args.tensors, args.length,
        [&](const Range& tensor, std::uint64_t offset, std::uint64_t at) {
          move_chunk<From, To>(buffer + at, reinterpret_cast<ToStored*>(tensor.data) + offset, cast);
        },
        [&](const Range& tensor, std::uint64_t offset, std::uint64_t at) {
          store(reinterpret_cast<ToStored*>(tensor.data) + offset, cast(From::widen(load(buffer + at))));
        },
        [](std::uint64_t) {});
    if (args.not_finite && !cast.all_finite()) store(args.not_finite, 1u);
  }
};

}  // namespace fccl::cuda
