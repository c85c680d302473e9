// The three passes over a compressed bucket, and each reads and writes every byte once:
//
//   EncodeBucket   gradients (+ remainders) -> codes and scales for every rank; new remainders
//   ReduceShard    this rank's shard of all ranks -> sum in float32, in rank order, divided -> codes and
//   scales DecodeBucket   all shards -> gradients
//
// One warp works on one block at a time. codec/block.h says what codes mean, codec/bucket_layout.h where they
// lie; the results are the CPU's, bit for bit.
#pragma once

#include "codec/block.h"
#include "codec/bucket_layout.h"
#include "cuda/bucket_args.h"
#include "cuda/lanes.h"
#include "cuda/ranges.h"

namespace fccl::cuda {

// A grid's warps, numbered through.
FCCL_KERNEL std::uint64_t first_warp() { return first_thread() / kWarpSize; }
FCCL_KERNEL std::uint64_t warp_count() { return threads_of_grid() / kWarpSize; }

// The scale and codes of a block that is in registers.
template <class Code, int kPerLane>
FCCL_KERNEL codec::BlockScale encode_lanes(const float (&values)[kPerLane],
                                           std::uint32_t (&codes)[kPerLane]) {
  codec::BlockScale scale{1, 1};
  if constexpr (Code::kScaled) scale = Code::scale_of(largest_magnitude(values));
  FCCL_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    codes[i] = codec::generic::encode_scaled<Code, std::uint32_t>(values[i], scale.inverse);
  }
  return scale;
}

template <class Code, int kPerLane>
FCCL_KERNEL void store_block(const codec::BucketLayout& layout, std::byte* shard, std::uint64_t slot,
                             const std::uint32_t (&codes)[kPerLane], float scale) {
  store_codes<Code>(shard + layout.codes_at(slot), codes);
  if constexpr (Code::kScaled) {
    if (lane_index() == 0) store(reinterpret_cast<float*>(shard + layout.scale_at(slot)), scale);
    // The last slot's warp fills up to the exempt part.
    if (slot + 1 == layout.blocks_per_shard) {
      const std::uint64_t pad = layout.scale_at(layout.blocks_per_shard) + lane_index() * 4;
      if (pad < layout.exempt_at(0)) store(reinterpret_cast<std::uint32_t*>(shard + pad), 0u);
    }
  }
}

template <class Code>
FCCL_KERNEL float load_scale(const codec::BucketLayout& layout, const std::byte* shard, std::uint64_t slot) {
  if constexpr (!Code::kScaled) return 1.0f;
  return load(reinterpret_cast<const float*>(shard + layout.scale_at(slot)));
}

template <class Source, class Code, int kBlock>
struct EncodeBucket {
  static constexpr int kThreads = kBucketThreads;
  static constexpr int kBlocksPerMultiprocessor =
      bucket_blocks_per_multiprocessor(BucketKernel::kEncode, kBlock);
  using Args = EncodeBucketArgs;
  using Stored = typename Source::Stored;

  FCCL_KERNEL static void run(const Args& args) {
    encode(args);
    copy_exempt(args);
  }

 private:
  static constexpr int kPerLane = kBlock / kWarpSize;

  FCCL_KERNEL static void encode(const Args& args) {
    const codec::BucketLayout& layout = args.layout;
    const std::uint64_t slots = layout.blocks_per_shard * layout.world;
    RangeCursor cursor(args.coded, kBlock);
    for (std::uint64_t b = first_warp(); b < slots; b += warp_count()) {
      std::byte* shard = args.wire + b / layout.blocks_per_shard * layout.shard_bytes();
      const std::uint64_t slot = b % layout.blocks_per_shard;
      std::uint32_t codes[kPerLane]{};
      float scale = 0;
      if (b < layout.blocks) {
        const Range& range = cursor.at(b);
        const std::uint64_t begin = (b - range.first) * kBlock;
        const std::uint64_t count = range.length - begin;
        scale = encode_block(reinterpret_cast<const Stored*>(range.data) + begin,
                             range.remainder ? range.remainder + begin : nullptr, count, codes);
      }
      store_block<Code>(layout, shard, slot, codes, scale);
    }
  }

