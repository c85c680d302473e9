// What a rank's segment looks like: the words that ranks say to one another.
//
// Every rank owns one segment per group. It alone may write it; peers map it read-only. So each word
// has exactly one writer, and everything a rank learns it learns by reading others' segments.
//
//   | Control            | one-shot slots (2)  | staging slots (depth)    | result slots (depth)     |
//   | counters, status,  | small messages, by  | chunks of large messages | this rank's reduced      |
//   | descriptions       | parity of the call  | for the peers to read    | piece of each chunk      |
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/description.h"

namespace fccl::cpu {

// 128: adjacent 64-byte lines are fetched in pairs on x86, and some AArch64 cores have such lines.
inline constexpr std::size_t kLine = 128;
inline constexpr std::uint32_t kLayoutVersion = 3;

// Counters only grow, are 64 bits wide and start at zero. They are what peers wait for, so they
// share one line: a peer that polls one gets all.
struct alignas(kLine) ProgressLine {
  std::atomic<std::uint64_t> arrived{0};   // collectives begun
  std::atomic<std::uint64_t> staged{0};    // chunks put into staging slots
  std::atomic<std::uint64_t> done{0};      // chunks reduced (all_reduce) or read (broadcast, all_gather)
  std::atomic<std::uint64_t> given_up{0};  // the last collective that was left by an error (I8)
};

// Written only when a rank goes to sleep or wakes, so publishers can look at it cheaply.
struct alignas(kLine) ParkLine {
  std::atomic<std::uint32_t> parked{0};
};

enum class RankState : std::uint32_t { kActive = 0, kFailed = 1, kLeft = 2 };

// `state` is stored last (release). Once it is kFailed the rest is valid, once it is kLeft the text.
struct alignas(kLine) StatusLine {
  std::atomic<std::uint32_t> state{0};
  std::uint32_t kind = 0;          // ErrorKind
  std::uint64_t failed_at = 0;     // the collective's number
  char text[kLine * 4 - 16] = {};  // NUL-terminated
};

struct alignas(kLine) DescriptionLine {
  Description description;
};
// At least two are needed (see group.cpp, "Reuse"); more let a rank reject several calls in a row
// without waiting for its peers in between.
inline constexpr std::uint64_t kDescriptionLines = 16;

struct Control {
  ProgressLine progress;
  ParkLine park;
  StatusLine status;
  DescriptionLine descriptions[kDescriptionLines];
};
static_assert(sizeof(Control) % kLine == 0);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");

// Sizes that all ranks of a group must share: rank 0's hold.
struct Geometry {
  std::uint32_t one_shot_bytes = 0;  // size of a one-shot slot
  std::uint32_t chunk_bytes = 0;     // size of a staging slot
  std::uint32_t depth = 0;           // number of staging and of result slots
  std::uint32_t piece_bytes = 0;     // size of a result slot

  std::size_t one_shot_offset(std::uint64_t index) const { return sizeof(Control) + index * one_shot_bytes; }
  std::size_t staging_offset(std::uint64_t index) const {
    return one_shot_offset(2) + index % depth * chunk_bytes;
  }
  std::size_t result_offset(std::uint64_t index) const {
    return one_shot_offset(2) + std::size_t{depth} * chunk_bytes + index % depth * piece_bytes;
  }
  std::size_t segment_bytes() const {
    return one_shot_offset(2) + std::size_t{depth} * (std::size_t{chunk_bytes} + piece_bytes);
  }
  bool operator==(const Geometry&) const = default;
};

}  // namespace fccl::cpu
