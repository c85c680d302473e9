// The kernels of block_code.h. Part of reduce_kernels.inc.h, whose rules on linkage hold here too.
//
// A block is gone through twice: for its largest magnitude, from which its scale follows, and to encode it.
// It is in the first-level cache the second time.
#include <cstddef>
#include <cstdint>

#include "codec/block.h"
#include "cpu/kernels/block_code.h"
#include "cpu/kernels/formats.inc.h"

namespace fccl::cpu {
namespace {

constexpr std::size_t kLanes = kVectorBytes / 4;

constexpr bool is_power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }

template <class Code>
using CodeVector = Vector<typename Code::Stored, kLanes>;

template <class Code>
FCCL_ALWAYS_INLINE Words load_codes(const char* from) {
  return __builtin_convertvector(load<CodeVector<Code>>(from), Words);
}
template <class Code>
FCCL_ALWAYS_INLINE void store_codes(char* to, Words codes) {
  store(to, __builtin_convertvector(codes, CodeVector<Code>));
}

// The floats from `values` on, of which `left` are there: zeros behind them.
FCCL_ALWAYS_INLINE Floats load_floats(const float* values, std::size_t left) {
  const char* from = reinterpret_cast<const char*>(values);
  return left >= kLanes ? load<Floats>(from) : load_tail<Floats>(from, left * 4);
}
FCCL_ALWAYS_INLINE void store_floats(float* values, Floats what, std::size_t left) {
  char* to = reinterpret_cast<char*>(values);
  if (left >= kLanes) {
    store(to, what);
  } else {
    store_tail(to, what, left * 4);
  }
}

FCCL_ALWAYS_INLINE float load_float(const char* from) {
  float value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

FCCL_ALWAYS_INLINE std::uint32_t largest_lane(Words magnitudes) {
  std::uint32_t largest = 0;
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kLanes; ++i) largest = magnitudes[i] > largest ? magnitudes[i] : largest;
  return largest;
}

template <class Code>
FCCL_ALWAYS_INLINE void put_scale(void* scales, std::size_t index, float scale) {
  if constexpr (Code::kScaled) __builtin_memcpy(static_cast<char*>(scales) + index * 4, &scale, 4);
}
template <class Code>
FCCL_ALWAYS_INLINE float scale_at(const void* scales, std::size_t index) {
  if constexpr (Code::kScaled) {
    return load_float(static_cast<const char*>(scales) + index * 4);
  } else {
    return 1;
  }
}

// Calls step(index of the block, its elements' offset, how many it has).
template <class Step>
FCCL_ALWAYS_INLINE void for_each_block(std::size_t count, std::uint32_t block, Step step) {
  std::size_t index = 0;
  for (std::size_t begin = 0; begin < count; begin += block, ++index) {
    step(index, begin, count - begin < block ? count - begin : std::size_t{block});
  }
}

// The slot's bytes behind `elements` codes, of which whole vectors have been written.
template <class Code>
FCCL_ALWAYS_INLINE void clear_rest(char* slot, std::size_t elements, std::uint32_t block) {
  const std::size_t written = (elements + kLanes - 1) / kLanes * kLanes;
  if (written < block) __builtin_memset(slot + written * Code::kBytes, 0, (block - written) * Code::kBytes);
}

template <class Code>
FCCL_ALWAYS_INLINE void encode_without_feedback(const float* values, std::size_t count, std::uint32_t block,
                                                char* codes, void* scales) {
  for_each_block(count, block, [&](std::size_t index, std::size_t begin, std::size_t elements) {
    const float* from = values + begin;
    char* const slot = codes + index * block * Code::kBytes;
    codec::BlockScale scale{1, 1};
    if constexpr (Code::kScaled) {
      Words largest{};
      for (std::size_t i = 0; i < elements; i += kLanes) {
        largest = codec::generic::larger_magnitude(
            largest, codec::generic::finite_magnitude<Words>(load_floats(from + i, elements - i)));
      }
      scale = Code::scale_of(largest_lane(largest));
      put_scale<Code>(scales, index, scale.scale);
    }
    const Floats inverse = Floats{} + scale.inverse;
    for (std::size_t i = 0; i < elements; i += kLanes) {
      store_codes<Code>(slot + i * Code::kBytes, codec::generic::encode_scaled<Code, Words>(
                                                     load_floats(from + i, elements - i), inverse));
    }
    clear_rest<Code>(slot, elements, block);
  });
}

template <class Code>
FCCL_ALWAYS_INLINE void encode_with_feedback(const float* values, float* remainder, std::size_t count,
                                             std::uint32_t block, char* codes, void* scales) {
  alignas(64) float sums[kLargestBlock];
  for_each_block(count, block, [&](std::size_t index, std::size_t begin, std::size_t elements) {
    const float* from = values + begin;
    float* const rest = remainder + begin;
    char* const slot = codes + index * block * Code::kBytes;
    Words largest{};
    Words any{};
    for (std::size_t i = 0; i < elements; i += kLanes) {
      const Floats value = load_floats(from + i, elements - i);
      any |= __builtin_bit_cast(Words, value);
      const Floats sum = value + load_floats(rest + i, elements - i);
      store(reinterpret_cast<char*>(sums + i), sum);
      largest = codec::generic::larger_magnitude(largest, codec::generic::finite_magnitude<Words>(sum));
    }
    if (largest_lane(any & 0x7fffffffu) == 0) {  // nothing to say: the remainder waits
      __builtin_memset(slot, 0, std::size_t{block} * Code::kBytes);
      put_scale<Code>(scales, index, 0);
      return;
    }
    const codec::BlockScale scale = Code::scale_of(largest_lane(largest));
    put_scale<Code>(scales, index, scale.scale);
    const Floats inverse = Floats{} + scale.inverse;
    const Floats back = Floats{} + scale.scale;
    for (std::size_t i = 0; i < elements; i += kLanes) {
      const Floats sum = load<Floats>(reinterpret_cast<const char*>(sums + i));
      const Words code = codec::generic::encode_scaled<Code, Words>(sum, inverse);
      store_codes<Code>(slot + i * Code::kBytes, code);
      store_floats(
          rest + i,
          codec::generic::remainder_of<Code, Words>(sum, code, back, load_floats(rest + i, elements - i)),
          elements - i);
    }
    clear_rest<Code>(slot, elements, block);
  });
}

template <class Code>
void encode_blocks(const float* values, float* remainder, std::size_t count, std::uint32_t block, void* codes,
                   void* scales) {
  if (remainder == nullptr) {
    encode_without_feedback<Code>(values, count, block, static_cast<char*>(codes), scales);
  } else {
    encode_with_feedback<Code>(values, remainder, count, block, static_cast<char*>(codes), scales);
  }
}

// kExact: the divisor is a power of two, whose reciprocal is exact. See Scale in reduce_kernels.inc.h.
template <class Code, bool kExact, bool kFeedback>
FCCL_ALWAYS_INLINE void average(const CodedRun* sources, int source_count, int own, std::size_t count,
                                std::uint32_t block, int divisor, float* remainder, char* codes,
                                void* scales) {
  alignas(64) float means[kLargestBlock];
  const float ranks = static_cast<float>(divisor);
  const Floats divide_by = Floats{} + (kExact ? 1 / ranks : ranks);
  for_each_block(count, block, [&](std::size_t index, std::size_t begin, std::size_t elements) {
    const std::size_t at = index * block * Code::kBytes;
    bool own_speaks = false;
    bool any_speaks = false;
    for (int s = 0; s < source_count; ++s) {
      const char* from = static_cast<const char*>(sources[s].codes) + at;
      const Floats scale = Floats{} + scale_at<Code>(sources[s].scales, index);
      Words any{};
      for (std::size_t i = 0; i < elements; i += kLanes) {
        char* const mean = reinterpret_cast<char*>(means + i);
        const Words code = load_codes<Code>(from + i * Code::kBytes);
        const Floats value = codec::generic::decode_scaled<Code, Floats>(code, scale);
        store(mean, s == 0 ? value : load<Floats>(mean) + value);
        if constexpr (kFeedback) any |= code;
      }
      if constexpr (kFeedback) {
        const bool speaks = largest_lane(any) != 0;
        any_speaks = any_speaks || speaks;
        own_speaks = own_speaks || (speaks && s == own);
      }
    }
    // All ones where the remainder goes into the sum, so that nothing of it waits.
    const Words joins = Words{} - (any_speaks && !own_speaks ? 1u : 0u);
    Words largest{};
    for (std::size_t i = 0; i < elements; i += kLanes) {
      char* const at_mean = reinterpret_cast<char*>(means + i);
      Floats sum = load<Floats>(at_mean);
      if constexpr (kFeedback) {
        if (joins[0] != 0) sum += load_floats(remainder + begin + i, elements - i);
      }
      const Floats mean = kExact ? sum * divide_by : sum / divide_by;
      store(at_mean, mean);
      largest = codec::generic::larger_magnitude(largest, codec::generic::finite_magnitude<Words>(mean));
    }
    const codec::BlockScale scale = Code::scale_of(largest_lane(largest));
    put_scale<Code>(scales, index, scale.scale);
    const Floats inverse = Floats{} + scale.inverse;
    const Floats back = Floats{} + scale.scale;
    char* const slot = codes + at;
    for (std::size_t i = 0; i < elements; i += kLanes) {
      const Floats mean = load<Floats>(reinterpret_cast<const char*>(means + i));
      const Words code = codec::generic::encode_scaled<Code, Words>(mean, inverse);
      store_codes<Code>(slot + i * Code::kBytes, code);
      if constexpr (kFeedback) {
        float* const rest = remainder + begin + i;
        const Floats previous = load_floats(rest, elements - i);
        const Floats waiting = __builtin_bit_cast(Floats, __builtin_bit_cast(Words, previous) & ~joins);
        store_floats(rest,
                     codec::generic::remainder_with<Code, Words>(mean, code, back, Floats{} + ranks, waiting,
                                                                 previous),
                     elements - i);
      }
    }
    clear_rest<Code>(slot, elements, block);
  });
}

template <class Code>
void average_blocks(const CodedRun* sources, int source_count, int own, std::size_t count,
                    std::uint32_t block, int divisor, float* remainder, void* codes, void* scales) {
  char* const to = static_cast<char*>(codes);
  if (is_power_of_two(divisor)) {
    if (remainder == nullptr) {
      average<Code, true, false>(sources, source_count, own, count, block, divisor, nullptr, to, scales);
    } else {
      average<Code, true, true>(sources, source_count, own, count, block, divisor, remainder, to, scales);
    }
  } else if (remainder == nullptr) {
    average<Code, false, false>(sources, source_count, own, count, block, divisor, nullptr, to, scales);
  } else {
    average<Code, false, true>(sources, source_count, own, count, block, divisor, remainder, to, scales);
  }
}

template <class Code>
void decode_blocks(CodedRun source, std::size_t count, std::uint32_t block, float* values) {
  for_each_block(count, block, [&](std::size_t index, std::size_t begin, std::size_t elements) {
    const char* from = static_cast<const char*>(source.codes) + index * block * Code::kBytes;
    const Floats scale = Floats{} + scale_at<Code>(source.scales, index);
    for (std::size_t i = 0; i < elements; i += kLanes) {
      store_floats(
          values + begin + i,
          codec::generic::decode_scaled<Code, Floats>(load_codes<Code>(from + i * Code::kBytes), scale),
          elements - i);
    }
  });
}

}  // namespace
}  // namespace fccl::cpu
