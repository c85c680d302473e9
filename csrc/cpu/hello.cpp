#include "cpu/hello.h"

#include <cstring>
#include <mutex>
#include <type_traits>

#include "common/error.h"
#include "common/text.h"
#include "cpu/environment.h"

namespace fccl::cpu {

static_assert(std::is_trivially_copyable_v<Hello>);

ProcessId this_process() {
  static std::mutex mutex;
  static ProcessId id{};
  static std::uint32_t made_in = 0;
  const std::lock_guard lock(mutex);
  if (id[0] == 0 || made_in != fork_generation()) {
    made_in = fork_generation();
    id = {random_u64(), random_u64()};
  }
  return id;
}

std::string Hello::to_bytes() const { return {reinterpret_cast<const char*>(this), sizeof(Hello)}; }

Hello Hello::parse(const std::string& bytes, int rank) {
  Hello hello;
  const std::string who = "rank " + std::to_string(rank);
  if (bytes.size() != sizeof(Hello)) {
    throw Error(ErrorKind::kSystem, who + " runs another build of fccl (its record in the store has " +
                                        std::to_string(bytes.size()) + " bytes, expected " +
                                        std::to_string(sizeof(Hello)) +
                                        "). Install one version on all ranks.");
  }
  std::memcpy(&hello, bytes.data(), sizeof(Hello));
  if (hello.magic != kMagic || hello.layout_version != kLayoutVersion) {
    throw Error(ErrorKind::kSystem, who + " runs another version of fccl (shared-memory layout " +
                                        std::to_string(hello.layout_version) + ", here " +
                                        std::to_string(kLayoutVersion) +
                                        "). Install one version on all ranks.");
  }
  make_printable(hello.boot_id);
  make_printable(hello.socket_name);
  make_printable(hello.refusal);
  return hello;
}

std::string why_not_shared(std::span<const Hello> hellos) {
  for (std::size_t rank = 0; rank < hellos.size(); ++rank) {
    if (hellos[rank].refusal[0] != '\0') return "rank " + std::to_string(rank) + ": " + hellos[rank].refusal;
  }
  for (std::size_t rank = 1; rank < hellos.size(); ++rank) {
    const Hello& a = hellos[0];
    const Hello& b = hellos[rank];
    const std::string pair = "ranks 0 and " + std::to_string(rank);
    if (std::strcmp(a.boot_id, b.boot_id) != 0) return pair + " run on different machines";
    if (a.network_namespace != b.network_namespace) {
      return pair +
             " run in different network namespaces (containers), where they cannot reach each other's socket";
    }
    if (a.geometry != b.geometry) return pair + " lay out their shared memory differently";
    for (std::size_t other = 0; other < rank; ++other) {
      if (hellos[other].process == b.process) {
        return "ranks " + std::to_string(other) + " and " + std::to_string(rank) + " are one process";
      }
    }
  }
  const Geometry& g = hellos[0].geometry;
  const auto sane = [](std::uint32_t bytes) {
    return bytes >= 1024 && bytes <= (64U << 20) && bytes % kLine == 0;
  };
  if (g.ranks != hellos.size() || !sane(g.one_shot_bytes) || !sane(g.chunk_bytes) || !sane(g.piece_bytes) ||
      g.depth < 1 || g.depth > 16 || std::uint64_t{g.piece_bytes} * hellos.size() != g.chunk_bytes) {
    return "rank 0 asks for slots of an impossible size";
  }
  return {};
}

}  // namespace fccl::cpu
