// Which engine a collective on CUDA tensors goes to, and with what grid: a pure function of values that every
// rank knows and all agree on.
//
// That is the whole of its safety. Ranks that chose differently would wait for each other in different
// engines, and grids that differ would wait for blocks that nobody launched. So nothing enters that only one
// rank knows: not an address or its alignment, not the time, not the environment. What may differ from rank
// to rank (architecture, number of SMs, size of the workspace, kind of link, what a user's environment asks
// for) is exchanged when the group is made, and enters as the minimum over all ranks. Two ranks whose tensors
// differ in type or size still plan differently; the description that travels with every launch finds them
// out, and so does the gate before it.
//
// plan_launch() runs before every call, so it allocates nothing and its reasons are constant strings.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/description.h"
#include "common/dtype.h"

namespace fccl::cuda {

// How a group's GPUs reach each other's memory: the worst pair of the group. In ascending order, so that the
// minimum over ranks is right.
enum class Link : std::uint8_t {
  kNone = 0,  // some pair cannot, or sits in another node; or it was tried and did not work
  kPcie = 1,
  kNvlink = 2,  // every pair directly or through NVSwitch
};

enum class Algorithm : std::uint8_t {
  kInner = 0,  // NCCL
  kOneShotAllReduce = 1,
  kTwoShotAllReduce = 2,
  kOneShotAllGather = 3,
  kBroadcast = 4,
};
const char* name_of(Algorithm algorithm) noexcept;
const char* name_of(Link link) noexcept;

struct LaunchQuestion {
  Collective collective = Collective::kNone;
  ReduceOp op = ReduceOp::kSum;  // kAllReduce only
  DType dtype = DType::kBytes;
  std::uint64_t bytes = 0;  // that each rank puts in: of the tensor; all_gather: of one rank's input
  int world = 1;
  // Minima over the ranks of the group.
  Link link = Link::kNone;
  int architecture = 0;          // compute capability: 80, 86, 90, 100, …
  int sm_count = 0;              // multiprocessors
  std::uint64_t half_bytes = 0;  // Session::half_bytes
  // Wishes that hold if all ranks have them.
  bool deterministic = false;  // FCCL_CUDA_DETERMINISTIC=1: results that depend on nothing but the inputs
  bool float32_accumulation = false;  // 16-bit floats are summed in float32 and rounded once
};

struct LaunchPlan {
  Algorithm algorithm = Algorithm::kInner;
  // The element of the kernel to launch: `dtype`, or for what only moves bytes and has no kernel of its own
  // kInt32 (collectives.cu).
  DType element = DType::kBytes;
  unsigned blocks = 0;  // 0 for kInner
  unsigned threads = 0;
  const char* reason = "";  // in words, for diagnostics

  bool operator==(const LaunchPlan&) const = default;
};

// Promises, whatever is asked:
//  - a plan with a kernel has a kernel for its element and operation, and its mailboxes fit a half;
//  - its blocks can all be resident at once, beside some others': they take a quarter of the multiprocessors
//  at
//    most. They spin, so a block that waits for a place while its peers' blocks wait for it would never run;
//  - a block has whole warps, hence more threads than there are ranks (protocol.h, 1.).
LaunchPlan plan_launch(const LaunchQuestion& question) noexcept;

}  // namespace fccl::cuda
