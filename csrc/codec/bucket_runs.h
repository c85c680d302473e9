// A bucket's parameters, and where each of them lies in the two sequences that bucket_layout.h cuts into
// shards: for the host, which hands them to the CPU's coder and to the GPU's kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/bucket_layout.h"
#include "codec/format.h"

namespace fccl::codec {

// A parameter's elements in a bucket.
struct BucketRange {
  std::uint64_t begin = 0;   // the first one in the bucket
  std::uint64_t length = 0;  // how many
  bool exempt = false;       // these travel as they are
  // Error feedback: what earlier codes did not say, one number per element; nullptr: none is kept.
  float* remainder = nullptr;
};

struct BucketRuns {
  struct Run {
    BucketRange range;
    std::uint64_t first;  // the number of its first block, or exempt element, in the bucket
  };
  BucketLayout layout;
  std::vector<Run> coded;
  std::vector<Run> exempt;
};

// Ranges may lie in any order; empty ones are left out.
inline BucketRuns number_runs(BlockFormat format, std::uint32_t block, int world_size,
                              const std::vector<BucketRange>& ranges) {
  BucketRuns runs;
  std::uint64_t blocks = 0;
  std::uint64_t exempt = 0;
  for (const BucketRange& range : ranges) {
    if (range.length == 0) continue;
    if (range.exempt) {
      runs.exempt.push_back({range, exempt});
      exempt += range.length;
    } else {
      runs.coded.push_back({range, blocks});
      blocks += BucketLayout::blocks_of(range.length, block);
    }
  }
  const CodeSize code = size_of_code(format);
  runs.layout = BucketLayout::make(blocks, exempt, block, code.bytes, code.scaled, world_size);
  return runs;
}

}  // namespace fccl::codec
