// What a rank says about a collective before any data of it is read.
//
// Every rank publishes one Description per call. Once all have, each rank checks all of them with
// check_compatible(), a pure function: equal inputs, hence an equal verdict on every rank. What
// makes calls fit is a rule per operation, not equality (an all_gather may be uneven, a gate lets
// splits differ).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "common/dtype.h"

namespace fccl {

// Values are part of the shared-memory layout: append only.
enum class Collective : std::uint8_t {
  kNone = 0,
  kAllReduce = 1,
  kAllGather = 2,
  kBroadcast = 3,
  kBarrier = 4,
  // A call this rank refused before it had a number's worth of work: its peers must not wait for it.
  kRejected = 5,
  // Delegated to the inner engine; only the description passes through here.
  kReduce = 6,
  kGather = 7,
  kScatter = 8,
  kReduceScatter = 9,
  kAllToAll = 10,
  kSparseAllReduce = 11,
  // A gradient hook's: several exchanges of bytes, behind one comparison.
  kCompressedAllReduce = 12,
  // The steps in which a group's GPUs come to share memory.
  kGpuSetup = 13,
};
inline constexpr std::uint8_t kCollectiveCount = 14;

const char* name_of(Collective collective) noexcept;
// Whether its descriptions have a note. Where others are kept, the note's bytes may be an earlier call's.
constexpr bool has_note(Collective collective) noexcept {
  return collective == Collective::kRejected || collective == Collective::kCompressedAllReduce;
}

// Fixed layout, copied into shared memory as it is. Peers' bytes are a stranger's bytes: readers
// copy the whole struct out once and validate() the copy.
struct Description {
  Collective collective = Collective::kNone;
  DType dtype = DType::kBytes;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::uint8_t flags = 0;   // kUneven
  std::int32_t root = -1;   // rank in the group; -1 where there is none
  std::uint64_t count = 0;  // elements this rank contributes (broadcast: of the message)
  // Elements received; with kUneven a fingerprint of the sizes; kCompressedAllReduce: of how the elements are
  // coded; or 0.
  std::uint64_t output_count = 0;
  std::uint32_t tensors = 1;  // tensors in a coalesced call
  std::uint32_t reserved = 0;
  // Where this rank's tensors lie in its arena, or kNowhere. Not compared: ranks need not agree on it.
  std::uint64_t input_at = kNowhere;
  std::uint64_t output_at = kNowhere;
  char note[192] = {};  // NUL-terminated; kRejected: why; kCompressedAllReduce: how. Not compared.

  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

  // all_gather and gate: ranks may contribute different counts.
  static constexpr std::uint8_t kUneven = 1;
  // reduce_scatter: output_count is a fingerprint of the list of sizes, which must be the same on all ranks.
  static constexpr std::uint8_t kSizes = 2;

  static Description of(Collective collective, DType dtype, std::uint64_t count, int root = -1,
                        ReduceOp op = ReduceOp::kSum) noexcept;
  // The call that a rank refuses, and why.
  static Description rejected(const std::string& why) noexcept;

  void set_note(const std::string& text) noexcept;
  // Replaces what a well-behaved peer could not have written: enumerators out of range, a note that
  // is not terminated, printable UTF-8.
  void validate() noexcept;
  // "all_reduce(float32, count=3, op=sum)".
  std::string to_string() const;
};
static_assert(std::is_trivially_copyable_v<Description>);
static_assert(sizeof(Description) == 240, "part of the shared-memory layout");

// Empty if the calls fit; else a message that holds every rank's call (equal calls are listed once,
// with their ranks) and says what differs.
std::string check_compatible(std::span<const Description> calls);

}  // namespace fccl
