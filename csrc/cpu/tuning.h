// Every measured number of the CPU engine, in one place. docs/performance.md says how they were found.
#pragma once

#include <chrono>
#include <cstdint>

#include "cpu/layout.h"

namespace fccl::cpu {

// Slots for a group of `world_size` ranks on one node. Results do not depend on any of these.
constexpr Geometry geometry_for(int world_size) {
  const auto ranks = static_cast<std::uint32_t>(world_size);
  Geometry g;
  // Up to here every rank reads every other rank's whole message: one rendezvous instead of two,
  // for world_size times the reading.
  g.one_shot_bytes = ranks <= 2 ? 64 << 10 : 32 << 10;
  // A piece is what one rank reduces of a chunk. Chunk and results should stay in the second-level cache
  // of the core that wrote them, and be long enough to hide a rendezvous. With two ranks 256 KiB
  // was best for 64 MiB (19 ms, 128 KiB 22) and alike below; with four ranks on two cores 128 KiB took 46 ms
  // for 64 MiB where 256 KiB took 58 and 512 KiB 71.
  const std::uint32_t piece = (512U << 10) / (ranks < 2 ? 2 : ranks) / kLine * kLine;
  g.piece_bytes = piece < 4096 ? 4096 : piece;
  g.chunk_bytes = g.piece_bytes * ranks;
  g.depth = 3;  // what the pipelines need, see all_reduce.cpp
  g.ranks = ranks;
  return g;
}

// Pieces of an all_to_all above this many bytes are copied from the sender's arena if they lie there.
inline constexpr std::size_t kZeroCopyBytes = 16 << 10;

// Messages between two ranks up to here travel with their record; the sender does not wait for them.
inline constexpr std::size_t kEagerBytes = 16 << 10;
// Unless the receiver keeps as much as this already for receives that it has not posted.
inline constexpr std::uint64_t kMostKept = 1 << 20;
// As much of a longer one is moved before other messages are looked at again.
inline constexpr std::size_t kPullBytes = 1 << 20;

// Waiting (see wait.h).
inline constexpr auto kSpinTime = std::chrono::microseconds(100);
inline constexpr auto kYieldTime = std::chrono::microseconds(200);
// Where ranks outnumber cores, yielding is what hands the core to the rank we wait for.
inline constexpr auto kCrowdedYieldTime = std::chrono::microseconds(1000);
inline constexpr auto kParkSlice = std::chrono::milliseconds(50);

// How long a rank that leaves waits for its sends to be received.
inline constexpr auto kSendGrace = std::chrono::seconds(3);

// How long a rank whose call has failed waits for peers to be done with its memory.
inline constexpr auto kGiveUpPatience = std::chrono::seconds(2);

}  // namespace fccl::cpu
