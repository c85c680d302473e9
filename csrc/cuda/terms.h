// What the ranks of a group agree on before their GPUs share memory: either the kernels may be used, on these
// terms, by all, or they are used by nobody and one line says why.
//
// Each rank says what it is; everybody sees all; settle() is a pure function of that, so all ranks come to
// the same end.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cuda/policy.h"
#include "cuda/runtime.h"
#include "cuda/workspace.h"

namespace fccl::cuda {

// Changes with anything that kernels of two ranks must have in common: Control, Signal, the protocol, the way
// mailboxes are cut, GpuCall::pack().
inline constexpr std::uint32_t kProtocolVersion = 1;

// What a rank says. Fixed layout; from another process, so a stranger's bytes until settle() has looked.
struct RankTerms {
  std::uint32_t protocol = kProtocolVersion;
  DeviceFacts device;
  Link links[kMaxRanks] = {};  // to each rank's device; own: any. Known in the second round only
  std::uint8_t usable = 1;     // 0: this rank will not, see `why`
  std::uint8_t deterministic = 0;
  std::uint8_t float32_accumulation = 0;
  std::uint8_t may_share_gpu =
      0;  // whether ranks may have one GPU between them: for tests on a machine with one
  std::uint64_t half_bytes = 0;  // of the workspace it would make
  char why[160] = {};            // NUL-terminated

  void refuse(const std::string& reason) noexcept;
};

struct Terms {
  bool usable = false;
  std::string why_not;  // names the rank
  int world = 0;
  // Minima over the ranks.
  Link link = Link::kNone;
  int architecture = 0;
  int sm_count = 0;
  std::uint64_t half_bytes = 0;
  bool deterministic = false;
  bool float32_accumulation = false;

  LaunchQuestion question(Collective collective, ReduceOp op, DType dtype, std::uint64_t bytes) const;
};

// Whether devices can be used together, before links are known: versions, number of ranks, one GPU each
// (unless all ranks let them share).
Terms settle_devices(std::span<const RankTerms> ranks);
// The same, and the worst link between any two.
Terms settle(std::span<const RankTerms> ranks);

}  // namespace fccl::cuda
