// What a launch says of its call: one word that travels beside every signal, and its way back into words.
#pragma once

#include <cstdint>
#include <string>

#include "common/description.h"
#include "common/dtype.h"

namespace fccl::cuda {

// What all ranks must agree on. Two calls that differ in any of it have different words.
struct GpuCall {
  Collective collective = Collective::kNone;
  ReduceOp op = ReduceOp::kSum;  // kAllReduce only
  DType dtype = DType::kBytes;
  std::int32_t root = 0;    // kBroadcast only
  std::uint64_t count = 0;  // elements that each rank puts in; below kCountLimit

  // The word has 47 bits for it: no tensor is that large.
  static constexpr std::uint64_t kCountLimit = std::uint64_t{1} << 47;

  std::uint64_t pack() const noexcept;
  // Of any 64 bits: a peer's word is a stranger's.
  static GpuCall unpack(std::uint64_t word) noexcept;
  // "all_reduce(float32, count=3, op=sum)".
  std::string to_string() const;
};

}  // namespace fccl::cuda
