// The parameters of a bucket, or loose tensors: where a warp finds the block it works on.
#pragma once

#include <cstddef>

#include "cuda/bucket_args.h"
#include "cuda/seam.h"

namespace fccl::cuda {

// The range that holds number `at`, which some range does.
FCCL_KERNEL Range find_range(const RangeTable& table, std::uint64_t at) {
  std::uint32_t low = 0;
  std::uint32_t high = table.count;  // ranges[low].first <= at < ranges[high].first
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (load(&table.ranges[middle].first) <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return load(table.ranges + low);
}

// The same, for a warp that goes through blocks upwards: looks again only where the last range ends.
class RangeCursor {
 public:
  FCCL_KERNEL RangeCursor(const RangeTable& table, std::uint32_t block) : table_(table), block_(block) {}

  FCCL_KERNEL const Range& at(std::uint64_t number) {
    if (number >= end_) {
      range_ = find_range(table_, number);
      end_ = range_.first + (range_.length + block_ - 1) / block_;
    }
    return range_;
  }

 private:
  const RangeTable& table_;
  const std::uint32_t block_;
  Range range_{};
  std::uint64_t end_ = 0;
};

}  // namespace fccl::cuda
