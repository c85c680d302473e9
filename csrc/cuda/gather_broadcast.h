// One-shot all_gather and broadcast over mailboxes. They move bytes: the element type only says what a
// failure leaves in the output.
#pragma once

#include "cuda/push.h"

namespace fccl::cuda {

struct AllGatherArgs {
  Session session;
  const std::byte* input;  // `bytes` of it; may lie at its place in the output
  std::byte* output;       // `bytes` for each rank
  std::uint64_t bytes;
};

template <class Element, class Faults = NoFaults>
struct OneShotAllGather {
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorOfCollectives;
  using Args = AllGatherArgs;

  static std::uint64_t mailbox_bytes(std::uint64_t bytes, int world) {
    return vectors_in(bytes) * kVectorBytes * static_cast<std::uint64_t>(world);
  }

  FCCL_KERNEL static void run(const Args& args) {
    const Session& session = args.session;
    Protocol<Faults> protocol(session);
    const std::uint64_t vectors = vectors_in(args.bytes);
    const std::uint64_t first = first_thread();
    const std::uint64_t step = threads_of_grid();
    bool alive = protocol.alive();
    if (alive) {
      push_to_all(session, protocol, args.input, args.bytes);
      protocol.announce(0);
      alive = protocol.await(0);
    }
    const Vector* mailbox = protocol.mailbox(session.rank);
    for (std::uint64_t v = first; v < vectors; v += step) {
      for (int rank = 0; rank < session.world; ++rank) {
        const Vector value = alive ? load_mailbox(mailbox + static_cast<std::uint64_t>(rank) * vectors + v)
                                   : poison<Element>();
        store_vector(args.output + static_cast<std::uint64_t>(rank) * args.bytes, args.bytes, v, value);
      }
    }
    protocol.finish();
  }
};

struct BroadcastArgs {
  Session session;
  std::byte* buffer;
  std::uint64_t bytes;
  std::int32_t root;
};

template <class Element, class Faults = NoFaults>
struct Broadcast {
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorOfCollectives;
  using Args = BroadcastArgs;

  static std::uint64_t mailbox_bytes(std::uint64_t bytes, int) { return vectors_in(bytes) * kVectorBytes; }

  // The others announce to the root, too, and it waits for them: rule 3 of protocol.h.
  FCCL_KERNEL static void run(const Args& args) {
    const Session& session = args.session;
    Protocol<Faults> protocol(session);
    const std::uint64_t vectors = vectors_in(args.bytes);
    const std::uint64_t first = first_thread();
    const std::uint64_t step = threads_of_grid();
    bool alive = protocol.alive();
    if (alive) {
      if (session.rank == args.root) {
        for (std::uint64_t v = first; v < vectors; v += step) {
          const Vector value = load_vector(args.buffer, args.bytes, v);
          for (int i = 1; i < session.world; ++i) {
            store_peer(protocol.mailbox((session.rank + i) % session.world) + v, value);
          }
        }
      }
      protocol.announce(0);
      alive = protocol.await(0);
    }
    if (session.rank != args.root || !alive) {
      const Vector* mailbox = protocol.mailbox(session.rank);
      for (std::uint64_t v = first; v < vectors; v += step) {
        store_vector(args.buffer, args.bytes, v, alive ? load_mailbox(mailbox + v) : poison<Element>());
      }
    }
    protocol.finish();
  }
};

}  // namespace fccl::cuda
