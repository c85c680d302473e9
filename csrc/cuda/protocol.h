// How the kernels of different GPUs keep together.
//
// A launch has a number, its generation, the same on all ranks since all launch the same kernels in the same
// order. It is read from device memory by every block and counted up by the last block to finish: a launch
// argument would repeat when a CUDA graph is replayed.
//
//  1. announce(phase): a block has pushed its part into the peers' mailboxes. All its threads come to a
//     sync(); then one thread per peer releases that peer's signal. (So a block has at least as many threads
//     as there are ranks.)
//  2. await(phase): one thread per peer acquires its signal; after a sync() all threads may read what the
//     same block of each peer has pushed. Blocks of equal index work on equal parts: grids are equal on all
//     ranks.
//  3. Every kernel does both, towards all peers, even where no data flows (a broadcast's receivers announce
//     too). So a launch that is over proves that all peers have begun it, and therefore that they are done
//     with the launch before: launches of one rank run one after the other.
//  4. Launch g uses half g mod 2 of mailboxes and signals. A rank that writes that half again, in launch
//     g + 2, has finished g + 1, so by 3 every peer is done with g. Two halves are enough; one is not, and
//     neither are generations counted per block where grids differ from call to call: a block that sat out a
//     launch would know nothing of what its peers are still reading.
//  5. A signal is awaited by equality: by 4 its peer can be no generation further within this half.
//
// Failure: whoever waits polls its abort word and the clock. On expiry, or when a peer's description differs,
// the first thread to notice writes the failure to host memory and sets the abort word of every rank, itself
// included; all blocks then poison their part of the output and end. The group is not usable any more. A rank
// that comes later finds its abort word set, and fails before it sends anything.
#pragma once

#include "cuda/seam.h"
#include "cuda/workspace.h"

namespace fccl::cuda {

// Faults that tests inject, to prove that they would be found. All false in what is shipped.
struct NoFaults {
  static constexpr bool kNoFlagWait = false;        // await() does not wait
  static constexpr bool kRelaxedFlag = false;       // announce() does not release
  static constexpr bool kRelaxedWait = false;       // await() does not acquire
  static constexpr bool kNoSyncBeforeFlag = false;  // announce() does not wait for the block's other threads
  static constexpr bool kOneMailbox = false;        // the mailboxes of both halves are the same
  static constexpr bool kPerBlockCounters = false;  // each block counts its own launches
};

FCCL_KERNEL Control& control_of(const Session& session, int rank) {
  return *reinterpret_cast<Control*>(session.workspace[rank]);
}

template <class Faults>
class Protocol {
 public:
  FCCL_KERNEL explicit Protocol(const Session& session)
      : session_(session), own_(control_of(session, session.rank)) {
    generation_ =
        Faults::kPerBlockCounters ? own_.block_generation[block_index()] + 1 : load_relaxed(&own_.generation);
    deadline_ = clock_ns() + session.timeout_ns;
    half_ = static_cast<unsigned>(generation_ % 2);
  }

  // Whether the group was alive when this launch began; the same for all threads.
  FCCL_KERNEL bool alive() {
    bool aborted = false;
    if (thread_index() == 0) {
      const std::uint32_t abort = load_relaxed(&own_.abort);
      aborted = abort != 0;
      if (aborted) report(Failure::kAborted, abort - 1, 0);
    }
    return !sync_or(aborted);
  }

  // The mailboxes of this launch in `rank`'s workspace.
  FCCL_KERNEL Vector* mailbox(int rank) const {
    return reinterpret_cast<Vector*>(session_.workspace[rank] + sizeof(Control) +
                                     (Faults::kOneMailbox ? 0 : half_) * session_.half_bytes);
  }

  FCCL_KERNEL void announce(unsigned phase) {
    if (!Faults::kNoSyncBeforeFlag) sync();
    const unsigned peer = thread_index();
    if (peer >= static_cast<unsigned>(session_.world)) return;
    Signal& signal =
        control_of(session_, static_cast<int>(peer)).signals[half_][phase][block_index()][session_.rank];
    store_peer(&signal.description, session_.description);
    if (Faults::kRelaxedFlag) {
      store_relaxed(&signal.generation, generation_);
    } else {
      store_release(&signal.generation, generation_);
    }
  }