  FCCL_KERNEL static float encode_block(const Stored* gradients, float* remainders, std::uint64_t count,
                                        std::uint32_t (&codes)[kPerLane]) {
    float values[kPerLane];
    load_lanes<Source>(gradients, count, values);
    if (!remainders) return encode_lanes<Code>(values, codes).scale;
    // A block of nothing but zeros (a parameter that nobody used, a rank that has run out of data) has
    // nothing to say: its remainder waits.
    if (all_zero(values)) return 0;
    float previous[kPerLane];
    load_lanes<FloatSource>(remainders, count, previous);
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) values[i] += previous[i];
    const float scale = encode_lanes<Code>(values, codes).scale;
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      previous[i] =
          codec::generic::remainder_of<Code, std::uint32_t>(values[i], codes[i], scale, previous[i]);
    }
    store_lanes<FloatSource>(remainders, count, previous);
    return scale;
  }

  FCCL_KERNEL static void copy_exempt(const Args& args) {
    const codec::BucketLayout& layout = args.layout;
    const std::uint64_t slots = layout.exempt_per_shard * layout.world;
    const std::uint64_t step = threads_of_grid();
    for (std::uint64_t e = first_thread(); e < slots; e += step) {
      float value = 0;
      if (e < layout.exempt) {
        const Range range = find_range(args.exempt, e);
        value = Source::widen(load(reinterpret_cast<const Stored*>(range.data) + (e - range.first)));
      }
      std::byte* shard = args.wire + e / layout.exempt_per_shard * layout.shard_bytes();
      store(reinterpret_cast<float*>(shard + layout.exempt_at(e % layout.exempt_per_shard)), value);
    }
  }
};

template <class Code, int kBlock>
struct ReduceShard {
  static constexpr int kThreads = kBucketThreads;
  static constexpr int kBlocksPerMultiprocessor =
      bucket_blocks_per_multiprocessor(BucketKernel::kReduce, kBlock);
  using Args = ReduceShardArgs;

  FCCL_KERNEL static void run(const Args& args) {
    const float divisor = load(args.divisor);
    reduce(args, divisor);
    reduce_exempt(args, divisor);
  }

 private:
  static constexpr int kPerLane = kBlock / kWarpSize;

  FCCL_KERNEL static void reduce(const Args& args, float divisor) {
    const codec::BucketLayout& layout = args.layout;
    const std::uint64_t used = layout.blocks_in(args.rank);
    RangeCursor cursor(args.coded, kBlock);
    for (std::uint64_t slot = first_warp(); slot < layout.blocks_per_shard; slot += warp_count()) {
      std::uint32_t codes[kPerLane]{};
      float scale = 0;
      if (slot < used) {
        float mean[kPerLane];
        const bool own_is_silent = sum_of(args, slot, mean);
        const std::uint64_t b = args.rank * layout.blocks_per_shard + slot;
        const Range& range = cursor.at(b);
        const std::uint64_t begin = (b - range.first) * kBlock;
        if (range.remainder && own_is_silent) add_remainder(range, begin, mean);
        FCCL_UNROLL
        for (int i = 0; i < kPerLane; ++i) mean[i] = mean[i] / divisor;
        scale = encode_lanes<Code>(mean, codes).scale;
        if (range.remainder) keep_remainder(range, begin, mean, codes, scale, divisor, !own_is_silent);
      }
      store_block<Code>(layout, args.out, slot, codes, scale);
    }
  }

