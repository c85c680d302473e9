// all_reduce over mailboxes: one-shot for small tensors, two-shot for larger ones. Push: stores to a peer's
// memory need not wait for the link, loads from it do.
//
// Both accumulate in rank order and round once, so results are the same on all ranks and for both algorithms.
// The input may be the output.
#pragma once

#include "cuda/push.h"

namespace fccl::cuda {

struct AllReduceArgs {
  Session session;
  const std::byte* input;
  std::byte* output;
  std::uint64_t bytes;
  ReduceOp op;
};

template <class Element, class Faults = NoFaults>
struct OneShotAllReduce {
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorOfCollectives;
  using Args = AllReduceArgs;

  // Of a half of the mailboxes: a slot for each rank.
  static std::uint64_t mailbox_bytes(std::uint64_t bytes, int world) {
    return vectors_in(bytes) * kVectorBytes * static_cast<std::uint64_t>(world);
  }

  // Everybody sends everything to everybody, and reduces everything.
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
      if (alive) {
        store_vector(args.output, args.bytes, v,
                     reduce_mailbox<Element>(mailbox + v, vectors, session.world, args.op));
      } else {
        store_vector(args.output, args.bytes, v, poison<Element>());
      }
    }
    protocol.finish();
  }
};

template <class Element, class Faults = NoFaults>
struct TwoShotAllReduce {
  static constexpr int kThreads = 512;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorOfCollectives;
  using Args = AllReduceArgs;

  static std::uint64_t mailbox_bytes(std::uint64_t bytes, int world) {
    return 2 * shard_vectors(bytes, world) * kVectorBytes * static_cast<std::uint64_t>(world);
  }

  // Rank r reduces shard r and sends the result to all.
  FCCL_KERNEL static void run(const Args& args) {
    const Session& session = args.session;
    Protocol<Faults> protocol(session);
    const std::uint64_t vectors = vectors_in(args.bytes);
    const std::uint64_t shard = shard_vectors(args.bytes, session.world);
    const std::uint64_t first = first_thread();
    const std::uint64_t step = threads_of_grid();
    const Vector* own = protocol.mailbox(session.rank);
    bool alive = protocol.alive();
    if (alive) {
      for (std::uint64_t v = first; v < shard; v += step) {
        for (int i = 0; i < session.world; ++i) {
          const int peer = (session.rank + i) % session.world;
          const std::uint64_t at = static_cast<std::uint64_t>(peer) * shard + v;
          if (at >= vectors) continue;
          store_peer(protocol.mailbox(peer) + static_cast<std::uint64_t>(session.rank) * shard + v,
                     load_vector(args.input, args.bytes, at));
        }
      }
      protocol.announce(0);
      alive = protocol.await(0);
    }
    if (alive) {
      for (std::uint64_t v = first; v < shard; v += step) {
        if (static_cast<std::uint64_t>(session.rank) * shard + v >= vectors) break;
        const Vector result = reduce_mailbox<Element>(own + v, shard, session.world, args.op);
        FCCL_NO_UNROLL
        for (int i = 0; i < session.world; ++i) {
          const int peer = (session.rank + i) % session.world;
          store_peer(
              protocol.mailbox(peer) + static_cast<std::uint64_t>(session.world + session.rank) * shard + v,
              result);
        }
      }
      protocol.announce(1);
      alive = protocol.await(1);
    }
    for (std::uint64_t v = first; v < shard; v += step) {
      for (int rank = 0; rank < session.world; ++rank) {
        const std::uint64_t at = static_cast<std::uint64_t>(rank) * shard + v;
        if (at >= vectors) break;
        const Vector result =
            alive ? load_mailbox(own + static_cast<std::uint64_t>(session.world + rank) * shard + v)
                  : poison<Element>();
        store_vector(args.output, args.bytes, at, result);
      }
    }
    protocol.finish();
  }

 private:
  FCCL_HOST_DEVICE static constexpr std::uint64_t shard_vectors(std::uint64_t bytes, int world) {
    return (vectors_in(bytes) + world - 1) / world;
  }
};

}  // namespace fccl::cuda
