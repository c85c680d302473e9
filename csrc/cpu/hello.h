// What ranks tell one another through the Store before they share memory, and what follows from it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "cpu/layout.h"
#include "cpu/siphash.h"

namespace fccl::cpu {

// Tells this process from every other, and from its own forked children.
using ProcessId = std::array<std::uint64_t, 2>;
ProcessId this_process();

// One record a rank, stored as its bytes: both sides run the same build of fccl or refuse each other
// by `layout_version`. Read from the Store by strangers' hands: parse() checks size, magic and text.
struct Hello {
  static constexpr std::uint64_t kMagic = 0x31304c4343460000ULL;  // "FCCL01"

  std::uint64_t magic = kMagic;
  std::uint32_t layout_version = kLayoutVersion;
  std::uint32_t world_size = 0;
  ProcessId process{};
  std::uint64_t network_namespace = 0;
  std::uint64_t node = 0;         // id of the newest node object in this process, 0 if there is none
  std::uint64_t group_id = 0;     // random; rank 0's names the group among all that share a node
  SipKey token{};                 // random; rank 0's is what the ranks prove to one another
  Geometry geometry{};            // rank 0's holds
  std::uint64_t arena_bytes = 0;  // size of this process's arena, 0 if it has none
  std::uint64_t word = 0;         // GroupConfig's
  char boot_id[40] = {};
  char socket_name[40] = {};  // abstract, random
  char refusal[168] = {};     // why this rank will not share memory; empty if it will

  std::string to_bytes() const;
  // Throws Error (kSystem) if `bytes` is not a record of this build.
  static Hello parse(const std::string& bytes, int rank);
};

// Why the ranks with these records cannot share memory, or empty if they should try. A pure function
// of the records, hence the same answer on every rank.
std::string why_not_shared(std::span<const Hello> hellos);

}  // namespace fccl::cpu