  // Whether all peers have announced `phase` of this very call; the same for all threads.
  FCCL_KERNEL bool await(unsigned phase) {
    const unsigned peer = thread_index();
    const bool failed = peer < static_cast<unsigned>(session_.world) &&
                        !await_peer(own_.signals[half_][phase][block_index()][peer], peer);
    return !sync_or(failed);
  }

  // The last thing a block does, whatever happened before.
  FCCL_KERNEL void finish() {
    sync();
    if (thread_index() != 0) return;
    if (Faults::kPerBlockCounters) {
      own_.block_generation[block_index()] = generation_;
      return;
    }
    if (fetch_add(&own_.finished_blocks, 1) + 1 == block_count()) {
      store_relaxed(&own_.finished_blocks, 0u);
      store_relaxed(&own_.generation, generation_ + 1);
    }
  }

 private:
  FCCL_KERNEL bool await_peer(Signal& signal, unsigned peer) {
    if (Faults::kNoFlagWait) return true;
    std::uint64_t theirs = 0;
    Failure failure = wait_for(signal, peer);
    if (failure == Failure::kNone) {
      theirs = load_mailbox(&signal.description);
      if (theirs == session_.description) return true;
      failure = Failure::kMismatch;
    }
    report(failure, peer, theirs);
    return false;
  }

  // Why the signal did not come; if a peer gave up, `peer` is that one then.
  FCCL_KERNEL Failure wait_for(const Signal& signal, unsigned& peer) {
    constexpr unsigned kTurnsBetweenChecks = 16;  // of abort word and clock, which cost more than the signal
    for (unsigned turn = 1;; ++turn) {
      const std::uint64_t seen =
          Faults::kRelaxedWait ? load_relaxed(&signal.generation) : load_acquire(&signal.generation);
      if (seen == generation_) return Failure::kNone;
      if (turn % kTurnsBetweenChecks == 0) {
        const std::uint32_t abort = load_relaxed(&own_.abort);
        if (abort != 0) {
          peer = abort - 1;
          return Failure::kAborted;
        }
        if (static_cast<std::int64_t>(clock_ns() - deadline_) > 0) return Failure::kExpired;
      }
      pause();
    }
  }

  // Returns once the failure stands in host memory and all peers can see their abort word. Only then may a
  // thread go on, for the next thing it does may be trap(), which ends this GPU's other threads and their
  // stores. So the own abort word, which lets the other blocks go on, is set last, and who is not the first
  // to report waits for the first: that one waits for nobody.
  FCCL_KERNEL void report(Failure failure, std::uint32_t peer, std::uint64_t theirs) {
    Status& status = *session_.status;
    if (!compare_exchange(&own_.reported, 0, 1)) {
      while (load_acquire(&status.failure) == 0) pause();
      return;
    }
    // One who was told need not tell: whoever gave up first has told all.
    if (failure != Failure::kAborted) {
      FCCL_NO_UNROLL
      for (int rank = 0; rank < session_.world; ++rank) {
        if (rank != session_.rank) set_abort(rank);
      }
    }
    store(&status.peer, peer);
    store(&status.generation, generation_);
    store(&status.mine, session_.description);
    store(&status.theirs, theirs);
    store(&status.timeout_ns, session_.timeout_ns);
    store_release(&status.failure, static_cast<std::uint32_t>(failure));
    flush();
    if (failure != Failure::kAborted) set_abort(session_.rank);
  }

  FCCL_KERNEL void set_abort(int rank) {
    store_relaxed(&control_of(session_, rank).abort, static_cast<std::uint32_t>(session_.rank) + 1);
  }

  const Session& session_;
  Control& own_;
  std::uint64_t generation_;
  std::uint64_t deadline_;
  unsigned half_;
};

}  // namespace fccl::cuda
