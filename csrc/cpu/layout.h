// What a rank's segment looks like: the words that ranks say to one another.
//
// Every rank owns one segment per group. It alone may write it; peers map it read-only. So each word
// has exactly one writer, and everything a rank learns it learns by reading others' segments.
//
//   | Control           | LaneControl,  | one-shot slots (2) | staging slots (depth) | result slots  | lane
//   data, | | counters, status, | one for each  | small messages, by | chunks of large ones  | (depth), this
//   | one for    | | descriptions      | peer          | parity of the call | for the peers to read | rank's
//   pieces | each peer  |
//
// Slots get their memory at the group's first collective, a lane's data when it is first used: a program may
// make many groups that it never uses. So nothing there is read before the owner has arrived at a
// collective, or posted a record.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/description.h"

namespace fccl::cpu {

// 128: adjacent 64-byte lines are fetched in pairs on x86, and some AArch64 cores have such lines.
inline constexpr std::size_t kLine = 128;
inline constexpr std::uint32_t kLayoutVersion = 7;

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

// What this rank says to one peer about messages between the two of them (lane.h).
struct LaneControl {
  struct alignas(kLine) Words {
    std::atomic<std::uint64_t> bell{0};    // grows with any of the following: what the peer sleeps on
    std::atomic<std::uint64_t> posted{0};  // bytes of records written
    std::atomic<std::uint64_t> read{0};    // bytes of the peer's records read
    std::atomic<std::uint64_t> staged{0};  // chunks of messages put into the lane's slots
    std::atomic<std::uint64_t> copied{0};  // chunks taken out of the slots of the peer's lane
    std::atomic<std::uint64_t> kept{0};    // bytes of the peer's messages that wait for a receive; no counter
  } words;
  ParkLine park;  // how many threads of this rank sleep on the peer's bell
};
static_assert(sizeof(LaneControl) == 2 * kLine);

inline constexpr std::size_t kRingBytes = 128 << 10;
inline constexpr std::size_t kLaneChunkBytes = 128 << 10;
inline constexpr std::size_t kLaneChunks = 4;
inline constexpr std::size_t kLaneBytes = kRingBytes + kLaneChunks * kLaneChunkBytes;
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");

// Sizes that all ranks of a group must share: rank 0's hold.
struct Geometry {
  std::uint32_t one_shot_bytes = 0;  // size of a one-shot slot
  std::uint32_t chunk_bytes = 0;     // size of a staging slot
  std::uint32_t depth = 0;           // number of staging and of result slots
  std::uint32_t piece_bytes = 0;     // size of a result slot
  std::uint32_t ranks = 0;

  std::size_t lane_control_offset(int peer) const {
    return sizeof(Control) + static_cast<std::size_t>(peer) * sizeof(LaneControl);
  }
  // The part that has memory from the start.
  std::size_t control_bytes() const { return sizeof(Control) + std::size_t{ranks} * sizeof(LaneControl); }
  std::size_t one_shot_offset(std::uint64_t index) const { return control_bytes() + index * one_shot_bytes; }
  std::size_t staging_offset(std::uint64_t index) const {
    return one_shot_offset(2) + index % depth * chunk_bytes;
  }
  std::size_t result_offset(std::uint64_t index) const {
    return one_shot_offset(2) + std::size_t{depth} * chunk_bytes + index % depth * piece_bytes;
  }
  std::size_t slot_bytes() const {
    return 2 * std::size_t{one_shot_bytes} + std::size_t{depth} * (std::size_t{chunk_bytes} + piece_bytes);
  }
  std::size_t lane_offset(int peer) const {
    constexpr std::size_t kPage = 4096;
    return (one_shot_offset(0) + slot_bytes() + kPage - 1) / kPage * kPage +
           static_cast<std::size_t>(peer) * kLaneBytes;
  }
  std::size_t segment_bytes() const { return lane_offset(static_cast<int>(ranks)); }
  bool operator==(const Geometry&) const = default;
};

}  // namespace fccl::cpu
