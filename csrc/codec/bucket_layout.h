// How a bucket of gradients lies on the wire when it travels compressed.
//
// The bucket is a list of ranges, one per parameter, in order. Each is either coded, in blocks that begin at
// the parameter (so that a block, its scale and its remainder mean the same however buckets are cut), or
// exempt, and then its elements travel as they are, as float32. All blocks of the bucket are numbered
// through, and so are all exempt elements; both sequences are cut into one part per rank, of equal size but
// for the last ones, which may be shorter or empty. A rank's two parts form its shard. On the wire every
// shard has the same size:
//
//   codes:  blocks_per_shard slots of `block` codes; a parameter's last block may fill its slot only in part
//   scales: blocks_per_shard float32, then zeros up to a multiple of 16 bytes; formats without a scale: none
//   exempt: exempt_per_shard float32, a multiple of 4
//
// Slots that hold no block, and what a short block leaves free, are zero bytes, so that messages depend on
// nothing but the gradients.
#pragma once

#include <cstdint>

#include "codec/float16.h"

namespace fccl::codec {

struct BucketLayout {
  std::uint64_t blocks = 0;  // of the bucket
  std::uint64_t exempt = 0;  // elements of the bucket
  std::uint64_t blocks_per_shard = 0;
  std::uint64_t exempt_per_shard = 0;  // elements
  std::uint32_t block = 0;             // elements of a block: 128, 256, 512 or 1024
  std::uint32_t code_bytes = 0;        // of an element
  std::uint32_t scale_bytes = 0;       // of a block: 4 or 0
  std::uint32_t world = 1;

  static constexpr std::uint64_t blocks_of(std::uint64_t elements, std::uint32_t block) {
    return (elements + block - 1) / block;
  }

  static constexpr BucketLayout make(std::uint64_t blocks, std::uint64_t exempt, std::uint32_t block,
                                     int code_bytes, bool scaled, int world) {
    const auto ranks = static_cast<std::uint64_t>(world);
    BucketLayout layout;
    layout.blocks = blocks;
    layout.exempt = exempt;
    layout.blocks_per_shard = (blocks + ranks - 1) / ranks;
    layout.exempt_per_shard = ((exempt + ranks - 1) / ranks + 3) / 4 * 4;
    layout.block = block;
    layout.code_bytes = static_cast<std::uint32_t>(code_bytes);
    layout.scale_bytes = scaled ? 4 : 0;
    layout.world = static_cast<std::uint32_t>(world);
    return layout;
  }

  // Offsets in a shard, in bytes.
  FCCL_HOST_DEVICE constexpr std::uint64_t codes_at(std::uint64_t block_of_shard) const {
    return block_of_shard * block * code_bytes;
  }
  FCCL_HOST_DEVICE constexpr std::uint64_t scale_at(std::uint64_t block_of_shard) const {
    return codes_at(blocks_per_shard) + block_of_shard * scale_bytes;
  }
  FCCL_HOST_DEVICE constexpr std::uint64_t exempt_at(std::uint64_t element_of_shard) const {
    return (scale_at(blocks_per_shard) + 15) / 16 * 16 + element_of_shard * 4;
  }
  FCCL_HOST_DEVICE constexpr std::uint64_t shard_bytes() const { return exempt_at(exempt_per_shard); }

  // How much of shard `rank` is in use.
  FCCL_HOST_DEVICE constexpr std::uint64_t blocks_in(std::uint64_t rank) const {
    return part_of(blocks, blocks_per_shard, rank);
  }
  FCCL_HOST_DEVICE constexpr std::uint64_t exempt_in(std::uint64_t rank) const {
    return part_of(exempt, exempt_per_shard, rank);
  }

 private:
  static FCCL_HOST_DEVICE constexpr std::uint64_t part_of(std::uint64_t all, std::uint64_t part,
                                                          std::uint64_t rank) {
    const std::uint64_t begin = part * rank;
    return begin >= all ? 0 : (all - begin < part ? all - begin : part);
  }
};

// Calls visit(shard, begin, count) for each shard that holds some of the `count` units (blocks, or exempt
// elements) numbered from `first` on: `count` units that begin at unit `begin` of that shard.
template <class Visit>
constexpr void for_each_part(std::uint64_t first, std::uint64_t count, std::uint64_t per_shard,
                             Visit&& visit) {
  while (count != 0) {
    const std::uint64_t begin = first % per_shard;
    const std::uint64_t part = per_shard - begin < count ? per_shard - begin : count;
    visit(first / per_shard, begin, part);
    first += part;
    count -= part;
  }
}

}  // namespace fccl::codec