  // Returns whether the own rank has sent nothing but zeros, and another one has not; known to all lanes.
  FCCL_KERNEL static bool sum_of(const Args& args, std::uint64_t slot, float (&sum)[kPerLane]) {
    const codec::BucketLayout& layout = args.layout;
    std::uint32_t own = 0;
    std::uint32_t any = 0;
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) sum[i] = 0;
    for (std::uint32_t rank = 0; rank < layout.world; ++rank) {
      const std::byte* shard = args.wires + rank * layout.shard_bytes();
      std::uint32_t codes[kPerLane];
      load_codes<Code>(shard + layout.codes_at(slot), codes);
      const float scale = load_scale<Code>(layout, shard, slot);
      FCCL_UNROLL
      for (int i = 0; i < kPerLane; ++i) {
        const float value = codec::generic::decode_scaled<Code, float>(codes[i], scale);
        sum[i] = rank == 0 ? value : sum[i] + value;
        any |= codes[i];
        if (rank == args.rank) own |= codes[i];
      }
    }
    return any_lane(any) && !any_lane(own);
  }

  FCCL_KERNEL static void add_remainder(const Range& range, std::uint64_t begin, float (&sum)[kPerLane]) {
    float waiting[kPerLane];
    load_lanes<FloatSource>(range.remainder + begin, range.length - begin, waiting);
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) sum[i] += waiting[i];
  }

  // The second rounding's error, as a share of this rank's gradient: error feedback makes it good like its
  // own.
  FCCL_KERNEL static void keep_remainder(const Range& range, std::uint64_t begin,
                                         const float (&mean)[kPerLane],
                                         const std::uint32_t (&codes)[kPerLane], float scale, float divisor,
                                         bool waits) {
    const std::uint64_t count = range.length - begin;
    float kept[kPerLane];
    load_lanes<FloatSource>(range.remainder + begin, count, kept);
    FCCL_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      kept[i] = codec::generic::remainder_with<Code, std::uint32_t>(mean[i], codes[i], scale, divisor,
                                                                    waits ? kept[i] : 0.0f, kept[i]);
    }
    store_lanes<FloatSource>(range.remainder + begin, count, kept);
  }

  FCCL_KERNEL static void reduce_exempt(const Args& args, float divisor) {
    const codec::BucketLayout& layout = args.layout;
    const std::uint64_t used = layout.exempt_in(args.rank);
    const std::uint64_t step = threads_of_grid();
    for (std::uint64_t e = first_thread(); e < layout.exempt_per_shard; e += step) {
      float sum = 0;
      if (e < used) {
        for (std::uint32_t rank = 0; rank < layout.world; ++rank) {
          const std::byte* shard = args.wires + rank * layout.shard_bytes();
          const float value = load(reinterpret_cast<const float*>(shard + layout.exempt_at(e)));
          sum = rank == 0 ? value : sum + value;
        }
        sum = codec::generic::with_one_nan<std::uint32_t>(sum / divisor);  // the CPU's reductions do so
      }
      store(reinterpret_cast<float*>(args.out + layout.exempt_at(e)), sum);
    }
  }
};

template <class Source, class Code, int kBlock>
struct DecodeBucket {
  static constexpr int kThreads = kBucketThreads;
  static constexpr int kBlocksPerMultiprocessor =
      bucket_blocks_per_multiprocessor(BucketKernel::kDecode, kBlock);
  using Args = DecodeBucketArgs;
  using Stored = typename Source::Stored;

  FCCL_KERNEL static void run(const Args& args) {
    std::uint32_t largest = 0;  // of the bits of all magnitudes: beyond inf's if any is not finite
    decode(args, largest);
    copy_exempt(args, largest);
    if (args.not_finite && largest >= codec::kInfinityBits) store(args.not_finite, 1u);
  }

 private:
  static constexpr int kPerLane = kBlock / kWarpSize;

  FCCL_KERNEL static void note(float value, std::uint32_t& largest) {
    largest =
        codec::generic::larger_magnitude(largest, __builtin_bit_cast(std::uint32_t, value) & 0x7fffffffu);
  }

  FCCL_KERNEL static void decode(const Args& args, std::uint32_t& largest) {
    const codec::BucketLayout& layout = args.layout;
    RangeCursor cursor(args.coded, kBlock);
    for (std::uint64_t b = first_warp(); b < layout.blocks; b += warp_count()) {
      const std::byte* shard = args.wire + b / layout.blocks_per_shard * layout.shard_bytes();
      const std::uint64_t slot = b % layout.blocks_per_shard;
      std::uint32_t codes[kPerLane];
      load_codes<Code>(shard + layout.codes_at(slot), codes);
      const float scale = load_scale<Code>(layout, shard, slot);
      float values[kPerLane];
      FCCL_UNROLL
      for (int i = 0; i < kPerLane; ++i) {
        values[i] = codec::generic::decode_scaled<Code, float>(codes[i], scale);
        note(values[i], largest);
      }
      const Range& range = cursor.at(b);
      const std::uint64_t begin = (b - range.first) * kBlock;
      store_lanes<Source>(reinterpret_cast<Stored*>(range.data) + begin, range.length - begin, values);
    }
  }

  FCCL_KERNEL static void copy_exempt(const Args& args, std::uint32_t& largest) {
    const codec::BucketLayout& layout = args.layout;
    const std::uint64_t step = threads_of_grid();
    for (std::uint64_t e = first_thread(); e < layout.exempt; e += step) {
      const std::byte* shard = args.wire + e / layout.exempt_per_shard * layout.shard_bytes();
      const float value =
          load(reinterpret_cast<const float*>(shard + layout.exempt_at(e % layout.exempt_per_shard)));
      note(value, largest);
      const Range range = find_range(args.exempt, e);
      store(reinterpret_cast<Stored*>(range.data) + (e - range.first), Source::narrow(value));
    }
  }
};

}  // namespace fccl::cuda
