// What one rank's GPU shares with its peers: a control part and two halves of mailboxes.
//
// Every rank maps the workspaces of all. Who may write which word is said beside it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fccl::cuda {

inline constexpr int kMaxRanks = 8;
inline constexpr unsigned kMaxBlocks = 64;
inline constexpr unsigned kMaxPhases = 2;

// "I have come this far." Written by one block of one peer: the description of its call first, then, with a
// release, the number of the launch. That number has 64 bits and never comes again.
struct alignas(16) Signal {
  std::uint64_t description;
  std::uint64_t generation;
};

struct alignas(128) Control {
  // Own kernels only.
  std::uint64_t generation;                    // of the launch that runs, or that comes next; 1 at first
  std::uint32_t finished_blocks;               // of the launch that runs
  std::uint32_t reported;                      // 1 once the failure has been written to host memory
  std::uint64_t block_generation[kMaxBlocks];  // for a fault that tests inject; else unused

  // Any peer and the own host: 0, or 1 + the rank that gave up. Never goes back to 0.
  alignas(128) std::uint32_t abort;

  // [half][phase][block][peer]: that peer only.
  alignas(128) Signal signals[2][kMaxPhases][kMaxBlocks][kMaxRanks];
};

enum class Failure : std::uint32_t {
  kNone = 0,
  kExpired = 1,   // `peer` did not come in time
  kAborted = 2,   // `peer` gave up
  kMismatch = 3,  // `peer` made another call
};

// The first failure of a rank's kernels, in host memory that the GPU can write. `failure` comes last, with a
// release.
struct alignas(64) Status {
  std::uint32_t failure;
  std::uint32_t peer;
  std::uint64_t generation;
  std::uint64_t mine;        // descriptions
  std::uint64_t theirs;      // kMismatch only
  std::uint64_t timeout_ns;  // the launch's
};

// What every communicating kernel is told.
struct Session {
  std::byte* workspace[kMaxRanks];  // of each rank, where this GPU has it
  std::uint64_t half_bytes;         // of one half of the mailboxes; a multiple of 16
  std::uint64_t description;        // pack() in call.h: what all ranks must agree on
  std::uint64_t timeout_ns;
  Status* status;
  std::int32_t rank;
  std::int32_t world;
};

inline constexpr std::size_t workspace_bytes(std::size_t half_bytes) {
  return sizeof(Control) + 2 * half_bytes;
}

}  // namespace fccl::cuda
