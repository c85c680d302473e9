// What one-shot kernels have in common: everybody sends all it has to everybody.
#pragma once

#include "cuda/elements.h"
#include "cuda/protocol.h"

namespace fccl::cuda {

// A grid has at most kMaxBlocks blocks, and a GPU worth communicating with has more multiprocessors: each
// block gets one to itself.
inline constexpr int kBlocksPerMultiprocessorOfCollectives = 1;

// This block's part of the tensor, into slot `rank` of every rank's mailboxes; slots are as long as the
// tensor. The own mailbox gets it too: so all ranks' data lies in one place and has one alignment.
template <class Faults>
FCCL_KERNEL void push_to_all(const Session& session, const Protocol<Faults>& protocol,
                             const std::byte* tensor, std::uint64_t bytes) {
  const std::uint64_t vectors = vectors_in(bytes);
  for (std::uint64_t v = first_thread(); v < vectors; v += threads_of_grid()) {
    const Vector value = load_vector(tensor, bytes, v);
    for (int i = 0; i < session.world; ++i) {
      const int peer = (session.rank + i) % session.world;  // not all to the same one at once
      store_peer(protocol.mailbox(peer) + static_cast<std::uint64_t>(session.rank) * vectors + v, value);
    }
  }
}

}  // namespace fccl::cuda
