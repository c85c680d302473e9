// Passing file descriptors among the ranks of a group, for memory that is not the engine's own.
#include <atomic>
#include <string>
#include <vector>

#include "cpu/group_state.h"

namespace fccl::cpu {

namespace {

// A word that a waiting rank never sees reach 1: what it waits for comes over a socket.
const std::atomic<std::uint64_t> kNever{0};

}  // namespace

// Marked by the group's identity and the number of the call, so that the descriptors of a peer that is a call
// ahead are not taken for this one's.
std::vector<Descriptor> Group::exchange_descriptors(const Descriptor& own, const Deadline& deadline) {
  State& state = *state_;
  std::vector<Descriptor> received(static_cast<std::size_t>(state.world_size()));
  const Description description = Description::of(Collective::kGpuSetup, DType::kBytes, 0);
  run_call(state, description, deadline, [&](Call& call) {
    call.arrive();
    call.meet();
    const std::uint64_t tag = state.group_id + call.number();
    const auto member = [&](int peer) { return state.members[static_cast<std::size_t>(peer)]; };
    // From here on some ranks may have what they need and others not: trouble fails the group.
    const auto with_peers = [&](auto step) {
      for (int peer = 0; peer < state.world_size(); ++peer) {
        if (peer == state.rank()) continue;
        const auto check = [&] { call.check_peer(peer, kNever, 1); };
        try {
          step(peer, check);
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::kSystem && error.kind() != ErrorKind::kPeerDied) throw;
          check();  // a process that has ended is named so, not by what its socket says
          throw Error(ErrorKind::kPeerFailed, "fccl gpu_setup of " + state.where() + ": rank " +
                                                  std::to_string(peer) + ": " + error.what());
        }
      }
    };
    with_peers([&](int peer, const auto&) { state.node->send_descriptor(member(peer), tag, own); });
    with_peers([&](int peer, const auto& check) {
      received[static_cast<std::size_t>(peer)] =
          state.node->receive_descriptor(member(peer), tag, Deadline(), check);
    });
  });
  return received;
}

}  // namespace fccl::cpu
